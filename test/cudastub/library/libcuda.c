// A CUDA driver for tests: its devices are those of CUDA_VISIBLE_DEVICES ("GPU-...,GPU-..."), and of STUB_CUDA_DEVICES or NVIDIA_VISIBLE_DEVICES where that is
// not set. Their memory is the node's, and kernels are functions of C with the names of those that the tested programs have.
//
// Beside the library of a simulated machine with limits of memory (test/simdriver, key memacct), allocations are charged to the control group of the process by
// its rules. What is beyond a limit is CUDA_ERROR_OUT_OF_MEMORY, and in a group with a limit that is the total.
//
// STUB_CUDA_FAULT is what is wrong:
//   CALL=CODE, CALL=CODE@N   a call returns a CUresult; from its N-th call on
//   CALL=hang                it does not return
//   init                     cuInit=100
//   memory                   copies from the device have a wrong byte
//   kernel                   kernels compute nothing
//   stuck                    a bit of the memory that a pattern is written to is always 1
//   to                       copies to the device, without waiting for them, have a wrong byte
//   from                     the same, from the device
//   fragments                no allocation of more than 48 MiB succeeds
//   product, tensor          products of the kernel have a wrong value
// With the macro STUB_CUDA_BAD a device with this UUID, "GPU-...", has the fault "product", for a program to which a test can't give variables.
// STUB_CUDA_CAPABILITY is the compute capability, such as 75 (default: 90), STUB_CUDA_MODE the compute mode, STUB_CUDA_FREE the free memory in MiB of 512 (default: 20 of 24).
#include "memacct.h"

#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t address;

#ifndef STUB_CUDA_BAD
#define STUB_CUDA_BAD ""
#endif

static int fault(const char *name) {
  const char *at = getenv("STUB_CUDA_FAULT"), *device = getenv("CUDA_VISIBLE_DEVICES");
  return at ? !strcmp(at, name) : device && !strcmp(device, STUB_CUDA_BAD) && !strcmp(name, "product");
}

// injected is the result of a call that STUB_CUDA_FAULT names. count is the number of calls.
static int injected(const char *call, int *count) {
  const char *at = getenv("STUB_CUDA_FAULT");
  size_t length = strlen(call);
  ++*count;
  if (!at || strncmp(at, call, length) || at[length] != '=') return 0;
  while (!strcmp(at + length, "=hang")) sleep(60);
  const char *from = strchr(at, '@');
  return from && *count < atoi(from + 1) ? 0 : atoi(at + length + 1);
}

