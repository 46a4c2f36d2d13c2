/* The machine's file: finding it, parsing it. README.md describes the format. */
#include "sim.h"

#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct word { const char *text; u64 value; };

static const struct word brands[] = {
    {"unknown", NVML_BRAND_UNKNOWN}, {"quadro", NVML_BRAND_QUADRO}, {"tesla", NVML_BRAND_TESLA},
    {"nvs", NVML_BRAND_NVS}, {"grid", NVML_BRAND_GRID}, {"geforce", NVML_BRAND_GEFORCE},
    {"titan", NVML_BRAND_TITAN}, {"vapps", NVML_BRAND_NVIDIA_VAPPS}, {"vpc", NVML_BRAND_NVIDIA_VPC},
    {"vcs", NVML_BRAND_NVIDIA_VCS}, {"vws", NVML_BRAND_NVIDIA_VWS}, {"cloud_gaming", NVML_BRAND_NVIDIA_CLOUD_GAMING},
    {"quadro_rtx", NVML_BRAND_QUADRO_RTX}, {"nvidia_rtx", NVML_BRAND_NVIDIA_RTX},
    {"nvidia", NVML_BRAND_NVIDIA}, {"geforce_rtx", NVML_BRAND_GEFORCE_RTX}, {"titan_rtx", NVML_BRAND_TITAN_RTX}, {0, 0}};
static const struct word archs[] = {
    {"kepler", NVML_DEVICE_ARCH_KEPLER}, {"maxwell", NVML_DEVICE_ARCH_MAXWELL}, {"pascal", NVML_DEVICE_ARCH_PASCAL},
    {"volta", NVML_DEVICE_ARCH_VOLTA}, {"turing", NVML_DEVICE_ARCH_TURING}, {"ampere", NVML_DEVICE_ARCH_AMPERE},
    {"ada", NVML_DEVICE_ARCH_ADA}, {"hopper", NVML_DEVICE_ARCH_HOPPER}, {"blackwell", NVML_DEVICE_ARCH_BLACKWELL},
    {"rubin", NVML_DEVICE_ARCH_RUBIN}, {0, 0}};
static const struct word virts[] = {
    {"none", NVML_GPU_VIRTUALIZATION_MODE_NONE}, {"passthrough", NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH},
    {"vgpu", NVML_GPU_VIRTUALIZATION_MODE_VGPU}, {"host_vgpu", NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU}, {0, 0}};
static const struct word levels[] = {
    {"internal", NVML_TOPOLOGY_INTERNAL}, {"single", NVML_TOPOLOGY_SINGLE}, {"multiple", NVML_TOPOLOGY_MULTIPLE},
    {"hostbridge", NVML_TOPOLOGY_HOSTBRIDGE}, {"node", NVML_TOPOLOGY_NODE}, {"system", NVML_TOPOLOGY_SYSTEM}, {0, 0}};
static const struct word flags[] = {{"yes", 1}, {"no", 0}, {0, 0}};
static const struct word units[] = {
    {"", 1}, {"B", 1}, {"KiB", 1ULL << 10}, {"MiB", 1ULL << 20}, {"GiB", 1ULL << 30}, {"mW", 1}, {"W", 1000},
    {"mJ", 1}, {"J", 1000}, {"MHz", 1}, {"C", 1}, {"%", 1}, {"ns", 1}, {"ms", 1}, {"s", 1000}, {0, 0}};
static const struct word returns[] = {
    {"SUCCESS", 0}, {"UNINITIALIZED", 1}, {"INVALID_ARGUMENT", 2}, {"NOT_SUPPORTED", 3}, {"NO_PERMISSION", 4},
    {"ALREADY_INITIALIZED", 5}, {"NOT_FOUND", 6}, {"INSUFFICIENT_SIZE", 7}, {"INSUFFICIENT_POWER", 8},
    {"DRIVER_NOT_LOADED", 9}, {"TIMEOUT", 10}, {"IRQ_ISSUE", 11}, {"LIBRARY_NOT_FOUND", 12},
    {"FUNCTION_NOT_FOUND", 13}, {"CORRUPTED_INFOROM", 14}, {"GPU_IS_LOST", 15}, {"RESET_REQUIRED", 16},
    {"OPERATING_SYSTEM", 17}, {"LIB_RM_VERSION_MISMATCH", 18}, {"IN_USE", 19}, {"MEMORY", 20}, {"NO_DATA", 21},
    {"VGPU_ECC_NOT_SUPPORTED", 22}, {"INSUFFICIENT_RESOURCES", 23}, {"FREQ_NOT_SUPPORTED", 24},
    {"ARGUMENT_VERSION_MISMATCH", 25}, {"DEPRECATED", 26}, {"NOT_READY", 27}, {"GPU_NOT_FOUND", 28},
    {"INVALID_STATE", 29}, {"RESET_TYPE_NOT_SUPPORTED", 30}, {"UNKNOWN", 999}, {0, 0}};

