/* The process's side of the driver: init and shutdown, handles, the entry of every call,
 * recorded misuse and call counters. */
#include "sim.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Handles are interned and never freed: the same unit has the same handle within one generation, and a
 * handle of an earlier generation can still be recognised as stale. */
struct handle {
    struct handle *next;
    enum { H_GPU, H_MIG, H_INSTANCE } kind;
    unsigned generation, gi, ci;
    u64 resets;              /* of the GPU when the handle was given out */
    char uuid[WORD], parent[WORD];
    struct handle *gpu;      /* of a MIG or instance handle: its GPU's, which carries busy */
    const char *busy;        /* the call now inside the driver for this GPU */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles;
static unsigned generation = 1; /* grows at every last shutdown */
static int inits;               /* init calls not yet shut down */
static int inside;              /* calls in progress, event waits excepted */
static struct machine *machine; /* as last read */
static struct stamp stamp;
static char dir[PATH_MAX];
static char session_driver[WORD];
static u64 session_incarnation;
static char process_dir[PATH_MAX], process_library[WORD]; /* the library that this process has mapped */

/* A file of a version of its own has it behind the colon (driver.go writes it there), whatever becomes of the
 * file that was mapped. Without that it is of the version that machine.conf gave at this process's first init. */
#define STAMP "simdriver library version:"
static const volatile char library_stamp[sizeof STAMP - 1 + WORD] __attribute__((used)) = STAMP;

const char *sim_dir(void) { return dir; }
const char *sim_library(void) { return process_library; }
unsigned sim_generation(void) { return __atomic_load_n(&generation, __ATOMIC_ACQUIRE); }

/* ---- misuse ---- */

void sim_violation(const char *call, const char *fmt, ...)
{
    char path[PATH_MAX + 16], text[512];
    va_list args;
    int n = snprintf(text, sizeof text, "pid %d %s: ", (int)getpid(), call);
    va_start(args, fmt);
    n += vsnprintf(text + n, sizeof text - (size_t)n - 1, fmt, args);
    va_end(args);
    if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
    text[n++] = '\n';
    /* A call before the first init has no machine yet. */
    if (!*dir && !sim_find(dir, sizeof dir)) { fprintf(stderr, "simdriver: %.*s", n, text); return; }
    snprintf(path, sizeof path, "%s/violations", dir);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, text, (size_t)n) != n) fprintf(stderr, "simdriver: %.*s", n, text);
    if (fd >= 0) close(fd);
}

/* ---- counters: <machine>/calls/<pid>.<ns>, an array of {name[56], count} ---- */

enum { MAX_COUNTERS = 256 };
struct counter { char name[56]; u64 count; };
static struct counter *counters, unfiled[MAX_COUNTERS];
static int counters_used;
static char counters_dir[PATH_MAX];

/* Under lock: the counters move to the machine's folder, once per machine. */
static void file_counters(void)
{
    char path[PATH_MAX + 32];
    if (counters && !strcmp(counters_dir, dir)) return;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t); /* a pid comes back, and every container has a pid 1 */
    snprintf(path, sizeof path, "%s/calls/%d.%lld", dir, (int)getpid(), t.tv_sec * 1000000000LL + t.tv_nsec);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    void *at = MAP_FAILED;
    if (fd >= 0 && !ftruncate(fd, sizeof unfiled))
        at = mmap(NULL, sizeof unfiled, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    struct counter *to = at == MAP_FAILED ? unfiled : at;
    for (int i = 0; i < counters_used; i++) /* names keep their places; earlier counts belong elsewhere */
        memcpy(to[i].name, unfiled[i].name, sizeof to[i].name);
    snprintf(counters_dir, sizeof counters_dir, "%s", dir);
    __atomic_store_n(&counters, to, __ATOMIC_RELEASE); /* an old mapping stays: a call may be counting */
}

static void count_call(const char *name, int *counter)
{
    int i = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
    if (i < 0) {
        pthread_mutex_lock(&lock);
        if (*counter < 0 && counters_used < MAX_COUNTERS) {
            snprintf(unfiled[counters_used].name, sizeof unfiled[0].name, "%s", name);
            if (counters && counters != unfiled)
                memcpy(counters[counters_used].name, unfiled[counters_used].name, sizeof unfiled[0].name);
            __atomic_store_n(counter, counters_used++, __ATOMIC_RELEASE);
        }
        i = *counter;
        pthread_mutex_unlock(&lock);
        if (i < 0) return;
    }
    struct counter *to = __atomic_load_n(&counters, __ATOMIC_ACQUIRE);
    __atomic_fetch_add(&(to ? to : unfiled)[i].count, 1, __ATOMIC_RELAXED);
}

