/* Control groups: folders of a cgroup2 mount, or of an ordinary tree below the machine's mount point. */
#include "cgroups.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

bool cgroup_identify(const char *path, identity id)
{
    struct statx x;
    if (statx(AT_FDCWD, path, 0, STATX_INO | STATX_TYPE | STATX_BTIME, &x) || !S_ISDIR(x.stx_mode)) return false;
    bool has_birth = x.stx_mask & STATX_BTIME;
    snprintf(id, sizeof(identity), "%x.%x:%llx:%llx", x.stx_dev_major, x.stx_dev_minor, (u64)x.stx_ino,
             has_birth ? (u64)x.stx_btime.tv_sec * 1000000000ULL + x.stx_btime.tv_nsec : 0);
    return true;
}

bool cgroup_is_real(const char *path)
{
    struct statfs fs;
    return !statfs(path, &fs) && fs.f_type == CGROUP2_SUPER_MAGIC;
}

bool cgroup_has_file(const char *group, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", group, name);
    return !access(path, F_OK);
}

bool cgroup_is_root(struct machine *m, const char *path)
{
    identity mount, id;
    if (cgroup_is_real(path)) return !cgroup_has_file(path, "cgroup.type"); /* cgroup-v2.rst: "exists on non-root cgroups" */
    return cgroup_identify(m->cgroup_mount, mount) && cgroup_identify(path, id) && !strcmp(mount, id);
}

bool cgroup_up(struct machine *m, char *path)
{
    char *slash = strrchr(path, '/');
    if (cgroup_is_root(m, path) || !slash || slash == path) return false;
    bool real = cgroup_is_real(path);
    char was = *slash;
    *slash = 0;
    if (real && !cgroup_is_real(path)) { *slash = was; return false; }
    return true;
}

bool cgroup_open(struct machine *m, const char *group, char *path)
{
    char at[PATH_MAX];
    identity id;
    if (!group || !realpath(group, path) || !cgroup_identify(path, id)) return false;
    if (cgroup_is_real(path)) return true;
    strcpy(at, path);
    while (!cgroup_is_root(m, at))
        if (!cgroup_up(m, at)) return false;
    return true;
}

char *cgroup_read(const char *group, const char *name)
{
    char path[PATH_MAX], *text = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, "%s/%s", group, name);
    FILE *f = fopen(path, "re");
    if (f && getdelim(&text, &room, 0, f) < 0) { free(text); text = NULL; }
    if (f) fclose(f);
    return text;
}

bool cgroup_has_controller(struct machine *m, const char *group)
{
    if (cgroup_is_root(m, group)) return true;
    char *text = cgroup_read(group, "cgroup.controllers"), *save, *at = text ? strtok_r(text, " \n", &save) : NULL;
    while (at && strcmp(at, m->memacct_controller)) at = strtok_r(NULL, " \n", &save);
    free(text);
    return at != NULL;
}