static bool find_word(const struct word *table, const char *s, u64 *out)
{
    for (; table->text; table++)
        if (!strcmp(table->text, s)) { *out = table->value; return true; }
    return false;
}

/* "81559 MiB" -> bytes, "700 W" -> mW, "0x8", "-1". */
bool sim_text_number(const char *s, u64 *out)
{
    char *end;
    u64 scale;
    errno = 0;
    u64 v = strtoull(s, &end, 0);
    if (end == s || errno) return false;
    while (*end == ' ') end++;
    if (!find_word(units, end, &scale)) return false;
    *out = v * scale;
    return true;
}

bool sim_return_code(const char *s, nvmlReturn_t *out)
{
    u64 v;
    if (!strncmp(s, "NVML_", 5)) s += 5;
    if (!strncmp(s, "ERROR_", 6)) s += 6;
    if (!find_word(returns, s, &v) && !sim_text_number(s, &v)) return false;
    *out = (nvmlReturn_t)v;
    return true;
}

const char *sim_return_text(nvmlReturn_t r)
{
    for (const struct word *w = returns; w->text; w++)
        if (w->value == (u64)r) return w->text;
    return NULL;
}

bool sim_has_limits(const struct machine *m) { return atoi(m->driver) >= 615; }

/* ---- files ---- */

char *sim_read_file(const char *dir, const char *name)
{
    char path[PATH_MAX];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    if (fstat(fd, &st)) { close(fd); return NULL; }
    char *text = calloc(1, (size_t)st.st_size + 1);
    ssize_t n, got = 0;
    while (got < st.st_size && (n = read(fd, text + got, (size_t)(st.st_size - got))) > 0) got += n;
    close(fd);
    return text;
}

bool sim_stamp(const char *dir, const char *name, struct stamp *s)
{
    char path[PATH_MAX];
    struct stat st;
    struct stamp now = {0};
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (!stat(path, &st)) now = (struct stamp){st.st_ino, st.st_size, st.st_mtim, true};
    bool same = now.there == s->there && now.ino == s->ino && now.size == s->size &&
                now.mtime.tv_sec == s->mtime.tv_sec && now.mtime.tv_nsec == s->mtime.tv_nsec;
    *s = now;
    return !same;
}

/* The first folder above a file that holds machine.conf. */
static bool above(char *path, char *dir, size_t size)
{
    char file[PATH_MAX + 16];
    for (char *slash; (slash = strrchr(path, '/')) != NULL;) {
        *slash = 0;
        snprintf(file, sizeof file, "%s/machine.conf", path);
        if (!access(file, F_OK)) { snprintf(dir, size, "%s", *path ? path : "/"); return true; }
    }
    return false;
}

/* $SIMDRIVER_MACHINE, else the folder above this very library, by the name it was opened with or by its own. */
bool sim_find(char *dir, size_t size)
{
    const char *env = getenv("SIMDRIVER_MACHINE");
    if (env && *env) { snprintf(dir, size, "%s", env); return true; }
    Dl_info info;
    char path[PATH_MAX];
    if (!dladdr((void *)sim_find, &info)) return false;
    snprintf(path, sizeof path, "%s", info.dli_fname);
    if (above(path, dir, size)) return true;
    return realpath(info.dli_fname, path) && above(path, dir, size);
}

/* ---- parsing ---- */

enum kind { K_TEXT, K_PATH, K_NUM, K_FLAG, K_BRAND, K_ARCH, K_VIRT, K_CC };
struct key { const char *name; enum kind kind; size_t at; };

#define KEY(n, kind) {#n, K_##kind, offsetof(struct gpu, n)},
static const struct key gpu_keys[] = {
#include "keys.def"
    {0}};
