package cudaproof

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "cuda.h"
*/
import "C"

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"unsafe"
)

// address is one of the GPU's memory.
type address uint64

// handle is a context, module, function or event of the driver.
type handle unsafe.Pointer

// driver is the library of a CUDA driver. Its calls are for one thread, on which a context is current.
type driver struct {
	c       *C.struct_cuda
	current *atomic.Pointer[string] // the call that has not returned; for another goroutine
}

// compiler is the library that compiles PTX, which the driver's library loads by this name.
const compiler = "libnvidia-ptxjitcompiler.so.1"

// open opens the library by its name or path.
func open(library string, current *atomic.Pointer[string]) (*driver, error) {
	if filepath.IsAbs(library) { // in a folder where the linker may not look
		path := C.CString(filepath.Join(filepath.Dir(library), compiler))
		defer C.free(unsafe.Pointer(path))
		C.cuda_preload(path)
	}
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	var text [512]C.char
	c := C.cuda_open(name, &text[0], C.size_t(len(text)))
	if c == nil {
		return nil, fmt.Errorf("the CUDA driver's library can't be loaded: %s", C.GoString(&text[0]))
	}
	return &driver{c, current}, nil
}

func (d *driver) close() { C.free(unsafe.Pointer(d.c)) }

// do makes a call. Its error is a *CallError, or a *Fault.
func (d *driver) do(name string, call func() C.int) error {
	d.current.Store(&name)
	code := call()
	d.current.Store(nil)
	if code == 0 {
		return nil
	}
	return verdict(&CallError{
		Call: name, Code: int(code),
		Name: textOf(func(text **C.char) C.int { return C.call_cuGetErrorName(d.c, code, text) }, "unknown error"),
		Text: textOf(func(text **C.char) C.int { return C.call_cuGetErrorString(d.c, code, text) }, "no text"),
	})
}

// textOf is a text of the driver.
func textOf(get func(**C.char) C.int, otherwise string) string {
	var text *C.char
	if code := get(&text); code != 0 || text == nil {
		return otherwise
	}
	return C.GoString(text)
}

// pointer makes a call that returns a pointer.
func (d *driver) pointer(name string, call func(*unsafe.Pointer) C.int) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	err := d.do(name, func() C.int { return call(&p) })
	return p, err
}

func (d *driver) initialize() error {
	return d.do("cuInit", func() C.int { return C.call_cuInit(d.c, 0) })
}

// version is the newest version of CUDA that the driver supports: "13.0".
func (d *driver) version() (string, error) {
	var v C.int
	err := d.do("cuDriverGetVersion", func() C.int { return C.call_cuDriverGetVersion(d.c, &v) })
	return fmt.Sprintf("%d.%d", v/1000, v%1000/10), err
}

// count is the number of GPUs that the process sees.
func (d *driver) count() (int, error) {
	var n C.int
	err := d.do("cuDeviceGetCount", func() C.int { return C.call_cuDeviceGetCount(d.c, &n) })
	return int(n), err
}

// Attributes of a device (CUdevice_attribute).
const (
	multiprocessors = 16
	computeMode     = 20
	capabilityMajor = 75
	capabilityMinor = 76
)