/* ---- the machine as this process sees it ---- */

/* Under lock. A file that no longer parses keeps the machine as it was, and is recorded. */
static bool reread(void)
{
    char why[512] = "";
    if (!sim_stamp(dir, "machine.conf", &stamp) && machine) return true;
    struct machine *m = sim_parse(dir, why, sizeof why);
    if (!m) {
        fprintf(stderr, "simdriver: %s\n", why);
        if (machine) sim_violation("machine.conf", "%s", why);
        return machine != NULL;
    }
    sim_drop(machine);
    machine = m;
    return true;
}

static struct machine *take(void)
{
    if (!reread()) return NULL;
    __atomic_add_fetch(&machine->refs, 1, __ATOMIC_ACQ_REL);
    return machine;
}

static nvmlReturn_t session_state(const struct machine *m)
{
    if (!m->loaded || m->incarnation != session_incarnation || strcmp(m->driver, session_driver))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    return NVML_SUCCESS;
}

static nvmlReturn_t init(const char *call)
{
    static int counter = -1, counter2 = -1, counter3 = -1;
    int *of = !strcmp(call, "nvmlInit") ? &counter : !strcmp(call, "nvmlInit_v2") ? &counter2 : &counter3;
    pthread_mutex_lock(&lock);
    char found[PATH_MAX];
    nvmlReturn_t ret = NVML_SUCCESS;
    if (!inits) {
        if (!sim_find(found, sizeof found)) {
            fprintf(stderr, "simdriver: no machine: set SIMDRIVER_MACHINE or keep the library under a folder with machine.conf\n");
            ret = NVML_ERROR_DRIVER_NOT_LOADED;
        } else if (strcmp(found, dir) || !machine) {
            sim_drop(machine);
            machine = NULL;
            memset(&stamp, 0, sizeof stamp);
            snprintf(dir, sizeof dir, "%s", found);
        }
    }
    if (!ret) file_counters();
    pthread_mutex_unlock(&lock);
    count_call(call, of);
    if (!ret) ret = sim_fault(call, -1, NULL);
    if (ret) return ret;
    pthread_mutex_lock(&lock);
    if (!reread()) ret = NVML_ERROR_UNKNOWN;
    else if (!machine->loaded) ret = NVML_ERROR_DRIVER_NOT_LOADED;
    else {
        if (strcmp(process_dir, dir)) { /* the first init of this process maps the library */
            snprintf(process_dir, sizeof process_dir, "%s", dir);
            memcpy(process_library, machine->library, sizeof process_library);
            for (size_t i = 0; library_stamp[sizeof STAMP - 1] && i < WORD; i++) process_library[i] = library_stamp[sizeof STAMP - 1 + i];
        }
        if (strcmp(process_library, machine->driver)) ret = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    if (!ret && !inits++) {
        memcpy(session_driver, machine->driver, sizeof session_driver);
        session_incarnation = machine->incarnation;
        sim_hold_control(dir);
    }
    pthread_mutex_unlock(&lock);
    return ret;
}

nvmlReturn_t nvmlInit(void) { return init("nvmlInit"); }
nvmlReturn_t nvmlInit_v2(void) { return init("nvmlInit_v2"); }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return init("nvmlInitWithFlags"); }

nvmlReturn_t nvmlShutdown(void)
{
    static int counter = -1;
    count_call(__func__, &counter);
    nvmlReturn_t ret = inits ? sim_fault(__func__, -1, NULL) : NVML_SUCCESS;
    if (ret) return ret;
    pthread_mutex_lock(&lock);
    bool last = inits == 1;
    int waiting = last ? sim_events_waiting() : 0;
    if (!inits) ret = NVML_ERROR_UNINITIALIZED;
    else if (--inits == 0) {
        __atomic_add_fetch(&generation, 1, __ATOMIC_ACQ_REL);
        sim_release_nodes();
    }
    int busy = inside;
    pthread_mutex_unlock(&lock);
    if (ret) sim_violation(__func__, "called without init");
    if (last && busy) sim_violation(__func__, "called while %d calls are in progress", busy);
    if (last && waiting) sim_violation(__func__, "called while %d event waits are in progress", waiting);
    if (last) sim_events_shutdown();
    return ret;
}

