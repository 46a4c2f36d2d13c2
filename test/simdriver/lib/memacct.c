/* Limits of memory by control group: README.md has the rules in short, memacct.c of NVIDIA's open kernel modules 615.71.09 is their source.
 * [23] is fence 23. The groups are in cgroups.c, the backend dmem in dmem.c. */
#include "memacct.h"

#include "cgroups.h"
#include "dmem.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* ---- state ---- */

struct group { u64 address; identity id; char *path; };
struct region { char uuid[WORD], epoch[WORD]; };              /* a GPU as the driver has initialised it [20] */
struct entry { char uuid[WORD]; u64 address, soft, hard, used; }; /* misc [24] */
struct charge { u64 id, address, bytes; char uuid[WORD], clients[256]; identity of; char *path; };

struct state {
    int fd;
    bool read_only; /* in a container that has the machine so: only Get works */
    struct machine *m;
    char *text; /* of the file */
    u64 addresses, clients, charges_made;
    struct group *group;
    struct region *region;
    struct entry *entry;
    struct charge *charge;
    int groups, regions, entries, charges;
};

#define ADD(s, list, count) (((s)->count & ((s)->count - 1)) == 0 ? (void)((s)->list = realloc((s)->list, sizeof *(s)->list * (size_t)((s)->count ? 2 * (s)->count : 1))) : (void)0, \
                             memset(&(s)->list[(s)->count], 0, sizeof *(s)->list), &(s)->list[(s)->count++])
#define REMOVE(s, list, count, i) ((s)->list[i] = (s)->list[--(s)->count])

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* flock does not part the threads of a process that share a client */

static u64 number(char **rest, int base) /* the next word */
{
    char *w = strsep(rest, " ");
    return w ? strtoull(w, NULL, base) : 0;
}

static void text_of(char **rest, char *to, size_t size)
{
    char *w = strsep(rest, " ");
    memccpy(to, w ? w : "", 0, size - 1); /* the rest of it is 0 */
}

/* Each call reads the state, which has an entry of each group that ever had a limit: sscanf took milliseconds for some thousand. */
static void parse(struct state *s, char *text)
{
    for (char *line, *end = text; *(line = end);) {
        end = strchrnul(line, '\n');
        if (*end) *end++ = 0;
        char *kind = strsep(&line, " ");
        if (!strcmp(kind, "next")) {
            s->addresses = number(&line, 16);
            s->clients = number(&line, 10);
            s->charges_made = number(&line, 10);
        } else if (!strcmp(kind, "group")) {
            struct group *g = ADD(s, group, groups);
            g->address = number(&line, 16);
            text_of(&line, g->id, sizeof g->id);
            g->path = strdup(line ? line : "");
        } else if (!strcmp(kind, "region")) {
            struct region *r = ADD(s, region, regions);
            text_of(&line, r->uuid, sizeof r->uuid);
            text_of(&line, r->epoch, sizeof r->epoch);
        } else if (!strcmp(kind, "entry")) {
            struct entry *e = ADD(s, entry, entries);
            text_of(&line, e->uuid, sizeof e->uuid);
            e->address = number(&line, 16);
            e->soft = number(&line, 10);
            e->hard = number(&line, 10);
            e->used = number(&line, 10);
        } else if (!strcmp(kind, "charge")) {
            struct charge *c = ADD(s, charge, charges);
            c->id = number(&line, 10);
            text_of(&line, c->uuid, sizeof c->uuid);
            c->address = number(&line, 16);
            c->bytes = number(&line, 10);
            text_of(&line, c->clients, sizeof c->clients);
            text_of(&line, c->of, sizeof c->of);
            c->path = strdup(line ? line : "");
        }
    }
}

static bool ended(struct group *g)
{
    identity id;
    return !cgroup_identify(g->path, id) || strcmp(id, g->id);
}

static int by_number(const void *a, const void *b)
{
    u64 x = *(const u64 *)a, y = *(const u64 *)b;
    return x < y ? -1 : x > y;
}

