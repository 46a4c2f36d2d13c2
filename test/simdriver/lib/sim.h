/* The simulated driver: an NVML library whose machine is a text file.
 *
 * machine.c  the file: parsing, re-reading when it changes
 * state.c    the process: init, shutdown, handles, the entry of every call, violations, counters
 * nodes.c    the device nodes that it holds open
 * faults.c   calls that fail, hang or crawl because the file `faults` sets it
 * events.c   event sets, device and system events
 * opevents.c operational events, and the other calls that drivers have from 615 on
 * calls.c    enumeration, lookup, MIG
 * values.c   what one GPU answers
 * fields.c   field values, links, fabric
 * memacct.c  limits of memory by control group; cgroups.c has the groups, dmem.c the backend dmem
 */
#ifndef SIM_H
#define SIM_H

#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS /* name every version literally */
#include "nvml.h"

#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>
#include <sys/stat.h>
#include <time.h>

typedef unsigned long long u64;

#define UNSET 0x8000000000000000ULL /* a number that the file does not give */
#define WORD 96
#define PATH_SIZE 1024
#define NOWHERE 0xFFFFFFFFu /* gpuInstanceId, computeInstanceId: not attributable */

enum { MAX_GPUS = 64, MAX_INSTANCES = 16, MAX_FIELDS = 48, MAX_PROCESSES = 16, MAX_UNSUPPORTED = 64,
       MAX_PROFILES = 32, MAX_SWITCHES = 16 };

#define KEY_TEXT(n) char n[WORD];
#define KEY_NUM(n) u64 n;
#define KEY_FLAG(n) u64 n;
#define KEY_BRAND(n) u64 n;
#define KEY_ARCH(n) u64 n;
#define KEY_VIRT(n) u64 n;
#define KEY_CC(n) u64 n;
#define KEY(n, kind) KEY_##kind(n)

struct field { unsigned id, scope; u64 value; nvmlReturn_t ret; };
struct process { unsigned pid; u64 memory; unsigned gi, ci; };

struct profile {
    char name[WORD];
    u64 gi_profile, gi_profile_id, ci_profile, ci_profile_id; /* NVML_*_INSTANCE_PROFILE_* and its id */
    u64 slices, compute_slices, size, max;
    u64 memory; /* bytes */
    u64 multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
};

struct instance { /* one MIG device */
    char uuid[WORD];
    struct profile profile;
    unsigned index, gi, ci, start;
    u64 memory_used, bar1_used, ecc_uncorrected;
};

struct gpu {
    unsigned slot; /* N of [gpu N]; the index is the position among the [gpu] sections */
#include "keys.def"
    unsigned domain, bus, dev; /* from pci */
    int instances, fields, processes, unsupporteds;
    struct instance instance[MAX_INSTANCES];
    struct field field[MAX_FIELDS];
    struct process process[MAX_PROCESSES];
    char unsupported[MAX_UNSUPPORTED][64];
};

#undef KEY

struct machine {
    int refs;
    char driver[WORD], library[WORD], nvml[WORD];
    u64 cuda, loaded, incarnation, boots, wait_lost_once;
    char memacct[WORD], memacct_controller[WORD], limited_total[WORD]; /* of memacct.c */
    char cgroup_mount[PATH_SIZE];
    u64 reuse_groups;
    int gpus, profiles, switches;
    struct gpu *gpu;
    struct profile profile[MAX_PROFILES];
    char switch_pci[MAX_SWITCHES][WORD];
    unsigned char links[MAX_GPUS][MAX_GPUS];    /* NVLinks between two GPUs, by index */
    unsigned char topology[MAX_GPUS][MAX_GPUS]; /* nvmlGpuTopologyLevel_t, by index */
};

/* machine.c. A machine is immutable once parsed; drop() what current() gave. */
bool sim_find(char *dir, size_t size);                    /* the machine's directory */
struct machine *sim_parse(const char *dir, char *why, size_t size); /* NULL and why */
void sim_drop(struct machine *m);
bool sim_text_number(const char *s, u64 *out);
bool sim_return_code(const char *s, nvmlReturn_t *out);   /* "GPU_IS_LOST", "NVML_ERROR_UNKNOWN", "15" */
const char *sim_return_text(nvmlReturn_t r);
bool sim_has_limits(const struct machine *m);             /* the driver's branch has calls about limits of memory */
char *sim_read_file(const char *dir, const char *name);   /* malloc'd text or NULL */

/* A file's identity: changes whenever the file was replaced or written. */
struct stamp { ino_t ino; off_t size; struct timespec mtime; bool there; };
bool sim_stamp(const char *dir, const char *name, struct stamp *s); /* false when equal to *s; updates it */

/* state.c */
struct handle; /* what an nvmlDevice_t points at */

struct call {
    const char *name;
    struct machine *m;
    struct gpu *gpu;        /* NULL for calls without a GPU */
    struct instance *mig;   /* NULL unless the handle is a MIG device */
    struct handle *handle;
    bool busy, counted;
};