bool sim_session_over(unsigned g) { return g != sim_generation(); }

/* ---- handles ---- */

static struct handle *intern(int kind, const char *uuid, const struct gpu *g, unsigned gi, unsigned ci)
{
    pthread_mutex_lock(&lock);
    struct handle *gpu = NULL, *h;
    for (h = handles; h; h = h->next)
        if (h->kind == H_GPU && h->generation == generation && h->resets == g->resets && !strcmp(h->uuid, g->uuid)) gpu = h;
    for (h = handles; h; h = h->next)
        if ((int)h->kind == kind && h->generation == generation && h->resets == g->resets && h->gi == gi && h->ci == ci && !strcmp(h->uuid, uuid)) break;
    if (!h) {
        h = calloc(1, sizeof *h);
        h->kind = kind;
        h->generation = generation;
        h->gi = gi;
        h->ci = ci;
        snprintf(h->uuid, sizeof h->uuid, "%s", uuid);
        h->resets = g->resets;
        snprintf(h->parent, sizeof h->parent, "%s", g->uuid);
        h->gpu = kind == H_GPU ? h : gpu;
        h->next = handles;
        handles = h;
        if (kind == H_GPU && inits) sim_hold_gpu(dir, g);
    }
    pthread_mutex_unlock(&lock);
    return h;
}

nvmlDevice_t sim_gpu_handle(struct gpu *g)
{
    return (nvmlDevice_t){(struct nvmlDevice_st *)intern(H_GPU, g->uuid, g, NOWHERE, NOWHERE)};
}

nvmlDevice_t sim_mig_handle(struct gpu *g, struct instance *mi)
{
    sim_gpu_handle(g);
    return (nvmlDevice_t){(struct nvmlDevice_st *)intern(H_MIG, mi->uuid, g, mi->gi, mi->ci)};
}

void *sim_instance_handle(struct gpu *g, unsigned gi, unsigned ci)
{
    sim_gpu_handle(g);
    return intern(H_INSTANCE, g->uuid, g, gi, ci);
}

/* Under lock: the handle, if this library ever gave it out. */
static struct handle *known(const void *p)
{
    for (struct handle *h = handles; h; h = h->next)
        if (h == p) return h;
    return NULL;
}

static struct gpu *gpu_by_uuid(struct machine *m, const char *uuid)
{
    for (int i = 0; i < m->gpus; i++)
        if (!strcmp(m->gpu[i].uuid, uuid)) return &m->gpu[i];
    return NULL;
}

/* The GPU of a second handle argument; NULL when it is not a live GPU's. */
struct gpu *sim_handle_gpu(struct machine *m, nvmlDevice_t device)
{
    pthread_mutex_lock(&lock);
    struct handle *h = known(device.handle);
    if (h && (h->generation != generation || h->kind != H_GPU)) h = NULL;
    pthread_mutex_unlock(&lock);
    return h ? gpu_by_uuid(m, h->uuid) : NULL;
}

/* ---- entering and leaving ---- */

