/* The backend dmem of memacct.c: see dmem.c. The caller has the lock of the state. */
#ifndef DMEM_H
#define DMEM_H

#include "cgroups.h"
#include "memacct.h"

void dmem_region(struct gpu *g, char *name, size_t size); /* the name of a GPU's region */
nvmlReturn_t dmem_set(struct machine *m, const char *group, const char *region, u64 soft, u64 hard);
nvmlReturn_t dmem_get(struct machine *m, const char *group, const char *region, nvmlGetMemoryLimits_v1_t *l);

/* try_charge of dmem.c: every level has to have room. A group without the controller has no counter of its own. */
bool dmem_charge(struct machine *m, const char *group, const char *region, u64 bytes);

/* What a group that has ended had stays with the groups above it. */
void dmem_release(struct machine *m, const char *group, const identity of, const char *region, u64 bytes);

void dmem_unregister(struct machine *m, struct gpu *g); /* no group has the region of a GPU */

#endif