static void save(struct state *s)
{
    char *text = NULL;
    size_t size = 0, n = (size_t)s->entries;
    FILE *f = open_memstream(&text, &size);
    u64 *referred = calloc(n + 1, sizeof *referred); /* addresses of groups */
    for (size_t i = 0; i < n; i++) referred[i] = s->entry[i].address;
    qsort(referred, n, sizeof *referred, by_number);
    fprintf(f, "next %llx %llu %llu\n", s->addresses, s->clients, s->charges_made);
    for (int i = 0; i < s->groups; i++)
        if (s->m->reuse_groups == 1 || bsearch(&s->group[i].address, referred, n, sizeof *referred, by_number))
            fprintf(f, "group %llx %s %s\n", s->group[i].address, s->group[i].id, s->group[i].path);
    for (int i = 0; i < s->regions; i++) fprintf(f, "region %s %s\n", s->region[i].uuid, s->region[i].epoch);
    for (int i = 0; i < s->entries; i++) {
        struct entry *e = &s->entry[i];
        fprintf(f, "entry %s %llx %llu %llu %llu\n", e->uuid, e->address, e->soft, e->hard, e->used);
    }
    for (int i = 0; i < s->charges; i++) {
        struct charge *c = &s->charge[i];
        fprintf(f, "charge %llu %s %llx %llu %s %s %s\n", c->id, c->uuid, c->address, c->bytes, c->clients, c->of, c->path);
    }
    fclose(f);
    free(referred);
    bool same = s->text && !strcmp(text, s->text);
    if (!same && !s->read_only && (pwrite(s->fd, text, size, 0) != (ssize_t)size || ftruncate(s->fd, (off_t)size))) sim_violation("memacct", "state not written: %s", strerror(errno));
    free(text);
}

static void close_state(struct state *s)
{
    for (int i = 0; i < s->groups; i++) free(s->group[i].path);
    for (int i = 0; i < s->charges; i++) free(s->charge[i].path);
    free(s->group);
    free(s->region);
    free(s->entry);
    free(s->charge);
    free(s->text);
    if (s->fd >= 0) close(s->fd); /* and with it the lock */
    pthread_mutex_unlock(&lock);
}

static int open_file(const char *dir)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/memacct", dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) fchmod(fd, 0666); /* fails for a file of another user, which that one has done */
    return fd;
}

static void settle(struct state *s);

/* Opens the state as it is now: what has ended since is gone. */
static bool open_state(struct state *s, const char *dir, struct machine *m)
{
    pthread_mutex_lock(&lock);
    *s = (struct state){.fd = open_file(dir), .m = m, .addresses = 0xffff888100000000ULL};
    if (s->fd < 0 && (errno == EROFS || errno == EACCES)) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/memacct", dir);
        s->fd = open(path, O_RDONLY | O_CLOEXEC);
        s->read_only = true;
    }
    if (s->fd < 0 || flock(s->fd, LOCK_EX)) {
        sim_violation("memacct", "state not opened: %s", strerror(errno));
        close_state(s);
        return false;
    }
    off_t size = lseek(s->fd, 0, SEEK_END);
    s->text = calloc(1, (size_t)size + 1);
    if (pread(s->fd, s->text, (size_t)size, 0) == size) {
        char *text = strdup(s->text);
        parse(s, text);
        free(text);
    }
    settle(s);
    return true;
}

/* ---- addresses of groups [27] ---- */

static struct group *find_group(struct state *s, const char *path)
{
    identity id;
    if (!cgroup_identify(path, id)) return NULL;
    for (int i = 0; i < s->groups; i++)
        if (!strcmp(s->group[i].id, id)) return &s->group[i];
    return NULL;
}

static void take_address(struct group *g, const char *path)
{
    cgroup_identify(path, g->id);
    free(g->path);
    g->path = strdup(path);
}

/* The group with its address: one of its own, or with reuse_groups that of a group that has ended, as a kernel's allocator gives it out again. */
static struct group *group_of(struct state *s, const char *path)
{
    struct group *g = find_group(s, path);
    for (int i = s->groups - 1; !g && s->m->reuse_groups == 1 && i >= 0; i--)
        if (ended(&s->group[i])) take_address(g = &s->group[i], path);
    if (g) return g;
    g = ADD(s, group, groups);
    g->address = s->addresses += 0x1000;
    take_address(g, path);
    return g;
}

static struct entry *entry_of(struct state *s, const char *uuid, const char *path)
{
    struct group *g = s->m->reuse_groups == 1 ? group_of(s, path) : find_group(s, path);
    for (int i = 0; g && i < s->entries; i++)
        if (s->entry[i].address == g->address && !strcmp(s->entry[i].uuid, uuid)) return &s->entry[i];
    return NULL;
}

static struct entry *entry_at(struct state *s, const char *uuid, u64 address)
{
    for (int i = 0; i < s->entries; i++)
        if (s->entry[i].address == address && !strcmp(s->entry[i].uuid, uuid)) return &s->entry[i];
    return NULL;
}

/* The nearest entry from a group up [24, 28]. */
static struct entry *nearest(struct state *s, const char *uuid, const char *path)
{
    char at[PATH_MAX];
    struct entry *e = NULL;
    strcpy(at, path);
    do e = entry_of(s, uuid, at);
    while (!e && cgroup_up(s->m, at));
    return e;
}