nvmlReturn_t sim_enter(struct call *c, const char *name, int *counter);
nvmlReturn_t sim_enter_gpu(struct call *c, const char *name, int *counter, const void *handle);
nvmlReturn_t sim_enter_undriven(struct call *c, const char *name, int *counter); /* works without a driver */
nvmlReturn_t sim_enter_free(struct call *c, const char *name, int *counter);     /* and looks for faults itself */
nvmlReturn_t sim_enter_any(struct call *c, const char *name, int *counter);      /* works without init */
nvmlReturn_t sim_refresh(struct call *c);               /* take the machine as it is now */
void sim_occupy(struct call *c, struct gpu *g);         /* two calls at once on one GPU are a misuse */
nvmlReturn_t sim_judge(struct call *c);                 /* faults, loss, unsupported: for a GPU found by lookup */
void sim_leave(struct call *c);
nvmlDevice_t sim_gpu_handle(struct gpu *g);
nvmlDevice_t sim_mig_handle(struct gpu *g, struct instance *mi);
struct gpu *sim_handle_gpu(struct machine *m, nvmlDevice_t device);
void *sim_instance_handle(struct gpu *g, unsigned gi, unsigned ci); /* GPU and compute instances */
nvmlReturn_t sim_enter_instance(struct call *c, const char *name, int *counter, const void *handle,
                                unsigned *gi, unsigned *ci);
bool sim_session_over(unsigned generation);
unsigned sim_generation(void);
const char *sim_dir(void);
void sim_violation(const char *call, const char *fmt, ...);

const char *sim_library(void); /* the version that this process's library is of */

/* nodes.c, under the lock of state.c */
void sim_hold_control(const char *dir);
void sim_hold_gpu(const char *dir, const struct gpu *g);
void sim_release_nodes(void);

/* Every exported function starts with one of these; the call is left by the cleanup attribute. */
#define ENTER_WITH(fn, ...)                                                                          \
    static int counter_ = -1;                                                                        \
    struct call c __attribute__((cleanup(sim_leave))) = {0};                                         \
    { nvmlReturn_t ret_ = fn(&c, __func__, &counter_, ##__VA_ARGS__); if (ret_) return ret_; }
#define ENTER() ENTER_WITH(sim_enter)
#define ENTER_GPU(d) ENTER_WITH(sim_enter_gpu, (d).handle)
#define WHOLE_GPU_ONLY() do { if (c.mig) return NVML_ERROR_NOT_SUPPORTED; } while (0)
#define NEED(p) do { if (!(p)) return NVML_ERROR_INVALID_ARGUMENT; } while (0)

/* faults.c: hang and crawl as told; the code to answer with, or NVML_SUCCESS. slot -1 = no GPU. */
nvmlReturn_t sim_fault(const char *call, int slot, const char *uuid);

/* fields.c */
void sim_cluster_bytes(const char *text, unsigned char *out); /* 16 bytes from the hex digits of a UUID */

/* A watch wakes when anything in the machine's directory changes; it polls where inotify is refused. */
struct watch { int fd; };
void sim_watch_open(struct watch *w);
void sim_watch_close(struct watch *w);
void sim_watch_wait(struct watch *w, int wakefd, long long ms); /* change, wakefd or ms (<0: long) */

/* opevents.c */
enum { MAX_CONTEXTS = 8 };
struct operational {
    char uuid[WORD], module[16]; /* module need not end with a zero */
    u64 severity, level, code, attributes, group_attributes, group;
    int contexts;
    u64 xid[MAX_CONTEXTS]; /* UNSET: a context of another type */
};
bool sim_parse_operational(const char *line, struct operational *o); /* a line of the file events; false for any other */
bool sim_since(unsigned branch); /* whether this process's library is of that branch or a later one */

/* A call that libraries before a branch lack: it answers as go-nvml does for a symbol that is not there, and is not counted. */
#define SINCE(branch) do { if (!sim_since(branch)) return NVML_ERROR_FUNCTION_NOT_FOUND; } while (0)

/* events.c */
struct event {
    nvmlDevice_t device;
    char uuid[WORD];
    u64 type, data;
    unsigned gi, ci;
    bool structured; /* then only uuid and operational */
    struct operational operational;
};
struct set;
struct set *sim_begin_use(const void *set); /* a call is about to use a set */
void sim_end_use(struct set **set);
nvmlReturn_t sim_event_wait(struct call *c, const char *name, const void *set, unsigned timeoutms, bool v3, struct event *e);
nvmlReturn_t sim_register_operational(const char *call, const void *set, const char *uuid, unsigned level, unsigned severity);
nvmlReturn_t sim_last_operational(const char *call, const void *set, struct operational *last); /* that a wait returned last */
void sim_events_shutdown(void);
int sim_events_waiting(void);

#endif