#define CALL(name) \
  do { \
    static int count; \
    int result = injected(#name, &count); \
    if (result) return result; \
  } while (0)

static const char *visible(int device) {
  const char *at = getenv("CUDA_VISIBLE_DEVICES");
  if (!at) at = getenv("STUB_CUDA_DEVICES");
  if (!at && (at = getenv("NVIDIA_VISIBLE_DEVICES")) && strncmp(at, "GPU-", 4)) at = NULL;
  if (!at || !*at) return NULL;
  for (; device > 0; device--)
    if (!(at = strchr(at, ',')) || !*++at) return NULL;
  return at;
}

int cuInit(unsigned flags) { CALL(cuInit); return fault("init") ? 100 : (int)flags; }
int cuDriverGetVersion(int *version) { CALL(cuDriverGetVersion); *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { CALL(cuDeviceGetCount); for (*count = 0; visible(*count);) ++*count; return 0; }
int cuDeviceGet(int *device, int ordinal) { CALL(cuDeviceGet); *device = ordinal; return ordinal < 0; }
int cuDeviceGetName(char *name, int size, int device) { CALL(cuDeviceGetName); return snprintf(name, (size_t)size, "Device of a test %d", device) < 0; }
int cuGetErrorString(int result, const char **text) { *text = "text of the stub"; return result < 0; }

int cuGetErrorName(int result, const char **name) {
  *name = result == 100 ? "CUDA_ERROR_NO_DEVICE" : result == 214 ? "CUDA_ERROR_ECC_UNCORRECTABLE" : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
  return 0;
}

int cuDeviceGetUuid_v2(unsigned char *id, int device) {
  CALL(cuDeviceGetUuid_v2);
  const char *at = visible(device) + strlen("GPU-");
  for (int i = 0; i < 16; i++, at += 2) {
    if (*at == '-') at++;
    unsigned byte;
    if (sscanf(at, "%2x", &byte) != 1) return 1;
    id[i] = (unsigned char)byte;
  }
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  CALL(cuDeviceGetAttribute);
  const char *capability = getenv("STUB_CUDA_CAPABILITY"), *mode = getenv("STUB_CUDA_MODE");
  int number = capability ? atoi(capability) : 90;
  *value = attribute == 75 ? number / 10 : attribute == 76 ? number % 10 : attribute == 16 ? 4 : attribute == 20 && mode ? atoi(mode) : 0;
  return device < 0;
}

// The context of a device is its place here.
static char contexts[64];
static __thread int current; // device of the thread's context
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device & 63]; return device < 0; }
int cuCtxSetCurrent(void *context) { current = (int)((char *)context - contexts); return !context; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { CALL(cuCtxCreate_v2); *context = &contexts[(current = device) & 63]; return flags == 0 || device < 0; }
int cuCtxDestroy_v2(void *context) { CALL(cuCtxDestroy_v2); return !context; }

// Limits of memory of a simulated machine.
void sim_violation(const char *call, const char *text, ...) {
  va_list args;
  va_start(args, text);
  fprintf(stderr, "libcuda: %s: ", call);
  vfprintf(stderr, text, args);
  fputc('\n', stderr);
  va_end(args);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char dir[PATH_MAX]; // of the machine; "" = there is none with limits
static uint64_t client;
static struct { address at; size_t size; u64 charge; } *allocations;
static int allocated;

// limited is the machine as it is now, and the device as a GPU of it; NULL if that has no limits. sim_drop ends its use.
static struct machine *limited(int device, struct gpu **g) {
  static int sought;
  static char why[512];
  pthread_mutex_lock(&lock);
  if (!sought++ && !sim_find(dir, sizeof dir)) *dir = 0;
  struct machine *m = *dir ? sim_parse(dir, why, sizeof why) : NULL;
  const char *uuid = visible(device);
  *g = NULL;
  for (int i = 0; m && uuid && *m->memacct && sim_has_limits(m) && i < m->gpus; i++)
    if (!strncmp(uuid, m->gpu[i].uuid, strlen(m->gpu[i].uuid))) *g = &m->gpu[i];
  if (m && !*g) sim_drop(m), m = NULL;
  if (m && !client) client = memacct_client(dir, m);
  pthread_mutex_unlock(&lock);
  return m;
}

// total is the memory of a device as this process sees it; false without a machine that has limits.
static int total(int device, size_t *of, size_t *used) {
  struct gpu *g;
  struct machine *m = limited(device, &g);
  nvmlGetMemoryLimits_v1_t l;
  if (!m) return 0;
  int own = memacct_own_limit(dir, m, g, &l);
  *of = own ? l.hardLimit : g->memory;
  *used = own ? l.currentUsed : 0;
  sim_drop(m);
  return 1;
}

// allocate charges memory to the group of the process. It takes none of the node's memory before it is written.
static int allocate(struct machine *m, struct gpu *g, size_t size, address *memory) {
  char group[PATH_MAX];
  u64 charge;
  if (!memacct_allocate(dir, m, g, memacct_own_group(m, group) ? group : NULL, size, client, &charge)) return 2;
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    memacct_release(dir, m, charge, client);
    return 2;
  }
  pthread_mutex_lock(&lock);
  allocations = realloc(allocations, sizeof *allocations * (size_t)(allocated + 1));
  allocations[allocated].at = *memory = (address)at;
  allocations[allocated].size = size;
  allocations[allocated++].charge = charge;
  pthread_mutex_unlock(&lock);
  return 0;
}

// release reports whether the memory was allocated by allocate.
static int release(address memory) {
  struct gpu *g;
  struct machine *m = limited(current, &g);
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < allocated && allocations[i].at != memory) i++;
  int mine = i < allocated;
  size_t size = mine ? allocations[i].size : 0;
  u64 charge = mine ? allocations[i].charge : 0;
  if (mine) allocations[i] = allocations[--allocated];
  pthread_mutex_unlock(&lock);
  if (mine) munmap((void *)memory, size);
  if (mine && m) memacct_release(dir, m, charge, client);
  if (m) sim_drop(m);
  return mine;
}

int cuDeviceTotalMem_v2(size_t *of, int device) {
  CALL(cuDeviceTotalMem_v2);
  size_t used;
  if (!total(device, of, &used)) *of = (size_t)(getenv("STUB_CUDA_FREE") ? 512 : 24) << 20;
  return device < 0;
}