bool memacct_reuse(const char *dir, struct machine *m, const char *old, const char *group)
{
    struct state s;
    char path[PATH_MAX];
    if (!cgroup_open(m, group, path) || !open_state(&s, dir, m)) return false;
    struct group *g = NULL, *present = find_group(&s, path);
    for (int i = 0; i < s.groups; i++)
        if (!strcmp(s.group[i].path, old) && ended(&s.group[i])) g = &s.group[i];
    bool found = g != NULL;
    if (found && present) {
        present->address = g->address;
        free(g->path);
        REMOVE(&s, group, groups, g - s.group);
    } else if (found) take_address(g, path);
    save(&s);
    close_state(&s);
    if (!found) errno = ENOENT;
    return found;
}

/* ---- GPUs and clients that have ended ---- */

static struct gpu *gpu_of(struct machine *m, const char *uuid)
{
    for (int i = 0; i < m->gpus; i++)
        if (!strcmp(m->gpu[i].uuid, uuid)) return &m->gpu[i];
    return NULL;
}

static void epoch_of(struct machine *m, struct gpu *g, char *epoch) /* changes when the driver initialises the GPU anew */
{
    snprintf(epoch, WORD, "%llu.%llu.%.8s", m->incarnation, g->memory_inits == UNSET ? 0 : g->memory_inits, m->memacct);
}

/* A GPU that was removed, reset or initialised anew has no entries and no charges [20]. */
static void clear_region(struct state *s, const char *uuid)
{
    struct gpu *g = gpu_of(s->m, uuid);
    for (int i = s->entries - 1; i >= 0; i--)
        if (!strcmp(s->entry[i].uuid, uuid)) REMOVE(s, entry, entries, i);
    for (int i = s->charges - 1; i >= 0; i--) {
        if (strcmp(s->charge[i].uuid, uuid)) continue;
        free(s->charge[i].path);
        REMOVE(s, charge, charges, i);
    }
    if (!g || cgroup_is_real(s->m->cgroup_mount)) return;
    dmem_unregister(s->m, g);
}

/* Whether a client runs: it holds a lock on a byte of the file that no text reaches, which ends with it, in whichever PID namespace it is. */
#define CLIENT_BYTES (1LL << 40)

static bool runs(struct state *s, u64 client)
{
    struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = CLIENT_BYTES + (off_t)client, .l_len = 1};
    return client == CONTROL || (!fcntl(s->fd, F_OFD_GETLK, &byte) && byte.l_type != F_UNLCK);
}

static void uncharge(struct state *s, struct charge *c)
{
    struct gpu *g = gpu_of(s->m, c->uuid);
    char region[WORD];
    if (!strcmp(s->m->memacct, "dmem") && g) {
        dmem_region(g, region, sizeof region);
        dmem_release(s->m, c->path, c->of, region, c->bytes);
    }
    struct entry *e = entry_at(s, c->uuid, c->address); /* by the remembered group [25] */
    if (e) e->used = e->used > c->bytes ? e->used - c->bytes : 0;
    free(c->path);
    REMOVE(s, charge, charges, c - s->charge);
}

