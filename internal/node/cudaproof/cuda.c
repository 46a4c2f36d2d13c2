#include "cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define DEFINE(name, params, args) \
  int call_##name(struct cuda *cuda, params) { return ((int (*)(params))cuda->name) args; }
CALLS(DEFINE)
#undef DEFINE

void cuda_preload(const char *path) { dlopen(path, RTLD_NOW | RTLD_GLOBAL); }

struct cuda *cuda_open(const char *path, char *error, size_t size) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(error, size, "%s", dlerror());
    return NULL;
  }
  struct cuda *cuda = calloc(1, sizeof *cuda);
  if (!cuda) {
    snprintf(error, size, "out of memory");
    return NULL;
  }
  const char *missing = NULL;
#define FIND(name, params, args) \
  if (!(cuda->name = dlsym(library, #name)) && !missing) missing = #name;
  CALLS(FIND)
#undef FIND
  if (!missing) return cuda;
  // The library stays loaded: its threads may run, and the process ends soon.
  snprintf(error, size, "%s: no function %s", path, missing);
  free(cuda);
  return NULL;
}

int cuda_load(struct cuda *cuda, void **module, const char *text, char *errors, size_t size) {
  enum { ERROR_LOG_BUFFER = 5, ERROR_LOG_BUFFER_SIZE_BYTES = 6 }; // CUjit_option
  int options[] = {ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {errors, (void *)(uintptr_t)size};
  return call_cuModuleLoadDataEx(cuda, module, text, 2, options, values);
}

int cuda_launch(struct cuda *cuda, void *function, unsigned blocks_x, unsigned blocks_y, unsigned threads, const uint64_t *values, int count) {
  void *params[8];
  if (count > 8) return 1; // CUDA_ERROR_INVALID_VALUE
  for (int i = 0; i < count; i++) params[i] = (void *)&values[i];
  return call_cuLaunchKernel(cuda, function, blocks_x, blocks_y, 1, threads, 1, 1, 0, NULL, params, NULL);
}
