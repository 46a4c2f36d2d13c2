// Package cudaproof proves one idle GPU by work whose results are known: patterns in its memory, copies from and to the node, products of
// matrices. It needs the driver's libcuda.so.1 alone.
//
// A proof that can't be made is no evidence about the GPU. So the errors are of two kinds: *Fault is the verdict that the GPU failed, every other one
// means that the proof could not run.
package cudaproof

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Library is the name of the driver's library.
const Library = "libcuda.so.1"

// Options of a proof.
type Options struct {
	GPU     string        // of Choose
	Library string        // name or path
	Timeout time.Duration // of the whole proof
	Memory  float64       // share of the free memory that is tested: from LeastMemory to 1
	Passed  func(string)  // is called with a line about each test that has passed; may be nil

	brief bool // for tests: small matrices and copies, and each test once
}

// DefaultTimeout is less than a minute, the default of what an agent gives a proof.
const DefaultTimeout = 45 * time.Second

// Result is what a proof has found.
type Result struct {
	Summary string
	Values  map[string]float64 // by a name with its unit
}

// Times of the tests within DefaultTimeout: half of it, so that a slow start of the driver has the other half. They are shorter in proportion
// with a shorter timeout. Each test runs once in any case.
const (
	memoryTime  = 8 * time.Second
	copyTime    = 2 * time.Second
	productTime = 6 * time.Second
)

// endsWithin is for how long a proof waits, after its time or a signal, for a call of the driver to return.
const endsWithin = time.Second

// Run proves a GPU. It sets variables of the process that the driver reads, so it is for a process of its own. The error is a *Fault if the GPU failed; any
// other one means that the proof could not run. If a call of the driver does not return, Run does, and the process has to end.
func Run(ctx context.Context, o Options) (Result, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("not done within %v", o.Timeout))
	defer cancel()
	report, end := untilEnd(o.Passed)
	defer end()
	o.Passed = report
	type outcome struct {
		Result
		err error
	}
	var current atomic.Pointer[string]
	done := make(chan outcome, 1)
	go func() {
		runtime.LockOSThread() // of which the context is
		defer runtime.UnlockOSThread()
		p := &proof{Options: o, values: map[string]float64{}, kernels: map[string]handle{}, going: func() error { return context.Cause(ctx) }}
		err := p.run(&current)
		done <- outcome{Result{p.summary(err), p.values}, err}
	}()
	select {
	case out := <-done:
		return out.Result, out.err
	case <-ctx.Done():
	}
	select {
	case out := <-done:
		return out.Result, out.err
	case <-time.After(endsWithin):
	}
	call := "the driver"
	if name := current.Load(); name != nil {
		call = *name
	}
	err := fmt.Errorf("%w: %s does not return", context.Cause(ctx), call)
	return Result{"could not run: " + err.Error(), map[string]float64{}}, err
}

// untilEnd returns a function that calls report, and one that ends that: after it has returned, report is not called any more.
func untilEnd(report func(string)) (during func(string), end func()) {
	var mu sync.Mutex
	during = func(line string) {
		mu.Lock()
		defer mu.Unlock()
		if report != nil {
			report(line)
		}
	}
	return during, func() {
		mu.Lock()
		defer mu.Unlock()
		report = nil
	}
}

// proof is a proof in progress.
type proof struct {
	Options
	going    func() error // returns the reason why the proof has to end; nil = it goes on
	driver   *driver
	gpu      device
	kernels  map[string]handle
	findings address // of the GPU's memory: what the kernels check and compare have found
	values   map[string]float64
}

func (p *proof) summary(err error) string {
	switch _, failed := errors.AsType[*Fault](err); {
	case failed:
		return "failed: " + err.Error()
	case err != nil:
		return "could not run: " + err.Error()
	}
	return fmt.Sprintf("passed: %s, %s of memory", p.gpu.name, sizeText(uint64(p.values["memory_tested_bytes"])))
}

// environment sets what the driver reads when it is initialised.
func (p *proof) environment() error {
	for _, v := range []struct{ name, value string }{
		{visibleToCUDA, p.GPU},
		// No MPS: a daemon's other clients would add their faults to those of the GPU. Where the driver finds no daemon it goes on without (nvidia-cuda-mps-control(1)).
		{"CUDA_MPS_PIPE_DIRECTORY", os.DevNull},
		{"CUDA_CACHE_DISABLE", "1"}, // compiled kernels are not left in the home folder
	} {
		if v.value == "" {
			continue
		}
		if err := os.Setenv(v.name, v.value); err != nil {
			return err
		}
	}
	return nil
}

