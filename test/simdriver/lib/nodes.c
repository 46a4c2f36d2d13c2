/* The device nodes that this process holds, as NVIDIA's library holds them: nvidiactl from the first init on,
 * a GPU's from its first handle on (one handle keeps the node, whatever becomes of the GPU), all until the last
 * shutdown. No driver stands behind the simulated nodes, so an open would fail with ENXIO; O_PATH opens any
 * node, and /proc/PID/fd shows it all the same. */
#include "sim.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

enum { CONTROL = 0 }; /* a GPU's is 1 + its minor number */
static struct { unsigned node; int fd; } held[1 + MAX_GPUS];
static int count;

static void hold(const char *dir, unsigned node)
{
    char path[PATH_MAX + 32];
    for (int i = 0; i < count; i++)
        if (held[i].node == node) return;
    if (count == (int)(sizeof held / sizeof *held)) return;
    if (node == CONTROL) snprintf(path, sizeof path, "%s/dev/nvidiactl", dir);
    else snprintf(path, sizeof path, "%s/dev/nvidia%u", dir, node - 1);
    int fd = open(path, O_PATH | O_CLOEXEC); /* the real library's have FD_CLOEXEC too */
    if (fd < 0) return;                      /* a machine without its trees works as well */
    held[count].node = node;
    held[count++].fd = fd;
}

void sim_hold_control(const char *dir) { hold(dir, CONTROL); }

void sim_hold_gpu(const char *dir, const struct gpu *g) { hold(dir, 1 + (unsigned)g->minor); }

void sim_release_nodes(void)
{
    while (count > 0) close(held[--count].fd);
}