/* Keeps the clients of a charge for which keep holds; without one it is released [22]. */
static void keep_clients(struct state *s, struct charge *c, bool (*keep)(struct state *, u64 client, u64 arg), u64 arg)
{
    char was[sizeof c->clients], *save, *word;
    strcpy(was, c->clients);
    *c->clients = 0;
    for (word = strtok_r(was, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        size_t n = strlen(c->clients);
        if (keep(s, strtoull(word, NULL, 10), arg)) snprintf(c->clients + n, sizeof c->clients - n, "%s%s", n ? "," : "", word);
    }
    if (!*c->clients) uncharge(s, c);
}

static bool still_runs(struct state *s, u64 client, u64 arg) { (void)arg; return runs(s, client); }

static bool first; /* under lock: a client that has an allocation twice releases it once */
static bool other(struct state *s, u64 client, u64 arg)
{
    (void)s;
    if (client != arg || !first) return true;
    return first = false;
}

static void settle(struct state *s)
{
    char epoch[WORD];
    for (int i = s->regions - 1; i >= 0; i--) {
        struct gpu *g = gpu_of(s->m, s->region[i].uuid);
        if (g) epoch_of(s->m, g, epoch);
        if (g && !strcmp(epoch, s->region[i].epoch)) continue;
        clear_region(s, s->region[i].uuid);
        REMOVE(s, region, regions, i);
    }
    for (int i = s->charges - 1; i >= 0; i--) keep_clients(s, &s->charge[i], still_runs, 0);
    for (int i = 0; i < s->m->gpus; i++) {
        struct gpu *g = &s->m->gpu[i];
        int j = 0;
        while (j < s->regions && strcmp(s->region[j].uuid, g->uuid)) j++;
        if (j < s->regions || g->memory == UNSET || !g->memory) continue; /* no memory, no region */
        struct region *r = ADD(s, region, regions);
        strcpy(r->uuid, g->uuid);
        epoch_of(s->m, g, r->epoch);
    }
}

static bool has_region(struct gpu *g) { return g->memory != UNSET && g->memory; }

/* ---- Set and Get ---- */

static nvmlReturn_t misc_set(struct state *s, struct gpu *g, const char *path, u64 soft, u64 hard) /* in the order of [26] */
{
    if (!has_region(g)) return NVML_ERROR_NOT_FOUND; /* NV_ERR_OBJECT_NOT_FOUND */
    if (cgroup_is_root(s->m, path)) return NVML_ERROR_NOT_SUPPORTED;
    struct entry *e = entry_of(s, g->uuid, path);
    if (e && e->used > hard) return NVML_ERROR_INVALID_ARGUMENT;
    if (!e) {
        u64 address = group_of(s, path)->address;
        e = ADD(s, entry, entries);
        strcpy(e->uuid, g->uuid);
        e->address = address; /* used 0: what the group has already is unknown */
    }
    e->soft = soft;
    e->hard = hard;
    return NVML_SUCCESS;
}

nvmlReturn_t memacct_set(const char *dir, struct machine *m, struct gpu *g, const char *group, u64 soft, u64 hard)
{
    char path[PATH_MAX], region[WORD];
    struct state s;
    if (!cgroup_open(m, group, path)) return NVML_ERROR_OPERATING_SYSTEM;
    if (!open_state(&s, dir, m)) return NVML_ERROR_UNKNOWN;
    nvmlReturn_t ret;
    if (s.read_only) ret = NVML_ERROR_UNKNOWN;
    else if (!strcmp(m->memacct, "misc")) ret = misc_set(&s, g, path, soft, hard);
    else if (!has_region(g)) ret = NVML_ERROR_NOT_FOUND;
    else {
        dmem_region(g, region, sizeof region);
        ret = dmem_set(m, path, region, soft, hard);
    }
    save(&s);
    close_state(&s);
    return ret;
}

static nvmlReturn_t misc_get(struct state *s, struct gpu *g, const char *path, nvmlGetMemoryLimits_v1_t *l)
{
    struct entry *e = nearest(s, g->uuid, path);
    for (int i = 0; !e && i < s->m->gpus; i++) /* another GPU has one [28] */
        if (nearest(s, s->m->gpu[i].uuid, path)) return NVML_ERROR_NOT_FOUND;
    if (!e) return NVML_ERROR_NOT_SUPPORTED;
    l->softLimit = e->soft;
    l->hardLimit = e->hard;
    l->currentUsed = e->used;
    return NVML_SUCCESS;
}

nvmlReturn_t memacct_get(const char *dir, struct machine *m, struct gpu *g, const char *group, nvmlGetMemoryLimits_v1_t *limits)
{
    char path[PATH_MAX], region[WORD];
    struct state s;
    if (!cgroup_open(m, group, path)) return NVML_ERROR_OPERATING_SYSTEM;
    if (!open_state(&s, dir, m)) return NVML_ERROR_UNKNOWN;
    nvmlReturn_t ret;
    if (!strcmp(m->memacct, "misc")) ret = misc_get(&s, g, path, limits);
    else if (!has_region(g)) ret = NVML_ERROR_NOT_FOUND;
    else {
        dmem_region(g, region, sizeof region);
        ret = dmem_get(m, path, region, limits);
    }
    if (m->reuse_groups == 1) save(&s); /* a group can have got an address; what has ended is found out again */
    close_state(&s);
    return ret;
}

/* ---- allocations ---- */

/* misc: the nearest group in which the controller is on, and from there the nearest entry [23, 24]. address 0: nothing to charge. */
static bool misc_charge(struct state *s, struct gpu *g, char *path, u64 bytes, u64 *address)
{
    while (!cgroup_has_controller(s->m, path))
        if (!cgroup_up(s->m, path)) break;
    struct entry *e = nearest(s, g->uuid, path);
    *address = e ? e->address : 0;
    if (!e) return true;
    if (e->used > e->hard || bytes > e->hard - e->used) return false;
    e->used += bytes;
    return true;
}

static bool charge(struct state *s, struct gpu *g, char *path, u64 bytes, u64 client, u64 *id)
{
    char region[WORD];
    u64 address = 0;
    struct charge c = {.bytes = bytes};
    cgroup_identify(path, c.of);
    bool dmem = !strcmp(s->m->memacct, "dmem");
    char leaf[PATH_MAX];
    strcpy(leaf, path);
    dmem_region(g, region, sizeof region);
    if (dmem ? !dmem_charge(s->m, path, region, bytes) : !misc_charge(s, g, path, bytes, &address)) return false;
    if (!dmem && !address) return true;
    c.id = *id = ++s->charges_made;
    c.address = address;
    c.path = strdup(leaf);
    strcpy(c.uuid, g->uuid);
    snprintf(c.clients, sizeof c.clients, "%llu", client);
    *ADD(s, charge, charges) = c;
    return true;
}

bool memacct_allocate(const char *dir, struct machine *m, struct gpu *g, const char *group, u64 bytes, u64 client, u64 *id)
{
    char path[PATH_MAX];
    struct state s;
    *id = 0;
    if (!*m->memacct || g->mig == 1 || !has_region(g)) return true; /* [19, 20, 21] */
    if (!cgroup_open(m, group, path) || !open_state(&s, dir, m)) return true; /* the creator has ended [23] */
    bool ok = charge(&s, g, path, bytes, client, id);
    save(&s);
    close_state(&s);
    return ok;
}

static struct charge *charge_of(struct state *s, u64 id)
{
    for (int i = 0; i < s->charges; i++)
        if (s->charge[i].id == id) return &s->charge[i];
    return NULL;
}

void memacct_import(const char *dir, struct machine *m, u64 id, u64 client)
{
    struct state s;
    if (!id || !open_state(&s, dir, m)) return;
    struct charge *c = charge_of(&s, id);
    size_t n = c ? strlen(c->clients) : 0;
    if (c) snprintf(c->clients + n, sizeof c->clients - n, ",%llu", client);
    save(&s);
    close_state(&s);
}

void memacct_release(const char *dir, struct machine *m, u64 id, u64 client)
{
    struct state s;
    if (!id || !open_state(&s, dir, m)) return;
    struct charge *c = charge_of(&s, id);
    first = true;
    if (c) keep_clients(&s, c, other, client);
    save(&s);
    close_state(&s);
}

/* ---- this process ---- */

u64 memacct_client(const char *dir, struct machine *m)
{
    static u64 client;
    static int held; /* keeps the lock of the client until the process ends */
    static char of[PATH_MAX];
    struct state s;
    if (!open_state(&s, dir, m)) return CONTROL;
    if (!client || strcmp(of, dir)) {
        client = ++s.clients;
        snprintf(of, sizeof of, "%s", dir);
        held = open_file(dir);
        struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = CLIENT_BYTES + (off_t)client, .l_len = 1};
        if (held < 0 || fcntl(held, F_OFD_SETLK, &byte)) sim_violation("memacct", "client %llu has no lock: %s", client, strerror(errno));
        save(&s);
    }
    u64 mine = client;
    close_state(&s);
    return mine;
}