#undef KEY
#define PROFILE_KEY(n) {#n, K_NUM, offsetof(struct profile, n)},
static const struct key profile_keys[] = {
    PROFILE_KEY(gi_profile) PROFILE_KEY(gi_profile_id) PROFILE_KEY(ci_profile) PROFILE_KEY(ci_profile_id)
    PROFILE_KEY(slices) PROFILE_KEY(compute_slices) PROFILE_KEY(size) PROFILE_KEY(max) PROFILE_KEY(memory)
    PROFILE_KEY(multiprocessors) PROFILE_KEY(copy_engines) PROFILE_KEY(decoders) PROFILE_KEY(encoders)
    PROFILE_KEY(jpegs) PROFILE_KEY(ofas) {0}};
static const struct key machine_keys[] = {
    {"driver", K_TEXT, offsetof(struct machine, driver)}, {"library", K_TEXT, offsetof(struct machine, library)},
    {"nvml", K_TEXT, offsetof(struct machine, nvml)}, {"loaded", K_FLAG, offsetof(struct machine, loaded)},
    {"incarnation", K_NUM, offsetof(struct machine, incarnation)},
    {"boots", K_NUM, offsetof(struct machine, boots)}, /* only the procfs tree shows it */
    {"wait_lost_once", K_FLAG, offsetof(struct machine, wait_lost_once)},
    {"memacct", K_TEXT, offsetof(struct machine, memacct)}, {"memacct_controller", K_TEXT, offsetof(struct machine, memacct_controller)},
    {"cgroup_mount", K_PATH, offsetof(struct machine, cgroup_mount)}, {"reuse_groups", K_FLAG, offsetof(struct machine, reuse_groups)},
    {"limited_total", K_TEXT, offsetof(struct machine, limited_total)}, {0}};

struct parser {
    struct machine *m;
    struct gpu defaults;
    enum { S_NONE, S_MACHINE, S_DEFAULTS, S_GPU, S_PROFILE, S_LINKS } section;
    struct gpu *gpu;         /* of the current section */
    struct profile *profile; /* of the current section */
    char why[256];
};

__attribute__((format(printf, 2, 3))) static bool fail(struct parser *p, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(p->why, sizeof p->why, fmt, args);
    va_end(args);
    return false;
}

static bool set_key(struct parser *p, const struct key *k, void *base, const char *v)
{
    void *at = (char *)base + k->at;
    u64 *num = at;
    unsigned major, minor;
    char tail;
    if (k->kind == K_PATH) {
        if (strlen(v) >= PATH_SIZE || *v != '/') return fail(p, "%s: want an absolute path of less than %d bytes, not \"%s\"", k->name, PATH_SIZE, v);
        strcpy(at, v);
        return true;
    }
    if (k->kind == K_TEXT) {
        if (strlen(v) >= WORD) return fail(p, "%s: longer than 95 bytes", k->name);
        strcpy(at, strcmp(v, "none") ? v : "");
        return true;
    }
    if (!strcmp(v, "none") && k->kind != K_VIRT) { *num = UNSET; return true; }
    switch (k->kind) {
    case K_FLAG: if (find_word(flags, v, num)) return true; return fail(p, "%s: want yes or no, not \"%s\"", k->name, v);
    case K_CC:
        if (sscanf(v, "%u.%u%c", &major, &minor, &tail) == 2) { *num = (u64)major << 16 | minor; return true; }
        return fail(p, "%s: want major.minor, not \"%s\"", k->name, v);
    case K_BRAND: if (find_word(brands, v, num)) return true; break;
    case K_ARCH: if (find_word(archs, v, num)) return true; break;
    case K_VIRT: if (find_word(virts, v, num)) return true; break;
    default: break;
    }
    return sim_text_number(v, num) || fail(p, "%s: cannot read \"%s\"", k->name, v);
}

static const struct key *find_key(const struct key *table, const char *name)
{
    for (; table->name; table++)
        if (!strcmp(table->name, name)) return table;
    return NULL;
}

/* "1g.10gb gi=7 ci=0 start=0 uuid=MIG-... used=12MiB bar1_used=2MiB index=3": one MIG device; the index is its place
 * in the list unless it is given. */
