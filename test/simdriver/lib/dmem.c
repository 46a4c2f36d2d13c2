/* The backend dmem: files of the groups, which the driver's library reads and writes [30]. kernel/cgroup/dmem.c of Linux is the source of the rules. */
#include "dmem.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void dmem_region(struct gpu *g, char *name, size_t size) { snprintf(name, size, "nvidia/%08x:%02x:%02x.0/vidmem", g->domain, g->bus, g->dev); }

/* The value of a region in a file of a group; unset if there is no line. */
static u64 read_region(const char *group, const char *file, const char *region, u64 unset)
{
    char *text = cgroup_read(group, file), *rest = text;
    size_t n = strlen(region);
    u64 v = unset;
    for (char *line; rest && (line = strsep(&rest, "\n"));)
        if (!strncmp(line, region, n) && line[n] == ' ') v = !strcmp(line + n + 1, "max") ? NO_LIMIT : strtoull(line + n + 1, NULL, 10);
    free(text);
    return v;
}

/* Replaces, or removes, the line of a region. */
static void write_region(const char *group, const char *file, const char *region, u64 value, bool remove)
{
    char path[PATH_MAX], *text = cgroup_read(group, file), *rest = text, *out = NULL;
    size_t n = strlen(region), size = 0;
    FILE *f = open_memstream(&out, &size);
    for (char *line; rest && (line = strsep(&rest, "\n"));)
        if (*line && (strncmp(line, region, n) || line[n] != ' ')) fprintf(f, "%s\n", line);
    if (!remove && value == NO_LIMIT) fprintf(f, "%s max\n", region);
    else if (!remove) fprintf(f, "%s %llu\n", region, value);
    fclose(f);
    free(text);
    snprintf(path, sizeof path, "%s/%s", group, file);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, out, size) != (ssize_t)size) sim_violation("memacct", "%s not written: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    free(out);
}

/* Whether a group has the controller's files. Those of an ordinary folder are made here; a kernel makes its own. */
static bool has_dmem(struct machine *m, const char *group, const char *region)
{
    if (!cgroup_has_controller(m, group)) return false;
    if (cgroup_is_real(group)) return cgroup_has_file(group, "dmem.max");
    if (read_region(group, "dmem.current", region, NO_LIMIT) == NO_LIMIT) write_region(group, "dmem.current", region, 0, false);
    if (cgroup_is_root(m, group)) return true;
    if (read_region(group, "dmem.max", region, NO_LIMIT - 1) == NO_LIMIT - 1) write_region(group, "dmem.max", region, NO_LIMIT, false);
    if (read_region(group, "dmem.min", region, NO_LIMIT) == NO_LIMIT) write_region(group, "dmem.min", region, 0, false);
    return true;
}

nvmlReturn_t dmem_set(struct machine *m, const char *group, const char *region, u64 soft, u64 hard)
{
    char at[PATH_MAX];
    if (cgroup_is_root(m, group)) return NVML_ERROR_NOT_SUPPORTED;
    if (!has_dmem(m, group, region)) return NVML_ERROR_NOT_FOUND;
    if (hard >= read_region(group, "dmem.current", region, 0)) write_region(group, "dmem.max", region, hard, false); /* else silently not taken */
    u64 was = read_region(group, "dmem.min", region, 0);
    strcpy(at, group);
    do
        if (has_dmem(m, at, region)) write_region(at, "dmem.min", region, read_region(at, "dmem.min", region, 0) - was + soft, false);
    while (cgroup_up(m, at) && !cgroup_is_root(m, at));
    return NVML_SUCCESS;
}

nvmlReturn_t dmem_get(struct machine *m, const char *group, const char *region, nvmlGetMemoryLimits_v1_t *l)
{
    if (cgroup_is_root(m, group) || !has_dmem(m, group, region)) return NVML_ERROR_NOT_FOUND;
    l->softLimit = read_region(group, "dmem.min", region, 0);
    l->hardLimit = read_region(group, "dmem.max", region, NO_LIMIT);
    l->currentUsed = read_region(group, "dmem.current", region, 0);
    return NVML_SUCCESS;
}

bool dmem_charge(struct machine *m, const char *group, const char *region, u64 bytes)
{
    char at[PATH_MAX];
    strcpy(at, group);
    do {
        if (!has_dmem(m, at, region) || cgroup_is_root(m, at)) continue;
        u64 max = read_region(at, "dmem.max", region, NO_LIMIT), used = read_region(at, "dmem.current", region, 0);
        if (used > max || bytes > max - used) return false;
    } while (cgroup_up(m, at));
    strcpy(at, group);
    do
        if (has_dmem(m, at, region)) write_region(at, "dmem.current", region, read_region(at, "dmem.current", region, 0) + bytes, false);
    while (cgroup_up(m, at));
    return true;
}

void dmem_release(struct machine *m, const char *group, const identity of, const char *region, u64 bytes)
{
    char at[PATH_MAX];
    identity id;
    bool leaf = true;
    strcpy(at, group);
    for (;; leaf = false) {
        bool there = cgroup_identify(at, id) && (!leaf || !strcmp(id, of));
        u64 used = there ? read_region(at, "dmem.current", region, 0) : 0;
        if (used) write_region(at, "dmem.current", region, used > bytes ? used - bytes : 0, false);
        char *slash = strrchr(at, '/');
        if (cgroup_is_root(m, at) || !slash || slash == at) return;
        *slash = 0;
    }
}

static char unregistered[WORD]; /* the callers have one lock: nftw has no argument for its function */

static int unregister(const char *path, const struct stat *st, int type, struct FTW *at)
{
    static const char *const files[] = {"dmem.max", "dmem.min", "dmem.current"};
    (void)st, (void)at;
    for (size_t i = 0; type == FTW_D && i < sizeof files / sizeof *files; i++)
        if (cgroup_has_file(path, files[i])) write_region(path, files[i], unregistered, 0, true);
    return 0;
}

void dmem_unregister(struct machine *m, struct gpu *g)
{
    dmem_region(g, unregistered, sizeof unregistered);
    nftw(m->cgroup_mount, unregister, 16, FTW_PHYS);
}
