/* Events: the file `events` beside machine.conf, one appended line each:
 *
 *   SEQ UUID TYPE DATA GI CI        TYPE in hex; GI and CI - when not attributable
 *   SEQ system TYPE GPUID
 *   SEQ operational UUID WORD=VALUE...    see opevents.c
 *
 * A set remembers how long the file was when each GPU was registered: what stands before is never delivered. */
#include "sim.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct registration {
    char uuid[WORD];
    u64 mask;
    size_t since, structured_since;
    nvmlDevice_t device;
    bool lost_told, structured; /* structured: for operational events of at least these */
    unsigned level, severity;
};

/* Sets are never given back to malloc, so that the use of a freed one can be recognised. */
struct set {
    struct set *next;
    bool live, system;
    unsigned generation;
    int wake, waiting, registering, count;
    size_t read; /* the file up to here has been looked at */
    struct watch watch;
    struct registration registration[MAX_GPUS];
    bool delivered; /* a wait of version 3 has returned an event, whose contexts are in last */
    struct operational last;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct set *sets;

static size_t file_length(void)
{
    char path[PATH_MAX + 8];
    struct stat st;
    snprintf(path, sizeof path, "%s/events", sim_dir());
    return stat(path, &st) ? 0 : (size_t)st.st_size;
}

static struct set *create(bool system)
{
    struct set *s = calloc(1, sizeof *s);
    s->live = true;
    s->system = system;
    s->generation = sim_generation();
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->read = file_length();
    sim_watch_open(&s->watch);
    pthread_mutex_lock(&lock);
    s->next = sets;
    sets = s;
    pthread_mutex_unlock(&lock);
    return s;
}

/* The live set behind a handle, or NULL with the misuse recorded. */
static struct set *find(const char *call, const void *p, bool system)
{
    pthread_mutex_lock(&lock);
    struct set *s = sets;
    while (s && s != p) s = s->next;
    const char *wrong = !p ? "no event set" : !s || s->system != system ? "not an event set" : !s->live ? "freed event set" : NULL;
    pthread_mutex_unlock(&lock);
    if (wrong) sim_violation(call, "%s", wrong);
    return wrong ? NULL : s;
}

/* Under lock. */
static void close_set(struct set *s)
{
    s->live = false;
    if (s->waiting) { (void)!write(s->wake, &(uint64_t){1}, 8); return; } /* the last waiter closes */
    sim_watch_close(&s->watch);
    close(s->wake);
}

static nvmlReturn_t release(const char *call, const void *p, bool system)
{
    struct set *s = find(call, p, system);
    if (!s) return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    bool waiting = s->waiting > 0, registering = s->registering > 0;
    close_set(s);
    pthread_mutex_unlock(&lock);
    if (registering) sim_violation(call, "event set freed while a GPU is being registered in it");
    if (waiting) sim_violation(call, "event set freed while a wait on it is in progress");
    return NVML_SUCCESS;
}

void sim_events_shutdown(void)
{
    pthread_mutex_lock(&lock);
    for (struct set *s = sets; s; s = s->next)
        if (s->live) close_set(s);
    pthread_mutex_unlock(&lock);
}

int sim_events_waiting(void)
{
    int n = 0;
    pthread_mutex_lock(&lock);
    for (struct set *s = sets; s; s = s->next) n += s->waiting;
    pthread_mutex_unlock(&lock);
    return n;
}

/* ---- device events ---- */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    ENTER();
    NEED(set);
    set->handle = (struct nvmlEventSet_st *)create(false);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    ENTER();
    return release(__func__, set.handle, false);
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *eventTypes)
{
    ENTER_GPU(device);
    NEED(eventTypes);
    WHOLE_GPU_ONLY();
    if (c.gpu->events == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *eventTypes = c.gpu->events;
    return NVML_SUCCESS;
}

/* A set that a call is at, from before the call is inside. */
struct set *sim_begin_use(const void *p)
{
    pthread_mutex_lock(&lock);
    struct set *s = sets;
    while (s && s != p) s = s->next;
    if (s) s->registering++;
    pthread_mutex_unlock(&lock);
    return s;
}

void sim_end_use(struct set **s)
{
    pthread_mutex_lock(&lock);
    if (*s) (*s)->registering--;
    pthread_mutex_unlock(&lock);
}

/* Under lock: the registration of a GPU, a new one if there is none. */
static struct registration *registration_of(struct set *s, const char *uuid)
{
    int i = 0;
    while (i < s->count && strcmp(s->registration[i].uuid, uuid)) i++;
    struct registration *r = &s->registration[i];
    if (i == s->count) {
        s->count++;
        memset(r, 0, sizeof *r);
        snprintf(r->uuid, sizeof r->uuid, "%s", uuid);
    }
    return r;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long eventTypes, nvmlEventSet_t set)
{
    struct set *in_use __attribute__((cleanup(sim_end_use))) = sim_begin_use(set.handle);
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    struct set *s = find(__func__, set.handle, false);
    if (!s) return NVML_ERROR_INVALID_ARGUMENT;
    if (c.gpu->events == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    if (eventTypes & ~c.gpu->events) { /* all or nothing */
        sim_violation(__func__, "unsupported event types 0x%llx on %s", eventTypes & ~c.gpu->events, c.gpu->uuid);
        return NVML_ERROR_NOT_SUPPORTED;
    }
    pthread_mutex_lock(&lock);
    struct registration *r = registration_of(s, c.gpu->uuid);
    if (!r->mask) { r->device = device; r->since = file_length(); }
    r->mask |= eventTypes;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

nvmlReturn_t sim_register_operational(const char *call, const void *p, const char *uuid, unsigned level, unsigned severity)
{
    struct set *s = find(call, p, false);
    if (!s) return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    struct registration *r = registration_of(s, uuid);
    if (!r->structured) r->structured_since = file_length();
    r->structured = true;
    r->level = level;
    r->severity = severity;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

nvmlReturn_t sim_last_operational(const char *call, const void *p, struct operational *last)
{
    struct set *s = find(call, p, false);
    if (!s) return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    bool delivered = s->delivered;
    *last = s->last;
    pthread_mutex_unlock(&lock);
    return delivered ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* The next line after s->read into buf, without its newline; *at is where it stands. False: none yet. */
static bool next_line(struct set *s, char *buf, size_t size, size_t *at)
{
    char path[PATH_MAX + 8];
    size_t length = file_length();
    if (length < s->read) s->read = 0; /* another file took its place */
    if (length == s->read) return false;
    snprintf(path, sizeof path, "%s/events", sim_dir());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = pread(fd, buf, size - 1, (off_t)s->read);
    close(fd);
    char *end = n > 0 ? memchr(buf, '\n', (size_t)n) : NULL;
    if (!end) return false;
    *end = 0;
    *at = s->read;
    s->read += (size_t)(end - buf) + 1;
    return true;
}

static unsigned placement(const char *s) { return strcmp(s, "-") ? (unsigned)strtoul(s, NULL, 0) : NOWHERE; }

/* Under lock: the operational event in a line, if this set asked for it. A wait of an older version never returns one. */
static bool take_operational(struct set *s, const char *line, size_t at, struct event *e)
{
    if (!sim_parse_operational(line, &e->operational)) return false;
    for (int i = 0; i < s->count; i++) {
        struct registration *r = &s->registration[i];
        if (!r->structured || strcmp(r->uuid, e->operational.uuid) || at < r->structured_since) continue;
        if (e->operational.level < r->level || e->operational.severity < r->severity) continue;
        snprintf(e->uuid, sizeof e->uuid, "%s", r->uuid);
        e->structured = true;
        return true;
    }
    return false;
}

/* Under lock: the next event that this set asked for. */
static bool take_device_event(struct set *s, struct event *e, bool v3)
{
    size_t at;
    char line[512];
    while (next_line(s, line, sizeof line, &at)) {
        char uuid[WORD], g[16] = "-", k[16] = "-";
        u64 type = 0, data = 0;
        if (v3 && take_operational(s, line, at, e)) return true;
        bool read = sscanf(line, "%*u %95s %llx %llu %15s %15s", uuid, &type, &data, g, k) >= 3;
        for (int i = 0; read && i < s->count; i++) {
            struct registration *r = &s->registration[i];
            if (strcmp(r->uuid, uuid) || !(type & r->mask) || at < r->since) continue;
            snprintf(e->uuid, sizeof e->uuid, "%s", r->uuid);
            e->device = r->device;
            e->type = type;
            e->data = data;
            e->gi = placement(g);
            e->ci = placement(k);
            return true;
        }
    }
    return false;
}

/* Under lock: a registered GPU is lost, and this set has not been told (or is told every time). */
static bool lost(struct set *s, struct machine *m)
{
    for (int i = 0; i < s->count; i++) {
        struct registration *r = &s->registration[i];
        bool gone = true;
        for (int j = 0; j < m->gpus; j++)
            if (!strcmp(m->gpu[j].uuid, r->uuid)) gone = m->gpu[j].lost == 1;
        if (!gone) r->lost_told = false;
        else if (!r->lost_told) { r->lost_told = m->wait_lost_once != 0; return true; }
    }
    return false;
}

static long long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static void begin_wait(struct set *s)
{
    pthread_mutex_lock(&lock);
    s->waiting++;
    pthread_mutex_unlock(&lock);
}

static void end_wait(struct set *s)
{
    pthread_mutex_lock(&lock);
    if (--s->waiting == 0 && !s->live) { sim_watch_close(&s->watch); close(s->wake); }
    pthread_mutex_unlock(&lock);
}

/* A wait is not "in progress" for the misuse checks: it may stand beside any other call. It looks, then sleeps
 * until the folder changes:
 *
 *   waiter  look: nothing ................ poll(inotify) -> wakes -> look: line -> return
 *   writer                 append line ->   (queued even when it lands between look and poll)
 */
static nvmlReturn_t wait_device(struct set *s, const char *name, struct event *e, unsigned timeoutms, bool v3)
{
    long long deadline = now_ms() + timeoutms;
    unsigned generation = s->generation;
    for (;;) {
        nvmlReturn_t ret = sim_fault(name, -1, NULL);
        if (ret) return ret;
        struct call look = {0};
        if (sim_session_over(generation)) return NVML_ERROR_UNINITIALIZED;
        if ((ret = sim_refresh(&look))) { sim_drop(look.m); return ret; }
        pthread_mutex_lock(&lock);
        bool live = s->live, event = live && take_device_event(s, e, v3);
        bool gone = live && !event && lost(s, look.m);
        if (event && v3) { s->delivered = true; s->last = e->operational; }
        pthread_mutex_unlock(&lock);
        for (int i = 0; event && i < look.m->gpus; i++)
            if (!strcmp(look.m->gpu[i].uuid, e->uuid) && !look.m->gpu[i].event_uuid) *e->uuid = 0;
        sim_drop(look.m);
        if (!live) return NVML_ERROR_UNINITIALIZED;
        if (event) return NVML_SUCCESS;
        if (gone) return NVML_ERROR_GPU_IS_LOST;
        long long left = deadline - now_ms();
        if (left <= 0) return NVML_ERROR_TIMEOUT;
        sim_watch_wait(&s->watch, s->wake, left);
    }
}

nvmlReturn_t sim_event_wait(struct call *c, const char *name, const void *p, unsigned timeoutms, bool v3, struct event *e)
{
    struct set *s = find(name, p, false);
    if (!s) return NVML_ERROR_INVALID_ARGUMENT;
    begin_wait(s);
    sim_leave(c); /* from here on other calls may run beside this one */
    *c = (struct call){0};
    *e = (struct event){.gi = NOWHERE, .ci = NOWHERE};
    nvmlReturn_t ret = wait_device(s, name, e, timeoutms, v3);
    end_wait(s);
    return ret;
}

static nvmlReturn_t event_wait(struct call *c, const char *name, nvmlEventSet_t set, nvmlEventData_t *data,
                               unsigned timeoutms, bool v2)
{
    NEED(data);
    struct event e;
    nvmlReturn_t ret = sim_event_wait(c, name, set.handle, timeoutms, false, &e);
    if (ret) return ret;
    data->device = e.device;
    data->eventType = e.type;
    data->eventData = e.data;
    if (v2) { data->gpuInstanceId = e.gi; data->computeInstanceId = e.ci; } /* v1's struct ends before */
    return ret;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
    ENTER_WITH(sim_enter_free);
    return event_wait(&c, __func__, set, data, timeoutms, true);
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
    ENTER_WITH(sim_enter_free);
    return event_wait(&c, __func__, set, data, timeoutms, false);
}

/* ---- system events: they work while the driver is not loaded ---- */

#define VERSION_1(r, what) do { NEED(r); if ((r)->version != (what)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH; } while (0)

nvmlReturn_t nvmlSystemEventSetCreate(nvmlSystemEventSetCreateRequest_t *request)
{
    ENTER_WITH(sim_enter_undriven);
    VERSION_1(request, nvmlSystemEventSetCreateRequest_v1);
    request->set.handle = (struct nvmlSystemEventSet_st *)create(true);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemEventSetFree(nvmlSystemEventSetFreeRequest_t *request)
{
    ENTER_WITH(sim_enter_undriven);
    VERSION_1(request, nvmlSystemEventSetFreeRequest_v1);
    return release(__func__, request->set.handle, true);
}

nvmlReturn_t nvmlSystemRegisterEvents(nvmlSystemRegisterEventRequest_t *request)
{
    ENTER_WITH(sim_enter_undriven);
    VERSION_1(request, nvmlSystemRegisterEventRequest_v1);
    struct set *s = find(__func__, request->set.handle, true);
    if (!s) return NVML_ERROR_INVALID_ARGUMENT;
    if (request->eventTypes & ~(u64)(nvmlSystemEventTypeGpuDriverUnbind | nvmlSystemEventTypeGpuDriverBind))
        return NVML_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct registration *r = &s->registration[0];
    if (!s->count) { s->count = 1; r->since = file_length(); }
    r->mask |= request->eventTypes;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

/* Under lock. */
static bool take_system_event(struct set *s, nvmlSystemEventData_v1_t *e)
{
    size_t at;
    char line[512];
    while (next_line(s, line, sizeof line, &at)) {
        u64 type = 0;
        unsigned gpu = 0;
        bool read = sscanf(line, "%*u system %llx %u", &type, &gpu) == 2;
        struct registration *r = &s->registration[0];
        if (!read || !s->count || !(type & r->mask) || at < r->since) continue;
        e->eventType = type;
        e->gpuId = gpu;
        return true;
    }
    return false;
}

nvmlReturn_t nvmlSystemEventSetWait(nvmlSystemEventSetWaitRequest_t *request)
{
    ENTER_WITH(sim_enter_free);
    VERSION_1(request, nvmlSystemEventSetWaitRequest_v1);
    struct set *s = find(__func__, request->set.handle, true);
    if (!s || !request->data || !request->dataSize) return NVML_ERROR_INVALID_ARGUMENT;
    begin_wait(s);
    sim_leave(&c);
    c = (struct call){0};
    long long deadline = now_ms() + request->timeoutms, left = 1;
    nvmlReturn_t ret = NVML_ERROR_TIMEOUT;
    request->numEvent = 0;
    while (ret == NVML_ERROR_TIMEOUT && left > 0) {
        if ((ret = sim_fault(__func__, -1, NULL))) break;
        pthread_mutex_lock(&lock);
        bool live = s->live;
        while (live && request->numEvent < request->dataSize && take_system_event(s, &request->data[request->numEvent]))
            request->numEvent++;
        pthread_mutex_unlock(&lock);
        ret = !live ? NVML_ERROR_UNINITIALIZED : request->numEvent ? NVML_SUCCESS : NVML_ERROR_TIMEOUT;
        left = deadline - now_ms();
        if (ret == NVML_ERROR_TIMEOUT && left > 0) sim_watch_wait(&s->watch, s->wake, left);
    }
    end_wait(s);
    return ret;
}