static bool add_instance(struct parser *p, char *v)
{
    struct gpu *g = p->gpu;
    if (g->instances == MAX_INSTANCES) return fail(p, "too many instances");
    struct instance *mi = &g->instance[g->instances];
    memset(mi, 0, sizeof *mi);
    mi->index = (unsigned)g->instances;
    char *save, *word = strtok_r(v, " ", &save);
    bool known = false;
    for (int i = 0; word && i < p->m->profiles; i++)
        if (!strcmp(p->m->profile[i].name, word)) { mi->profile = p->m->profile[i]; known = true; }
    if (!known) return fail(p, "no [profile %s] above this line", word ? word : "?");
    while ((word = strtok_r(NULL, " ", &save))) {
        u64 n = 0;
        char *eq = strchr(word, '=');
        if (!eq) return fail(p, "instance: want key=value, not \"%s\"", word);
        *eq++ = 0;
        if (!strcmp(word, "uuid")) { snprintf(mi->uuid, sizeof mi->uuid, "%s", eq); continue; }
        if (!sim_text_number(eq, &n)) return fail(p, "instance: %s: cannot read \"%s\"", word, eq);
        if (!strcmp(word, "gi")) mi->gi = (unsigned)n;
        else if (!strcmp(word, "ci")) mi->ci = (unsigned)n;
        else if (!strcmp(word, "start")) mi->start = (unsigned)n;
        else if (!strcmp(word, "index")) mi->index = (unsigned)n;
        else if (!strcmp(word, "used")) mi->memory_used = n;
        else if (!strcmp(word, "bar1_used")) mi->bar1_used = n;
        else if (!strcmp(word, "ecc_uncorrected")) mi->ecc_uncorrected = n;
        else return fail(p, "instance: unknown key \"%s\"", word);
    }
    if (!*mi->uuid) return fail(p, "instance: uuid is missing");
    for (int i = 0; i < g->instances; i++)
        if (g->instance[i].index == mi->index) return fail(p, "instance: another one has the same index");
    g->instances++;
    return true;
}

/* field.ID = VALUE, field.ID.SCOPE = VALUE, or "!NOT_SUPPORTED" for a per-field error. */
static bool add_field(struct parser *p, const char *key, const char *v)
{
    struct field f = {0};
    char tail;
    int n = sscanf(key, "field.%u.%u%c", &f.id, &f.scope, &tail);
    if (n != 1 && n != 2) return fail(p, "%s: want field.ID or field.ID.SCOPE", key);
    if (*v == '!' ? !sim_return_code(v + 1, &f.ret) : !sim_text_number(v, &f.value))
        return fail(p, "%s: cannot read \"%s\"", key, v);
    struct gpu *g = p->gpu;
    int i = 0;
    while (i < g->fields && (g->field[i].id != f.id || g->field[i].scope != f.scope)) i++;
    if (i == MAX_FIELDS) return fail(p, "%s: too many fields", key);
    g->field[i] = f;
    if (i == g->fields) g->fields++;
    return true;
}

static bool gpu_line(struct parser *p, const char *key, char *v)
{
    struct gpu *g = p->gpu;
    const struct key *k = find_key(gpu_keys, key);
    if (k) return set_key(p, k, g, v);
    if (!strcmp(key, "instance")) return add_instance(p, v);
    if (!strncmp(key, "field.", 6)) return add_field(p, key, v);
    if (!strcmp(key, "process")) { /* pid memory [gi ci] */
        if (g->processes == MAX_PROCESSES) return fail(p, "too many processes");
        struct process *q = &g->process[g->processes];
        unsigned mib;
        char memory[16];
        q->gi = q->ci = NOWHERE;
        bool read = sscanf(v, "%u %15s %u %u", &q->pid, memory, &q->gi, &q->ci) >= 2;
        if (read && !strcmp(memory, "N/A")) q->memory = (u64)NVML_VALUE_NOT_AVAILABLE;
        else if (read && sscanf(memory, "%uMiB", &mib) == 1) q->memory = (u64)mib << 20;
        else return fail(p, "process: want PID nMiB [GI CI], not \"%s\"", v);
        g->processes++;
        return true;
    }
    if (!strcmp(key, "unsupported")) { /* call names or patterns, parted by commas or blanks */
        char *save;
        for (char *w = strtok_r(v, ", ", &save); w; w = strtok_r(NULL, ", ", &save)) {
            if (g->unsupporteds == MAX_UNSUPPORTED || strlen(w) >= sizeof g->unsupported[0])
                return fail(p, "unsupported: too many or too long: \"%s\"", w);
            strcpy(g->unsupported[g->unsupporteds++], w);
        }
        return true;
    }
    return fail(p, "unknown key \"%s\"", key);
}

