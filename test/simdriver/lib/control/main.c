/* The program memacct of a machine: allocations and groups of tests and simctl, by the rules of ../memacct.c.
 *
 *   memacct DIR      reads commands, a line each with its words parted by tabs, and answers each with a line
 *
 *   allocate SLOT BYTES GROUP    ok ID, or refused; without a GROUP the creator has ended
 *   import ID | free ID          one client more or less
 *   reuse ENDED GROUP            GROUP gets the address of ENDED */
#include "../memacct.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void sim_violation(const char *call, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "%s: ", call);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
}

static void allocate(const char *dir, struct machine *m, char **word, int n)
{
    u64 id;
    for (int i = 0; n >= 3 && i < m->gpus; i++) {
        if (m->gpu[i].slot != strtoul(word[1], NULL, 10)) continue;
        if (memacct_allocate(dir, m, &m->gpu[i], n > 3 ? word[3] : NULL, strtoull(word[2], NULL, 10), CONTROL, &id)) printf("ok %llu\n", id);
        else printf("refused\n");
        return;
    }
    printf("no such GPU\n");
}

int main(int argc, char **argv)
{
    static char line[16384];
    char why[512];
    if (argc != 2) return 2;
    while (fgets(line, sizeof line, stdin)) {
        char *word[4] = {0}, *rest = line;
        int n = 0;
        line[strcspn(line, "\n")] = 0;
        for (char *w; n < 4 && (w = strsep(&rest, "\t"));) word[n++] = w;
        struct machine *m = sim_parse(argv[1], why, sizeof why);
        if (!m) printf("%s\n", why);
        else if (!strcmp(word[0], "allocate")) allocate(argv[1], m, word, n);
        else if (!strcmp(word[0], "import") && n == 2) { memacct_import(argv[1], m, strtoull(word[1], NULL, 10), CONTROL); printf("ok\n"); }
        else if (!strcmp(word[0], "free") && n == 2) { memacct_release(argv[1], m, strtoull(word[1], NULL, 10), CONTROL); printf("ok\n"); }
        else if (!strcmp(word[0], "reuse") && n == 3) printf("%s\n", memacct_reuse(argv[1], m, word[1], word[2]) ? "ok" : strerror(errno));
        else printf("unknown command\n");
        sim_drop(m);
        fflush(stdout);
    }
    return 0;
}
