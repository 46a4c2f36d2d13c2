// probe uses the CUDA driver, which needs no toolkit. Its argument is the name of the library. One fact per line:
//   devices N
//   device I UUID NAME
//   memory I ok        256 MiB were allocated, and what was copied to them was copied back
//   kernel I ok        a kernel changed it as it should
//   failed I CALL NAME
//   holding            the memory is allocated until standard input ends
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COUNT = 1024, HELD = 256 << 20, MAJOR = 75, MINOR = 76 };

static void *library;
static int failures;

// find ends the process if the library lacks a function.
static void *find(const char *name) {
  void *f = dlsym(library, name);
  if (!f) {
    printf("failed - dlsym %s\n", name);
    exit(1);
  }
  return f;
}

static int check(int device, const char *call, int result) {
  if (!result) return 1;
  const char *name = "unknown";
  int (*errorName)(int, const char **) = dlsym(library, "cuGetErrorName");
  if (errorName) errorName(result, &name);
  printf("failed %d %s %s (%d)\n", device, call, name, result);
  failures++;
  return 0;
}

// A pointer to each function is made where it is used, with its type.
#define CU(result, name, ...) ((result (*)(__VA_ARGS__))find(#name))

// triple is values[i] = 3 * values[i] + i.
static const char body[] =
    ".address_size 64\n"
    ".visible .entry triple(.param .u64 values)\n"
    "{\n"
    "  .reg .b32 %index, %value;\n"
    "  .reg .b64 %at, %offset;\n"
    "  ld.param.u64 %at, [values];\n"
    "  cvta.to.global.u64 %at, %at;\n"
    "  mov.u32 %index, %tid.x;\n"
    "  mul.wide.u32 %offset, %index, 4;\n"
    "  add.s64 %at, %at, %offset;\n"
    "  ld.global.u32 %value, [%at];\n"
    "  mad.lo.u32 %value, %value, 3, %index;\n"
    "  st.global.u32 [%at], %value;\n"
    "  ret;\n"
    "}\n";

static int launch(int device, unsigned long long memory) {
  int major = 0;
  char text[2048];
  void *module, *function, *arguments[] = {&memory};
  if (!check(device, "cuDeviceGetAttribute", CU(int, cuDeviceGetAttribute, int *, int, int)(&major, MAJOR, device))) return 0;
  int minor = 0;
  CU(int, cuDeviceGetAttribute, int *, int, int)(&minor, MINOR, device);
  // Drivers for CUDA 13 have no GPU before Turing, and may not compile for these.
  const char *target = 10 * major + minor >= 75 ? ".version 6.3\n.target sm_75\n" : ".version 6.0\n.target sm_30\n";
  snprintf(text, sizeof text, "%s%s", target, body);
  return check(device, "cuModuleLoadData", CU(int, cuModuleLoadData, void **, const void *)(&module, text)) &&
         check(device, "cuModuleGetFunction", CU(int, cuModuleGetFunction, void **, void *, const char *)(&function, module, "triple")) &&
         check(device, "cuLaunchKernel",
               CU(int, cuLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)(
                   function, 1, 1, 1, COUNT, 1, 1, 0, NULL, arguments, NULL)) &&
         check(device, "cuCtxSynchronize", CU(int, cuCtxSynchronize, void)());
}

static int copyBack(int device, unsigned long long memory, unsigned *values) {
  memset(values, 0, COUNT * sizeof *values);
  return check(device, "cuMemcpyDtoH", CU(int, cuMemcpyDtoH_v2, void *, unsigned long long, size_t)(values, memory, COUNT * sizeof *values));
}

static void use(int device) {
  void *context;
  unsigned long long memory;
  unsigned values[COUNT], wrong = 0;
  if (!check(device, "cuDevicePrimaryCtxRetain", CU(int, cuDevicePrimaryCtxRetain, void **, int)(&context, device)) ||
      !check(device, "cuCtxSetCurrent", CU(int, cuCtxSetCurrent, void *)(context)) ||
      !check(device, "cuMemAlloc", CU(int, cuMemAlloc_v2, unsigned long long *, size_t)(&memory, HELD)))
    return;
  for (unsigned i = 0; i < COUNT; i++) values[i] = 7 * i + 5;
  if (!check(device, "cuMemcpyHtoD", CU(int, cuMemcpyHtoD_v2, unsigned long long, const void *, size_t)(memory, values, sizeof values)) ||
      !copyBack(device, memory, values))
    return;
  for (unsigned i = 0; i < COUNT; i++) wrong += values[i] != 7 * i + 5;
  printf("memory %d %s\n", device, wrong ? "differs" : "ok");
  failures += wrong > 0;
  if (!launch(device, memory) || !copyBack(device, memory, values)) return;
  for (unsigned i = 0; i < COUNT; i++) wrong += values[i] != 3 * (7 * i + 5) + i;
  printf("kernel %d %s\n", device, wrong ? "differs" : "ok");
  failures += wrong > 0;
}

static void identify(int device) {
  unsigned char id[16] = {0};
  char name[128] = "";
  // Of a MIG instance only the second version returns the instance's own UUID.
  const char *call = dlsym(library, "cuDeviceGetUuid_v2") ? "cuDeviceGetUuid_v2" : "cuDeviceGetUuid";
  check(device, call, ((int (*)(unsigned char *, int))find(call))(id, device));
  check(device, "cuDeviceGetName", CU(int, cuDeviceGetName, char *, int, int)(name, sizeof name - 1, device));
  printf("device %d ", device);
  for (int i = 0; i < 16; i++) printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id[i]);
  printf(" %s\n", name);
}

int main(int count, char **arguments) {
  int devices = 0;
  library = dlopen(count > 1 ? arguments[1] : "libcuda.so.1", RTLD_NOW);
  if (!library) {
    printf("failed - dlopen %s\n", dlerror());
    return 1;
  }
  if (!check(-1, "cuInit", CU(int, cuInit, unsigned)(0)) || !check(-1, "cuDeviceGetCount", CU(int, cuDeviceGetCount, int *)(&devices))) return 1;
  printf("devices %d\n", devices);
  for (int i = 0; i < devices; i++) {
    identify(i);
    use(i);
  }
  puts("holding");
  fflush(stdout);
  char byte;
  while (read(0, &byte, 1) > 0) continue;
  return failures > 0;
}