/* The group of the line "0::" of /proc/self/cgroup below the machine's mount point, or where Linux has it; SIMDRIVER_CGROUP has the line's path for a test. */
bool memacct_own_group(struct machine *m, char *path)
{
    const char *mounts[] = {m->cgroup_mount, "/sys/fs/cgroup", "/sys/fs/cgroup/unified"}, *env = getenv("SIMDRIVER_CGROUP");
    char at[PATH_MAX], line[PATH_MAX] = "";
    FILE *f = env ? NULL : fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f) && strncmp(line, "0::", 3)) *line = 0;
    if (f) fclose(f);
    line[strcspn(line, "\n")] = 0;
    const char *group = env ? env : *line ? line + 3 : NULL;
    for (size_t i = 0; group && i < sizeof mounts / sizeof *mounts; i++) {
        if (snprintf(at, sizeof at, "%s%s", mounts[i], group) < (int)sizeof at && cgroup_open(m, at, path)) return true;
    }
    return false;
}

bool memacct_own_limit(const char *dir, struct machine *m, struct gpu *g, nvmlGetMemoryLimits_v1_t *limits)
{
    char path[PATH_MAX];
    return *m->memacct && g->mig != 1 && has_region(g) && memacct_own_group(m, path) && !memacct_get(dir, m, g, path, limits) && limits->hardLimit < g->memory;
}