/* SET: "all", a slot "3" or slots "0-3"; true when GPU index i is in it. */
static bool in_set(const struct machine *m, const char *set, int i)
{
    unsigned from, to;
    if (!strcmp(set, "all")) return true;
    int n = sscanf(set, "%u-%u", &from, &to);
    if (n == 1) to = from;
    return n >= 1 && m->gpu[i].slot >= from && m->gpu[i].slot <= to;
}

/* nvlink = N SET [SET], topology = LEVEL SET [SET]; one set means every pair within it. Later lines win. */
static bool link_line(struct parser *p, const char *key, char *v)
{
    struct machine *m = p->m;
    char *save, *first = strtok_r(v, " ", &save);
    if (!first) return fail(p, "%s: no value", key);
    if (!strcmp(key, "switches")) {
        for (; first; first = strtok_r(NULL, " ", &save)) {
            if (m->switches == MAX_SWITCHES) return fail(p, "%s: more than 16", key);
            snprintf(m->switch_pci[m->switches++], WORD, "%s", first);
        }
        return true;
    }
    char *a = strtok_r(NULL, " ", &save), *b = strtok_r(NULL, " ", &save);
    bool topology = !strcmp(key, "topology");
    u64 n;
    if (!topology && strcmp(key, "nvlink")) return fail(p, "unknown key \"%s\"", key);
    if (!a || !(topology ? find_word(levels, first, &n) : sim_text_number(first, &n)))
        return fail(p, "%s: cannot read \"%s\"", key, first);
    if (!b) b = a;
    for (int i = 0; i < m->gpus; i++)
        for (int j = 0; j < m->gpus; j++) {
            if (i == j || !((in_set(m, a, i) && in_set(m, b, j)) || (in_set(m, b, i) && in_set(m, a, j)))) continue;
            (topology ? m->topology : m->links)[i][j] = (unsigned char)n;
        }
    return true;
}

static bool open_gpu(struct parser *p, const char *arg)
{
    struct machine *m = p->m;
    u64 slot;
    if (!sim_text_number(arg, &slot)) return fail(p, "[gpu %s]: want a number", arg);
    if (m->gpus == MAX_GPUS) return fail(p, "more than 64 GPUs");
    for (int i = 0; i < m->gpus; i++)
        if (m->gpu[i].slot == slot) return fail(p, "[gpu %s] twice", arg);
    m->gpu = realloc(m->gpu, sizeof *m->gpu * (size_t)(m->gpus + 1));
    p->gpu = &m->gpu[m->gpus++];
    *p->gpu = p->defaults;
    p->gpu->slot = (unsigned)slot;
    p->section = S_GPU;
    return true;
}

static bool open_section(struct parser *p, char *head)
{
    char *arg = strchr(head, ' ');
    if (arg) *arg++ = 0; else arg = "";
    if (!strcmp(head, "machine")) { p->section = S_MACHINE; return true; }
    if (!strcmp(head, "links")) { p->section = S_LINKS; return true; }
    if (!strcmp(head, "defaults")) { p->section = S_DEFAULTS; p->gpu = &p->defaults; return true; }
    if (!strcmp(head, "gpu")) return open_gpu(p, arg);
    if (!strcmp(head, "profile")) {
        if (p->m->profiles == MAX_PROFILES) return fail(p, "more than 32 profiles");
        p->profile = &p->m->profile[p->m->profiles++];
        snprintf(p->profile->name, WORD, "%s", arg);
        p->section = S_PROFILE;
        return true;
    }
    return fail(p, "unknown section [%s]", head);
}

