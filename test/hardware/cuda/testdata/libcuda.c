// A CUDA driver for tests of probe.c: it has the devices of CUDA_VISIBLE_DEVICES ("GPU-...,GPU-..."), host memory for theirs, and
// one kernel. STUB_CUDA_FAULT names what is wrong: "init", "memory" (a copy changes a value), "kernel" (nothing is computed).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fault(const char *name) { return getenv("STUB_CUDA_FAULT") && !strcmp(getenv("STUB_CUDA_FAULT"), name); }

static const char *visible(int device) {
  const char *at = getenv("CUDA_VISIBLE_DEVICES");
  if (!at || !*at) return NULL;
  for (; device > 0; device--)
    if (!(at = strchr(at, ',')) || !*++at) return NULL;
  return at;
}

int cuInit(unsigned flags) { return fault("init") ? 100 : (int)flags; }
int cuDeviceGetCount(int *count) { for (*count = 0; visible(*count);) ++*count; return 0; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, (size_t)size, "Device of a test %d", device) < 0; }
int cuGetErrorName(int result, const char **name) { *name = result == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OTHER"; return 0; }

int cuDeviceGetUuid_v2(unsigned char *id, int device) {
  const char *at = visible(device) + strlen("GPU-");
  for (int i = 0; i < 16; i++, at += 2) {
    if (*at == '-') at++;
    unsigned byte;
    if (sscanf(at, "%2x", &byte) != 1) return 1;
    id[i] = (unsigned char)byte;
  }
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return device < 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device < 0; }
int cuCtxSetCurrent(void *context) { return !context; }
int cuMemAlloc_v2(unsigned long long *memory, size_t size) { *memory = (unsigned long long)calloc(1, size); return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) { memcpy(to, (void *)from, size); if (fault("memory")) ++*(char *)to; return 0; }
int cuModuleLoadData(void **module, const void *text) { *module = strstr(text, ".target sm_75") && strstr(text, ".entry triple") ? (void *)text : NULL; return !*module; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return strcmp(name, "triple"); }
int cuCtxSynchronize(void) { return 0; }

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **arguments, void **extra) {
  unsigned *values = *(unsigned **)arguments[0];
  if (!function || gx * gy * gz != 1 || by * bz != 1 || shared || stream || extra) return 1;
  for (unsigned i = 0; i < bx && !fault("kernel"); i++) values[i] = 3 * values[i] + i;
  return 0;
}
