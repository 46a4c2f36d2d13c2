// The functions of the CUDA driver's library (libcuda.so.1) that a proof calls, by dlopen: neither NVIDIA's toolkit nor its headers are needed to
// build. The types are those of cuda.h: CUresult, CUdevice and enumerations are int, CUdeviceptr is a 64-bit number, handles are pointers.
#ifndef TANDEM_CUDAPROOF_CUDA_H
#define TANDEM_CUDAPROOF_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define PARAMS(...) __VA_ARGS__

// CALLS lists them: symbol, parameters, arguments. The symbols with a version are those that cuda.h gives programs of CUDA 11 and newer; a driver keeps
// the older ones for programs that are built already.
#define CALLS(CALL) \
  CALL(cuInit, PARAMS(unsigned flags), (flags)) \
  CALL(cuDriverGetVersion, PARAMS(int *version), (version)) \
  CALL(cuGetErrorName, PARAMS(int result, const char **name), (result, name)) \
  CALL(cuGetErrorString, PARAMS(int result, const char **text), (result, text)) \
  CALL(cuDeviceGetCount, PARAMS(int *count), (count)) \
  CALL(cuDeviceGet, PARAMS(int *device, int ordinal), (device, ordinal)) \
  CALL(cuDeviceGetName, PARAMS(char *name, int size, int device), (name, size, device)) \
  CALL(cuDeviceGetUuid_v2, PARAMS(void *uuid, int device), (uuid, device)) \
  CALL(cuDeviceGetAttribute, PARAMS(int *value, int attribute, int device), (value, attribute, device)) \
  CALL(cuCtxCreate_v2, PARAMS(void **context, unsigned flags, int device), (context, flags, device)) \
  CALL(cuCtxDestroy_v2, PARAMS(void *context), (context)) \
  CALL(cuMemGetInfo_v2, PARAMS(size_t *unused, size_t *total), (unused, total)) \
  CALL(cuMemAlloc_v2, PARAMS(uint64_t *memory, size_t size), (memory, size)) \
  CALL(cuMemFree_v2, PARAMS(uint64_t memory), (memory)) \
  CALL(cuMemHostAlloc, PARAMS(void **memory, size_t size, unsigned flags), (memory, size, flags)) \
  CALL(cuMemFreeHost, PARAMS(void *memory), (memory)) \
  CALL(cuMemcpyHtoDAsync_v2, PARAMS(uint64_t to, const void *from, size_t size, void *stream), (to, from, size, stream)) \
  CALL(cuMemcpyDtoHAsync_v2, PARAMS(void *to, uint64_t from, size_t size, void *stream), (to, from, size, stream)) \
  CALL(cuMemcpyHtoD_v2, PARAMS(uint64_t to, const void *from, size_t size), (to, from, size)) \
  CALL(cuMemcpyDtoH_v2, PARAMS(void *to, uint64_t from, size_t size), (to, from, size)) \
  CALL(cuMemsetD32Async, PARAMS(uint64_t memory, unsigned value, size_t count, void *stream), (memory, value, count, stream)) \
  CALL(cuModuleLoadDataEx, PARAMS(void **module, const void *text, unsigned count, int *options, void **values), (module, text, count, options, values)) \
  CALL(cuModuleGetFunction, PARAMS(void **function, void *module, const char *name), (function, module, name)) \
  CALL(cuLaunchKernel, PARAMS(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
                              void *stream, void **params, void **extra), \
       (function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)) \
  CALL(cuStreamSynchronize, PARAMS(void *stream), (stream)) \
  CALL(cuEventCreate, PARAMS(void **event, unsigned flags), (event, flags)) \
  CALL(cuEventDestroy_v2, PARAMS(void *event), (event)) \
  CALL(cuEventRecord, PARAMS(void *event, void *stream), (event, stream)) \
  CALL(cuEventElapsedTime, PARAMS(float *milliseconds, void *start, void *end), (milliseconds, start, end))

// cuda is a library that is open: the address of each function.
struct cuda {
#define FIELD(name, params, args) void *name;
  CALLS(FIELD)
#undef FIELD
};

// call_NAME calls a function of an open library.
#define DECLARE(name, params, args) int call_##name(struct cuda *cuda, params);
CALLS(DECLARE)
#undef DECLARE

// cuda_open opens a library. It returns NULL if that fails, and writes the error of the linker or which function is missing.
struct cuda *cuda_open(const char *path, char *error, size_t size);

// cuda_preload loads a library that the driver's one will look for by its name, if it is there.
void cuda_preload(const char *path);

// cuda_load compiles a program for the current context, and writes its errors as the driver's compiler reports them.
int cuda_load(struct cuda *cuda, void **module, const char *text, char *errors, size_t size);

// cuda_launch starts a kernel of which every parameter has 64 bits, in the default stream.
int cuda_launch(struct cuda *cuda, void *function, unsigned blocks_x, unsigned blocks_y, unsigned threads, const uint64_t *values, int count);

#endif
