/* Faults: the file `faults` beside machine.conf, one line each, read again whenever it changes.
 *
 *   fail GPU CALL RETURN [times=N] [id=N]
 *   hang GPU CALL [id=N]
 *   slow GPU CALL 200ms [id=N]
 *
 * GPU: a slot, a UUID or "all" (only "all" reaches calls that name no GPU). CALL: a name or a pattern with *;
 * a name without _vN means every version. times counts in each process on its own. */
#include "sim.h"

#include <fnmatch.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

enum { MAX_FAULTS = 128 };
struct fault { char text[256]; char what[8], gpu[WORD], call[WORD]; nvmlReturn_t ret; u64 times, used, ms; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[MAX_FAULTS];
static int count;
static struct stamp stamp;
static char stamped_dir[PATH_MAX];

static bool parse(char *text, struct fault *f)
{
    char value[WORD] = "", *save;
    int at = 0;
    memset(f, 0, sizeof *f);
    snprintf(f->text, sizeof f->text, "%s", text);
    f->times = ~0ULL;
    for (char *w = strtok_r(text, " \t", &save); w; w = strtok_r(NULL, " \t", &save)) {
        if (*w == '#') break;
        if (!strncmp(w, "times=", 6)) { if (!sim_text_number(w + 6, &f->times)) return false; continue; }
        if (!strncmp(w, "id=", 3)) continue;
        switch (at++) {
        case 0: snprintf(f->what, sizeof f->what, "%s", w); break;
        case 1: snprintf(f->gpu, sizeof f->gpu, "%s", w); break;
        case 2: snprintf(f->call, sizeof f->call, "%s", w); break;
        case 3: snprintf(value, sizeof value, "%s", w); break;
        default: return false;
        }
    }
    if (!strcmp(f->what, "fail")) return at == 4 && sim_return_code(value, &f->ret);
    if (!strcmp(f->what, "slow")) return at == 4 && sim_text_number(value, &f->ms);
    return !strcmp(f->what, "hang") && at == 3;
}

/* Under lock. A line that stays in the file keeps its count. */
static void reread(const char *dir)
{
    bool moved = strcmp(stamped_dir, dir) != 0;
    if (moved) { snprintf(stamped_dir, sizeof stamped_dir, "%s", dir); memset(&stamp, 0, sizeof stamp); count = 0; }
    if (!sim_stamp(dir, "faults", &stamp)) return;
    char *text = sim_read_file(dir, "faults"), *rest = text;
    struct fault *old = malloc(sizeof faults);
    int was = count, number = 0;
    memcpy(old, faults, sizeof faults);
    count = 0;
    for (char *s; rest && (s = strsep(&rest, "\n"));) {
        number++;
        while (*s == ' ' || *s == '\t') s++;
        if (!*s || *s == '#') continue;
        struct fault *f = &faults[count];
        if (count == MAX_FAULTS || !parse(s, f)) {
            sim_violation("faults", "%s/faults:%d: cannot be read", dir, number);
            continue;
        }
        for (int i = 0; i < was; i++)
            if (!strcmp(old[i].text, f->text)) f->used = old[i].used;
        count++;
    }
    free(old);
    free(text);
}

static bool call_matches(const char *pattern, const char *call)
{
    char base[WORD];
    if (!fnmatch(pattern, call, 0)) return true;
    snprintf(base, sizeof base, "%s", call);
    char *v = strrchr(base, '_');
    if (!v || v[1] != 'v') return false;
    *v = 0;
    return !fnmatch(pattern, base, 0);
}

/* Under lock: the first fault of the kind that concerns this call. */
static struct fault *find(const char *what, const char *call, int slot, const char *uuid)
{
    char number[16];
    snprintf(number, sizeof number, "%d", slot);
    for (int i = 0; i < count; i++) {
        struct fault *f = &faults[i];
        if (strcmp(f->what, what) || f->used >= f->times || !call_matches(f->call, call)) continue;
        if (!strcmp(f->gpu, "all") || (slot >= 0 && !strcmp(f->gpu, number)) || (uuid && !strcmp(f->gpu, uuid)))
            return f;
    }
    return NULL;
}

static bool hung(const char *call, int slot, const char *uuid)
{
    pthread_mutex_lock(&lock);
    reread(sim_dir());
    bool yes = find("hang", call, slot, uuid) != NULL;
    pthread_mutex_unlock(&lock);
    return yes;
}

nvmlReturn_t sim_fault(const char *call, int slot, const char *uuid)
{
    if (hung(call, slot, uuid)) {
        struct watch w;
        sim_watch_open(&w);
        while (hung(call, slot, uuid)) sim_watch_wait(&w, -1, -1);
        sim_watch_close(&w);
    }
    pthread_mutex_lock(&lock);
    struct fault *f = find("slow", call, slot, uuid);
    u64 ms = f ? f->ms : 0;
    pthread_mutex_unlock(&lock);
    if (ms) nanosleep(&(struct timespec){(time_t)(ms / 1000), (long)(ms % 1000) * 1000000}, NULL);
    pthread_mutex_lock(&lock);
    nvmlReturn_t ret = NVML_SUCCESS;
    if ((f = find("fail", call, slot, uuid))) { f->used++; ret = f->ret; }
    pthread_mutex_unlock(&lock);
    return ret;
}

/* ---- watches ---- */

void sim_watch_open(struct watch *w)
{
    w->fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (w->fd >= 0 && inotify_add_watch(w->fd, sim_dir(), IN_MODIFY | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_CLOSE_WRITE) < 0) {
        close(w->fd);
        w->fd = -1;
    }
}

void sim_watch_close(struct watch *w)
{
    if (w->fd >= 0) close(w->fd);
    w->fd = -1;
}

void sim_watch_wait(struct watch *w, int wakefd, long long ms)
{
    struct pollfd p[2] = {{w->fd, POLLIN, 0}, {wakefd, POLLIN, 0}}; /* poll ignores negative descriptors */
    if (ms < 0 || ms > 60000) ms = 60000;
    if (w->fd < 0 && ms > 5) ms = 5;
    if (poll(p, 2, (int)ms) > 0 && (p[0].revents & POLLIN)) {
        char drop[4096];
        while (read(w->fd, drop, sizeof drop) > 0) {}
    }
}
