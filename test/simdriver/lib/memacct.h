/* Limits of memory by control group, as memacct.c of NVIDIA's open kernel modules 615.71.09 has them, and the dmem controller of Linux 6.14.
 *
 * The state of all processes of a machine is the file `memacct` in its folder, in lines of words. Whoever reads or changes it holds a lock on it (flock). The
 * rules are used by the library (Set, Get, memory totals), by the program memacct of the Go control, and by test/cudastub. */
#ifndef MEMACCT_H
#define MEMACCT_H

#include "sim.h"

#define NO_LIMIT (~0ULL) /* NVML_DEVICE_MEMORY_LIMIT_MAX */
#define CONTROL 0        /* the client of the Go control, which never ends */

nvmlReturn_t memacct_set(const char *dir, struct machine *m, struct gpu *g, const char *group, u64 soft, u64 hard);
nvmlReturn_t memacct_get(const char *dir, struct machine *m, struct gpu *g, const char *group, nvmlGetMemoryLimits_v1_t *limits);

/* Charges an allocation to the group of its creator; NULL: the creator has ended. False: out of memory. id is 0 if nothing was charged. */
bool memacct_allocate(const char *dir, struct machine *m, struct gpu *g, const char *group, u64 bytes, u64 client, u64 *id);
void memacct_import(const char *dir, struct machine *m, u64 id, u64 client);  /* one more client has the allocation */
void memacct_release(const char *dir, struct machine *m, u64 id, u64 client); /* this client has it no longer */

u64 memacct_client(const char *dir, struct machine *m);                /* this process; its allocations end with it */
bool memacct_own_group(struct machine *m, char *path);                 /* of this process; path has PATH_MAX bytes */
bool memacct_own_limit(const char *dir, struct machine *m, struct gpu *g, nvmlGetMemoryLimits_v1_t *limits); /* false: none */

/* A group gets the address of one that has ended. False, and errno, if there is none, or no such group. */
bool memacct_reuse(const char *dir, struct machine *m, const char *ended, const char *group);

#endif