// device reads the first GPU that the process sees.
func (d *driver) device() (device, error) {
	var id C.int
	var name [256]C.char
	uuid := make([]byte, 16)
	err := cmp.Or(
		d.do("cuDeviceGet", func() C.int { return C.call_cuDeviceGet(d.c, &id, 0) }),
		d.do("cuDeviceGetName", func() C.int { return C.call_cuDeviceGetName(d.c, &name[0], C.int(len(name)-1), id) }),
		d.do("cuDeviceGetUuid", func() C.int { return C.call_cuDeviceGetUuid_v2(d.c, unsafe.Pointer(unsafe.SliceData(uuid)), id) }),
	)
	g := device{id: int(id), name: C.GoString(&name[0]), uuid: fmt.Sprintf("%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:])}
	for _, a := range []struct {
		number int
		value  *int
	}{{multiprocessors, &g.multiprocessors}, {computeMode, &g.computeMode}, {capabilityMajor, &g.major}, {capabilityMinor, &g.minor}} {
		var value C.int
		err = cmp.Or(err, d.do("cuDeviceGetAttribute", func() C.int { return C.call_cuDeviceGetAttribute(d.c, &value, C.int(a.number), id) }))
		*a.value = int(value)
	}
	return g, err
}

// blockingSync makes the driver wait without using a CPU (CU_CTX_SCHED_BLOCKING_SYNC).
const blockingSync = 4

// createContext makes a context that is current on this thread. All memory, modules and events of it end with it.
func (d *driver) createContext(g device) (handle, error) {
	context, err := d.pointer("cuCtxCreate", func(p *unsafe.Pointer) C.int { return C.call_cuCtxCreate_v2(d.c, p, blockingSync, C.int(g.id)) })
	return handle(context), err
}

func (d *driver) destroyContext(context handle) error {
	return d.do("cuCtxDestroy", func() C.int { return C.call_cuCtxDestroy_v2(d.c, unsafe.Pointer(context)) })
}

// memory is what the GPU has, and what of it nothing uses, in bytes.
func (d *driver) memory() (free, total uint64, err error) {
	var f, t C.size_t
	err = d.do("cuMemGetInfo", func() C.int { return C.call_cuMemGetInfo_v2(d.c, &f, &t) })
	return uint64(f), uint64(t), err
}

func (d *driver) allocate(size uint64) (address, error) {
	var at C.uint64_t
	err := d.do("cuMemAlloc", func() C.int { return C.call_cuMemAlloc_v2(d.c, &at, C.size_t(size)) })
	return address(at), err
}

func (d *driver) free(at address) error {
	return d.do("cuMemFree", func() C.int { return C.call_cuMemFree_v2(d.c, C.uint64_t(at)) })
}

// allocateHost allocates memory of the node that the GPU can read and write by itself.
func (d *driver) allocateHost(size uint64) ([]byte, error) {
	at, err := d.pointer("cuMemHostAlloc", func(p *unsafe.Pointer) C.int { return C.call_cuMemHostAlloc(d.c, p, C.size_t(size), 0) })
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(at), size), nil
}

func (d *driver) freeHost(memory []byte) error {
	return d.do("cuMemFreeHost", func() C.int { return C.call_cuMemFreeHost(d.c, unsafe.Pointer(unsafe.SliceData(memory))) })
}

// copyTo starts a copy from memory of allocateHost to the GPU.
func (d *driver) copyTo(to address, from []byte) error {
	return d.do("cuMemcpyHtoDAsync", func() C.int {
		return C.call_cuMemcpyHtoDAsync_v2(d.c, C.uint64_t(to), unsafe.Pointer(unsafe.SliceData(from)), C.size_t(len(from)), nil)
	})
}

// copyFrom starts a copy from the GPU to memory of allocateHost.
func (d *driver) copyFrom(to []byte, from address) error {
	return d.do("cuMemcpyDtoHAsync", func() C.int {
		return C.call_cuMemcpyDtoHAsync_v2(d.c, unsafe.Pointer(unsafe.SliceData(to)), C.uint64_t(from), C.size_t(len(to)), nil)
	})
}

// write copies to the GPU.
func (d *driver) write(to address, from []byte) error {
	return d.do("cuMemcpyHtoD", func() C.int {
		return C.call_cuMemcpyHtoD_v2(d.c, C.uint64_t(to), unsafe.Pointer(unsafe.SliceData(from)), C.size_t(len(from)))
	})
}

// read copies from the GPU.
func (d *driver) read(to []byte, from address) error {
	return d.do("cuMemcpyDtoH", func() C.int {
		return C.call_cuMemcpyDtoH_v2(d.c, unsafe.Pointer(unsafe.SliceData(to)), C.uint64_t(from), C.size_t(len(to)))
	})
}

// set starts to fill memory of the GPU with a word.
func (d *driver) set(at address, word uint32, count uint64) error {
	return d.do("cuMemsetD32Async", func() C.int {
		return C.call_cuMemsetD32Async(d.c, C.uint64_t(at), C.uint(word), C.size_t(count), nil)
	})
}

// load compiles a program.
func (d *driver) load(text string) (handle, error) {
	source := C.CString(text)
	defer C.free(unsafe.Pointer(source))
	const size = 4096
	log := (*C.char)(C.calloc(1, size))
	defer C.free(unsafe.Pointer(log))
	module, err := d.pointer("cuModuleLoadData", func(p *unsafe.Pointer) C.int { return C.cuda_load(d.c, p, source, log, size-1) })
	if text := strings.Join(strings.Fields(C.GoString(log)), " "); err != nil && text != "" {
		err = fmt.Errorf("%w: %s", err, text)
	}
	return handle(module), err
}

func (d *driver) function(module handle, name string) (handle, error) {
	symbol := C.CString(name)
	defer C.free(unsafe.Pointer(symbol))
	f, err := d.pointer("cuModuleGetFunction", func(p *unsafe.Pointer) C.int {
		return C.call_cuModuleGetFunction(d.c, p, unsafe.Pointer(module), symbol)
	})
	return handle(f), err
}

// grid is how a kernel is started.
type grid struct{ x, y, threads int }

// launch starts a kernel.
func (d *driver) launch(name string, f handle, g grid, params ...uint64) error {
	return d.do("cuLaunchKernel "+name, func() C.int {
		return C.cuda_launch(d.c, unsafe.Pointer(f), C.uint(g.x), C.uint(g.y), C.uint(g.threads), (*C.uint64_t)(unsafe.SliceData(params)), C.int(len(params)))
	})
}

// wait returns when everything that was started has ended.
func (d *driver) wait() error {
	return d.do("cuStreamSynchronize", func() C.int { return C.call_cuStreamSynchronize(d.c, nil) })
}

// timed returns how long the GPU takes for what do starts, in seconds. It waits for its end.
func (d *driver) timed(do func() error) (seconds float64, err error) {
	var events [2]unsafe.Pointer
	for i := range events {
		if events[i], err = d.pointer("cuEventCreate", func(p *unsafe.Pointer) C.int { return C.call_cuEventCreate(d.c, p, 0) }); err != nil {
			return 0, err
		}
		defer func() {
			err = cmp.Or(err, d.do("cuEventDestroy", func() C.int { return C.call_cuEventDestroy_v2(d.c, events[i]) }))
		}()
	}
	record := func(i int) error {
		return d.do("cuEventRecord", func() C.int { return C.call_cuEventRecord(d.c, events[i], nil) })
	}
	if err := record(0); err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	if err := record(1); err != nil {
		return 0, err
	}
	if err := d.wait(); err != nil {
		return 0, err
	}
	var milliseconds C.float
	err = d.do("cuEventElapsedTime", func() C.int { return C.call_cuEventElapsedTime(d.c, &milliseconds, events[0], events[1]) })
	return float64(milliseconds) / 1000, err
}