func (p *proof) run(current *atomic.Pointer[string]) (err error) {
	if err := p.environment(); err != nil {
		return err
	}
	if p.driver, err = open(p.Library, current); err != nil {
		return err
	}
	defer p.driver.close()
	if err := p.driver.initialize(); err != nil {
		return err
	}
	version, err := p.driver.version()
	if err != nil {
		return err
	}
	if p.gpu, err = p.driver.find(p.GPU); err != nil {
		return err
	}
	p.reportf("GPU       %s, %s, compute capability %d.%d, driver for CUDA %s", p.gpu.uuid, p.gpu.name, p.gpu.major, p.gpu.minor, version)
	context, err := p.driver.createContext(p.gpu)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, p.driver.destroyContext(context)) }()
	if err := p.load(); err != nil {
		return err
	}
	return p.tests()
}

// load compiles the kernels.
func (p *proof) load() error {
	module, err := p.driver.load(program(p.gpu))
	if err != nil {
		return err
	}
	names := []string{fillKernel, checkKernel, productKernel, compareKernel}
	if p.gpu.hasTensor() {
		names = append(names, tensorKernel)
	}
	for _, name := range names {
		if p.kernels[name], err = p.driver.function(module, name); err != nil {
			return err
		}
	}
	p.findings, err = p.driver.allocate(findingsSize) // ends with the context
	return err
}

// tests runs them one after another. Memory is first, because the others use it.
func (p *proof) tests() error {
	size, copied := defaultSize, uint64(copySize)
	if p.brief {
		size, copied = 2*period, mebibyte
	}
	if err := p.memory(memoryTime); err != nil {
		return err
	}
	if err := p.copies(copied, copyTime); err != nil {
		return err
	}
	if err := p.multiply(product(size), productTime); err != nil {
		return err
	}
	if !p.gpu.hasTensor() {
		return nil
	}
	return p.multiply(tensor(size), productTime)
}

// until is when a test that takes some time of DefaultTimeout is over.
func (p *proof) until(of time.Duration) time.Time {
	if p.brief {
		return time.Now()
	}
	return time.Now().Add(time.Duration(float64(of) * min(1, float64(p.Timeout)/float64(DefaultTimeout))))
}

func (p *proof) reportf(format string, args ...any) {
	p.Passed(fmt.Sprintf(format, args...))
}

// measured sets a value to an amount per second. A GPU whose clock shows no time has no such value.
func (p *proof) measured(name string, amount, seconds float64) {
	if v := amount / seconds; !math.IsNaN(v) && !math.IsInf(v, 0) {
		p.values[name] = v
	}
}

// shown is a value for people.
func (p *proof) shown(name, unit string) string {
	v, ok := p.values[name]
	if !ok {
		return "speed unknown"
	}
	return fmt.Sprintf("%.1f %s", v, unit)
}

// wide is the grid of kernels whose threads take one part of the memory after another.
func (p *proof) wide() grid { return grid{8 * p.gpu.multiprocessors, 1, 256} }

func (p *proof) launch(kernel string, g grid, params ...uint64) error {
	return p.driver.launch(kernel, p.kernels[kernel], g, params...)
}

// buffers allocates memory of the GPU. release frees it, and sets an error that is nil to its own.
func (p *proof) buffers(sizes ...uint64) (at []address, release func(*error), err error) {
	release = func(err *error) {
		for _, a := range at {
			*err = cmp.Or(*err, p.driver.free(a))
		}
	}
	for _, size := range sizes {
		a, err := p.driver.allocate(size)
		if err != nil {
			release(&err)
			return nil, nil, err
		}
		at = append(at, a)
	}
	return at, release, nil
}

// upload copies to the GPU, and reads it back: a wrong copy is no wrong result.
func (p *proof) upload(to address, from []byte) error {
	back := make([]byte, len(from))
	if err := cmp.Or(p.driver.write(to, from), p.driver.read(back, to)); err != nil {
		return err
	}
	if !slices.Equal(from, back) {
		return doubtf("%d bytes that were copied to the GPU and back are wrong", len(from))
	}
	return nil
}

// findings are what a kernel that compares has found.
type findings struct {
	count         uint64 // wrong words
	offset        uint64 // of the first that was found, in bytes
	wanted, there uint64 // at it: what the GPU computed or read as right, and what it compared with that
}

// real reports whether findings agree with what the node computed for their place: what is right, and another word. The GPU wrote them where it found a
// difference, and they were copied; if they do not agree, something else went wrong.
func (f findings) real(right uint32) bool { return f.wanted == uint64(right) && f.there != f.wanted }

const findingsSize = 32

// find runs a kernel that compares, and returns what it has found. Findings are read twice, because the copy of them may be what is wrong.
func (p *proof) find(run func() error) (findings, error) {
	if err := p.driver.set(p.findings, 0, findingsSize/4); err != nil {
		return findings{}, err
	}
	if err := cmp.Or(run(), p.driver.wait()); err != nil {
		return findings{}, err
	}
	var first, again [findingsSize]byte
	if err := cmp.Or(p.driver.read(first[:], p.findings), p.driver.read(again[:], p.findings)); err != nil {
		return findings{}, err
	}
	if first != again {
		return findings{}, doubtf("two copies of the same memory of the GPU differ")
	}
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(first[8*i:]) }
	return findings{word(0), word(1), word(2), word(3)}, nil
}