int cuMemGetInfo_v2(size_t *unused, size_t *of) {
  CALL(cuMemGetInfo_v2);
  size_t used;
  if (total(current, of, &used)) {
    *unused = *of > used ? *of - used : 0;
    return 0;
  }
  *of = (size_t)(getenv("STUB_CUDA_FREE") ? 512 : 24) << 20;
  *unused = (size_t)(getenv("STUB_CUDA_FREE") ? atoi(getenv("STUB_CUDA_FREE")) : 20) << 20;
  return 0;
}

int cuMemAlloc_v2(address *memory, size_t size) {
  CALL(cuMemAlloc_v2);
  struct gpu *g;
  struct machine *m = limited(current, &g);
  if (fault("fragments") && size > 48 << 20) return 2;
  if (!m) {
    *memory = (address)calloc(1, size);
    return 0;
  }
  int result = allocate(m, g, size, memory);
  sim_drop(m);
  return result;
}

int cuMemFree_v2(address memory) { CALL(cuMemFree_v2); if (!release(memory)) free((void *)memory); return 0; }
int cuMemHostAlloc(void **memory, size_t size, unsigned flags) { CALL(cuMemHostAlloc); *memory = malloc(size); return flags != 0; }
int cuMemFreeHost(void *memory) { CALL(cuMemFreeHost); free(memory); return 0; }
int cuMemsetD32Async(address memory, unsigned value, size_t count, void *stream) {
  CALL(cuMemsetD32Async);
  for (size_t i = 0; i < count; i++) ((unsigned *)memory)[i] = value;
  return stream != NULL;
}

int cuMemcpyHtoD_v2(address to, const void *from, size_t size) { CALL(cuMemcpyHtoD_v2); memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, address from, size_t size) { CALL(cuMemcpyDtoH_v2); memcpy(to, (void *)from, size); if (fault("memory")) ++*(char *)to; return 0; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream) { CALL(cuMemcpyHtoDAsync_v2); memcpy((void *)to, from, size); if (fault("to")) ++*(char *)to; return stream != NULL; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, void *stream) { CALL(cuMemcpyDtoHAsync_v2); memcpy(to, (void *)from, size); if (fault("from")) ++*(char *)to; return stream != NULL; }

int cuStreamSynchronize(void *stream) { CALL(cuStreamSynchronize); return stream != NULL; }
int cuEventCreate(void **event, unsigned flags) { CALL(cuEventCreate); *event = calloc(1, sizeof(struct timespec)); return flags != 0; }
int cuEventDestroy_v2(void *event) { CALL(cuEventDestroy_v2); free(event); return 0; }
int cuEventRecord(void *event, void *stream) { CALL(cuEventRecord); return stream != NULL || clock_gettime(CLOCK_MONOTONIC, event); }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
  CALL(cuEventElapsedTime);
  const struct timespec *a = start, *b = end;
  *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) / 1e6);
  return 0;
}

// The first line of the text has the version, the second the target: tests of the text are those of the programs.
int cuModuleLoadData(void **module, const void *text) { *module = (void *)text; return !strstr(text, ".target sm_") || !strstr(text, ".entry "); }
int cuModuleLoadDataEx(void **module, const void *text, unsigned count, int *options, void **values) {
  CALL(cuModuleLoadDataEx);
  static char kept[1 << 20]; // the text may go after the call
  if (count != 2 || options[0] != 5 || options[1] != 6 || strlen(text) >= sizeof kept) return 1;
  if (fault("text")) snprintf(values[0], (size_t)values[1], "ptxas application ptx input, line 7; error : wrong\n");
  *module = strcpy(kept, text);
  return fault("text") ? 218 : !strstr(text, ".target sm_") || !strstr(text, ".entry ");
}

// Kernels. Every parameter has 64 bits.
struct findings { uint64_t count, offset, wanted, there; };

static void find(struct findings *f, uint32_t wanted, uint32_t there, uint64_t offset) {
  if (wanted != there && f->count++ == 0) *f = (struct findings){1, offset, wanted, there};
}

static void words(uint32_t *w, uint64_t place, const uint64_t *p) {
  uint32_t low = (uint32_t)place, high = (uint32_t)(place >> 32), seed = (uint32_t)p[3], invert = (uint32_t)p[4];
  uint32_t x = high * 0x85ebca77u + low * 0x9e3779b1u + seed;
  w[0] = x ^ invert, w[1] = ~x ^ invert, w[2] = low ^ seed ^ invert, w[3] = (x * 0xc2b2ae35u ^ high) ^ invert;
}