static bool line(struct parser *p, char *s)
{
    for (char *h = s; *h; h++)
        if (*h == '#' && (h == s || isspace((unsigned char)h[-1]))) { *h = 0; break; }
    while (isspace((unsigned char)*s)) s++;
    for (size_t n = strlen(s); n && isspace((unsigned char)s[n - 1]);) s[--n] = 0;
    if (!*s) return true;
    if (*s == '[') {
        char *end = strchr(s, ']');
        if (!end || end[1]) return fail(p, "section line \"%s\" does not end with ]", s);
        *end = 0;
        return open_section(p, s + 1);
    }
    char *eq = strchr(s, '=');
    if (!eq) return fail(p, "neither a section nor key = value: \"%s\"", s);
    char *v = eq + 1;
    do *eq-- = 0; while (eq > s && isspace((unsigned char)*eq));
    while (isspace((unsigned char)*v)) v++;
    const struct key *k;
    unsigned major, minor;
    switch (p->section) {
    case S_MACHINE:
        if (!strcmp(s, "cuda")) {
            if (sscanf(v, "%u.%u", &major, &minor) != 2) return fail(p, "%s: cannot read \"%s\"", s, v);
            p->m->cuda = major * 1000 + minor * 10;
            return true;
        }
        k = find_key(machine_keys, s);
        return k ? set_key(p, k, p->m, v) : fail(p, "unknown key \"%s\"", s);
    case S_PROFILE:
        k = find_key(profile_keys, s);
        return k ? set_key(p, k, p->profile, v) : fail(p, "unknown key \"%s\"", s);
    case S_DEFAULTS: case S_GPU: return gpu_line(p, s, v);
    case S_LINKS: return link_line(p, s, v);
    default: return fail(p, "\"%s\" before any section", s);
    }
}

static bool complete(struct parser *p)
{
    struct machine *m = p->m;
    char tail;
    unsigned function;
    if (!*m->driver) return fail(p, "[machine] driver is missing");
    if (!*m->library) strcpy(m->library, m->driver);
    if (*m->memacct && strcmp(m->memacct, "misc") && strcmp(m->memacct, "dmem")) return fail(p, "memacct: want none, misc or dmem, not \"%s\"", m->memacct);
    if (!*m->memacct_controller) strcpy(m->memacct_controller, m->memacct);
    if (!*m->limited_total) strcpy(m->limited_total, "v2");
    if (strcmp(m->limited_total, "v1") && strcmp(m->limited_total, "v2")) return fail(p, "limited_total: want v1 or v2, not \"%s\"", m->limited_total);
    for (int i = 0; i < m->gpus; i++) {
        struct gpu *g = &m->gpu[i];
        if (!*g->uuid || !*g->pci || !*g->name) return fail(p, "[gpu %u]: name, uuid and pci are needed", g->slot);
        if (sscanf(g->pci, "%x:%x:%x.%u%c", &g->domain, &g->bus, &g->dev, &function, &tail) != 4)
            return fail(p, "[gpu %u]: pci \"%s\" is not like 0000:3b:00.0", g->slot, g->pci);
        for (int j = 0; j < i; j++)
            if (!strcmp(m->gpu[j].uuid, g->uuid) || !strcmp(m->gpu[j].pci, g->pci))
                return fail(p, "[gpu %u]: another GPU has the same uuid or pci", g->slot);
        if (g->minor == UNSET) g->minor = g->slot;
    }
    return true;
}

void sim_drop(struct machine *m)
{
    if (m && __atomic_sub_fetch(&m->refs, 1, __ATOMIC_ACQ_REL) == 0) { free(m->gpu); free(m); }
}

struct machine *sim_parse(const char *dir, char *why, size_t size)
{
    struct parser *p = calloc(1, sizeof *p);
    int number = 0;
    bool ok = true;
    char *text = sim_read_file(dir, "machine.conf");
    p->m = calloc(1, sizeof *p->m);
    p->m->refs = 1;
    p->m->loaded = p->m->wait_lost_once = 1;
    p->m->cuda = 12040;
    strcpy(p->m->cgroup_mount, "/sys/fs/cgroup");
    memset(p->m->topology, NVML_TOPOLOGY_SYSTEM, sizeof p->m->topology);
    for (const struct key *k = gpu_keys; k->name; k++)
        if (k->kind != K_TEXT) *(u64 *)((char *)&p->defaults + k->at) = UNSET;
    if (!text) ok = fail(p, "cannot be read: %s", strerror(errno));
    char *rest = text;
    for (char *s; ok && rest && (s = strsep(&rest, "\n"));) { number++; ok = line(p, s); }
    ok = ok && complete(p);
    free(text);
    struct machine *m = p->m;
    if (!ok) {
        snprintf(why, size, "%s/machine.conf:%d: %s", dir, number, p->why);
        sim_drop(m);
        m = NULL;
    }
    free(p);
    return m;
}
