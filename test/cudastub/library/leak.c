// A program that allocates memory of its first device and never frees it: leak LIBRARY STEP MOST, in MiB. It prints the total that it sees, what it has when an
// allocation fails, with the CUresult, or when it has MOST, and keeps that until its input ends.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
  void *cuda = argc == 4 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (!cuda) return fprintf(stderr, "%s\n", argc == 4 ? dlerror() : "want LIBRARY STEP MOST"), 2;
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
  int (*create)(void **, unsigned, int) = (int (*)(void **, unsigned, int))dlsym(cuda, "cuCtxCreate_v2");
  int (*information)(size_t *, size_t *) = (int (*)(size_t *, size_t *))dlsym(cuda, "cuMemGetInfo_v2");
  int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(cuda, "cuMemAlloc_v2");
  void *context;
  size_t unused, total;
  if (init(0) || create(&context, 4 /* CU_CTX_SCHED_BLOCKING_SYNC */, 0) || information(&unused, &total)) return fprintf(stderr, "no device\n"), 2;
  printf("total %zu MiB\n", total >> 20);
  size_t step = strtoul(argv[2], NULL, 10), most = strtoul(argv[3], NULL, 10), has = 0;
  uint64_t memory;
  int result = 0;
  for (; has < most && !(result = allocate(&memory, step << 20)); has += step) {}
  printf("has %zu MiB, result %d\n", has, result);
  fflush(stdout);
  char end;
  while (read(0, &end, 1) > 0) {}
  return 0;
}