static void fill(const uint64_t *p) {
  for (uint64_t i = 0; i < p[1]; i++) words((uint32_t *)p[0] + 4 * i, p[2] + i, p);
  if (fault("stuck")) ((uint32_t *)p[0])[4 * 1000 + 2] |= 1 << 7;
}

static void check(const uint64_t *p) {
  for (uint64_t i = 0; i < p[1]; i++) {
    uint32_t w[4];
    words(w, p[2] + i, p);
    for (int k = 0; k < 4; k++) find((struct findings *)p[5], w[k], ((uint32_t *)p[0])[4 * i + k], (p[2] + i) * 16 + 4 * k);
  }
}

// repeat makes an n·n matrix of the values that repeat after 128 rows and columns.
static void repeat(float *c, const float *values, uint64_t n) {
  for (uint64_t row = 0; row < n; row++)
    for (uint64_t column = 0; column < n; column += 128) memcpy(c + row * n + column, values + row % 128 * 128, 128 * sizeof *c);
}

static float half(uint16_t h) {
  float v = (float)(h >> 10 & 31 ? (h & 0x3ff) | 0x400 : 0);
  for (int e = (h >> 10 & 31) - 25; e < 0; e++) v /= 2;
  return h >> 15 ? -v : v;
}

// fragment is a value of a matrix that is stored as fragments of mma.m16n8k16: the first 16 are of a row (a), or of a column (b).
static float fragment(const uint16_t *values, uint64_t n, unsigned outer, unsigned k, int b) {
  unsigned lane = outer % 8 * 4 + k % 8 / 2, high = outer % 16 / 8, later = k % 16 / 8;
  unsigned pair = b ? 2 * high + later : 2 * later + high;
  return half(values[((uint64_t)(outer / 16) * (n / 16) + k / 16) * 256 + lane * 8 + pair * 2 + k % 2]);
}

static void multiply(const uint64_t *p, int tensor) {
  static float values[128 * 128];
  uint64_t n = p[3];
  for (unsigned row = 0; row < 128; row++)
    for (unsigned column = 0; column < 128; column++) {
      float sum = 0;
      for (unsigned k = 0; k < 128; k++)
        sum += tensor ? fragment((uint16_t *)p[0], n, row, k, 0) * fragment((uint16_t *)p[1], n, column, k, 1) : ((float *)p[0])[k * n + row] * ((float *)p[1])[k * n + column];
      values[row * 128 + column] = sum * (float)(n / 128);
    }
  repeat((float *)p[2], values, n);
  if (fault(tensor ? "tensor" : "product")) ((float *)p[2])[n + 5] += 1;
}

static void compare(const uint64_t *p) {
  for (uint64_t i = 0, n = p[2]; i < n * n; i++) find((struct findings *)p[3], ((uint32_t *)p[1])[i / n % 128 * 128 + i % n % 128], ((uint32_t *)p[0])[i], 4 * i);
}

static void triple(uint32_t *values, unsigned count) {
  for (unsigned i = 0; i < count; i++) values[i] = 3 * values[i] + i;
}

static const char *const kernels[] = {"fill", "check", "product", "tensor", "compare", "triple"};

int cuModuleGetFunction(void **function, void *module, const char *name) {
  CALL(cuModuleGetFunction);
  char entry[64];
  snprintf(entry, sizeof entry, ".entry %s(", name);
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
    if (!strcmp(name, kernels[i]) && strstr(module, entry)) {
      *function = (void *)kernels[i];
      return 0;
    }
  return 500; // CUDA_ERROR_NOT_FOUND
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments,
                   void **extra) {
  CALL(cuLaunchKernel);
  const char *name = function;
  uint64_t p[6] = {0};
  if (!function || gz * by * bz != 1 || gx * gy * bx == 0 || bx > 1024 || shared || stream || extra) return 1;
  if (fault("kernel")) return 0;
  int count = !strcmp(name, "triple") ? 1 : !strcmp(name, "fill") ? 5 : !strcmp(name, "check") ? 6 : 4;
  for (int i = 0; i < count; i++) p[i] = *(uint64_t *)arguments[i];
  switch (count) {
  case 1: triple((uint32_t *)p[0], bx); break;
  case 5: fill(p); break;
  case 6: check(p); break;
  default: !strcmp(name, "compare") ? compare(p) : multiply(p, *name == 't');
  }
  return 0;
}
