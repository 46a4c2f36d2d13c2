/* Control groups of a machine, real ones or an ordinary tree: see cgroups.c. A path has PATH_MAX bytes. */
#ifndef CGROUPS_H
#define CGROUPS_H

#include "sim.h"

/* Identifies a group beyond its path. The inode number of an ordinary folder is used again at once, but not in the same nanosecond. */
typedef char identity[64];

bool cgroup_identify(const char *path, identity id);
bool cgroup_is_real(const char *path);                                   /* of a cgroup2 mount */
bool cgroup_has_file(const char *group, const char *name);
bool cgroup_is_root(struct machine *m, const char *path);
bool cgroup_up(struct machine *m, char *path);                           /* to the group above; false at the root, and where a cgroup namespace ends */
bool cgroup_open(struct machine *m, const char *group, char *path);      /* its canonical path; false unless it is a group (cgroup_get_from_fd refuses others) */
char *cgroup_read(const char *group, const char *name);                  /* malloc'd text of a file, which has no size in a real one; NULL without it */
bool cgroup_has_controller(struct machine *m, const char *group);        /* memacct_controller of the machine */

#endif