nvmlReturn_t sim_enter_free(struct call *c, const char *name, int *counter)
{
    c->name = name;
    count_call(name, counter);
    pthread_mutex_lock(&lock);
    bool ready = inits > 0;
    if (ready) {
        c->m = take();
        c->counted = true;
        inside++;
    }
    pthread_mutex_unlock(&lock);
    if (!ready) sim_violation(name, "called before init or after shutdown");
    return ready ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t sim_enter_undriven(struct call *c, const char *name, int *counter)
{
    nvmlReturn_t ret = sim_enter_free(c, name, counter);
    return ret ? ret : sim_fault(name, -1, NULL);
}

nvmlReturn_t sim_enter_any(struct call *c, const char *name, int *counter)
{
    c->name = name;
    count_call(name, counter);
    nvmlReturn_t ret = sim_fault(name, -1, NULL);
    pthread_mutex_lock(&lock);
    if (*dir) c->m = take();
    pthread_mutex_unlock(&lock);
    return ret;
}

nvmlReturn_t sim_refresh(struct call *c)
{
    pthread_mutex_lock(&lock);
    struct machine *m = take();
    sim_drop(c->m);
    c->m = m;
    nvmlReturn_t ret = session_state(m);
    pthread_mutex_unlock(&lock);
    return ret;
}

nvmlReturn_t sim_enter(struct call *c, const char *name, int *counter)
{
    nvmlReturn_t ret = sim_enter_free(c, name, counter);
    if (!ret) ret = session_state(c->m);
    if (!ret) ret = sim_fault(name, -1, NULL);
    return ret ? ret : sim_refresh(c);
}

/* A lookup is a call on the GPU that it finds. */
void sim_occupy(struct call *c, struct gpu *g)
{
    struct handle *h = (struct handle *)sim_gpu_handle(g).handle;
    pthread_mutex_lock(&lock);
    const char *other = h->busy;
    if (!other) { h->busy = c->name; c->handle = h; c->busy = true; }
    pthread_mutex_unlock(&lock);
    if (other) sim_violation(c->name, "called on %s while %s is in progress on that GPU", h->parent, other);
}

/* What the GPU found as c->gpu answers before the call itself is considered. */
nvmlReturn_t sim_judge(struct call *c)
{
    struct gpu *g = c->gpu;
    if (g->lost == 1) return NVML_ERROR_GPU_IS_LOST;
    for (int i = 0; i < g->unsupporteds; i++) {
        size_t n = strlen(g->unsupported[i]);
        if (!fnmatch(g->unsupported[i], c->name, 0) || (!strncmp(c->name, g->unsupported[i], n) && !strncmp(c->name + n, "_v", 2)))
            return NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t find_unit(struct call *c)
{
    struct handle *h = c->handle;
    c->gpu = gpu_by_uuid(c->m, h->parent);
    c->mig = NULL;
    if (!c->gpu) return NVML_ERROR_GPU_IS_LOST; /* removed from under the handle */
    if (h->resets != c->gpu->resets) return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; h->kind == H_MIG && i < c->gpu->instances; i++)
        if (!strcmp(c->gpu->instance[i].uuid, h->uuid)) c->mig = &c->gpu->instance[i];
    /* nvml.h: the handle of a destroyed compute instance "would remain invalid". */
    return h->kind == H_MIG && (!c->mig || c->gpu->mig != 1) ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

static nvmlReturn_t enter_handle(struct call *c, const char *name, int *counter, const void *handle, bool instance)
{
    nvmlReturn_t ret = sim_enter_free(c, name, counter);
    if (ret) return ret;
    pthread_mutex_lock(&lock);
    struct handle *h = known(handle);
    const char *wrong = NULL;
    if (!handle) wrong = "null handle";
    else if (!h) wrong = "handle that was never given out";
    else if (h->generation != generation) wrong = "stale handle, from before a shutdown";
    else if ((h->kind == H_INSTANCE) != instance) wrong = "handle of another kind";
    const char *other = NULL;
    if (!wrong) {
        c->handle = h;
        if ((other = h->gpu->busy) == NULL) { h->gpu->busy = name; c->busy = true; }
    }
    pthread_mutex_unlock(&lock);
    if (wrong) { sim_violation(name, "%s", wrong); return NVML_ERROR_INVALID_ARGUMENT; }
    if (other) sim_violation(name, "called on %s while %s is in progress on that GPU", h->parent, other);
    if ((ret = session_state(c->m))) return ret;
    struct gpu *g = gpu_by_uuid(c->m, h->parent);
    if ((ret = sim_fault(name, g ? (int)g->slot : -1, h->parent))) return ret;
    if ((ret = sim_refresh(c))) return ret; /* it may have hung or crawled */
    if ((ret = find_unit(c))) return ret;
    return sim_judge(c);
}

nvmlReturn_t sim_enter_gpu(struct call *c, const char *name, int *counter, const void *handle)
{
    return enter_handle(c, name, counter, handle, false);
}

nvmlReturn_t sim_enter_instance(struct call *c, const char *name, int *counter, const void *handle,
                                unsigned *gi, unsigned *ci)
{
    nvmlReturn_t ret = enter_handle(c, name, counter, handle, true);
    if (ret) return ret;
    *gi = c->handle->gi;
    *ci = c->handle->ci;
    return NVML_SUCCESS;
}

void sim_leave(struct call *c)
{
    pthread_mutex_lock(&lock);
    if (c->busy) c->handle->gpu->busy = NULL;
    if (c->counted) inside--;
    pthread_mutex_unlock(&lock);
    sim_drop(c->m);
}
