package main

import (
	"debug/elf"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/test/binaries"
)

// read returns the samples of an excerpt of perf script's output: nomad-gpu with its symbols, one sample of each part in two recordings.
func read(t *testing.T) (all []sample) {
	t.Helper()
	file, err := os.Open("testdata/idle.perf")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if err := parse(file, func(s sample) { all = append(all, s) }); err != nil {
		t.Fatal(err)
	}
	return all
}

const recorded = "/opt/tandem/nomad-gpu"

func TestPartOf(t *testing.T) {
	var found []string
	for _, s := range read(t) {
		if s.event == "cpu-clock" {
			name, inDriver := (&symbols{path: recorded}).partOf(s.stack)
			if inDriver {
				name += ", in the driver"
			}
			found = append(found, name)
		}
	}
	want := []string{
		"gRPC", sysmon, "parent process", "statistics", "event wait", "signals and main", "control socket", collection, scheduler,
		"checks for device nodes", "statistics", "statistics", "watchdog", "health check", driverLibrary + ", in the driver",
		"devices of other agents", "event wait, in the driver",
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Error(diff)
	}
}

func TestPartOfUnknownCode(t *testing.T) {
	inKernel := frame{address: 1 << 63, symbol: "schedule"}
	code := func(name string) frame { return frame{address: 1, symbol: name, file: recorded} }
	goexit := code("runtime.goexit.abi0")
	for _, c := range []struct {
		name  string
		stack []frame
	}{
		{kernelOnly, []frame{inKernel}},
		{"package k8s.io/kubelet/pkg", []frame{inKernel, code("k8s.io/kubelet/pkg.(*T[go.shape.struct { a/b.C int }]).F"), goexit}},
		{"package internal/new", []frame{code("github.com/x/y.F"), code(module + "internal/new.F"), code("golang.org/x/sync/errgroup.F"), goexit}},
		{"signals and main", []frame{code("main.run.func1"), goexit}},
		{unknown, []frame{code("time.Now"), goexit}},
		{driverLibrary, []frame{inKernel, {address: 1, symbol: "__poll", file: "/lib/libc.so.6"}}},
		{driverLibrary, []frame{{address: 1, symbol: "[unknown]", file: "/lib/libnvidia-ml.so.580.65.06"}}},
	} {
		if got, _ := (&symbols{path: recorded}).partOf(c.stack); got != c.name {
			t.Errorf("%v: %q, want %q", c.stack, got, c.name)
		}
	}
	var none *symbols
	if got, inDriver := none.partOf([]frame{{address: 1, file: "/lib/libnvidia-ml.so.1"}, goexit}); got != driverLibrary || !inDriver {
		t.Error(got)
	}
	if got, _ := none.partOf([]frame{goexit}); got != userUnknown {
		t.Error(got)
	}
	if got, _ := none.partOf([]frame{inKernel, goexit}); got != kernelUnknown {
		t.Error(got)
	}
}

// TestPartsExist fails if a function or package of this module or of Go has another name now: its samples would belong to another part.
func TestPartsExist(t *testing.T) {
	var names []string
	for _, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		path := binaries.Path(t, agent)
		s, err := goSymbols(path, path)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range s.table.Funcs {
			names = append(names, f.Name)
		}
	}
	for _, p := range slices.Concat(parts, runtimeFunctions) {
		for _, start := range p.functions {
			own := strings.HasPrefix(start, module) || strings.HasPrefix(start, "runtime.")
			if own && !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, start) }) {
				t.Errorf("%s: no function %s in the agents", p.name, start)
			}
		}
	}
}

// TestSymbols has the function table of a binary agree with the runtime that uses it: in this program, which has C code too.
func TestSymbols(t *testing.T) {
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s, err := goSymbols(path, path)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []any{TestSymbols, parse, strings.Repeat, (*testing.T).Run} {
		pc := uint64(reflect.ValueOf(f).Pointer())
		i := slices.IndexFunc(s.segments, func(p elf.ProgHeader) bool { return pc >= p.Vaddr && pc < p.Vaddr+p.Filesz })
		if i < 0 {
			t.Fatalf("no code at %x", pc)
		}
		at := frame{address: pc - s.segments[i].Vaddr + s.segments[i].Off, symbol: "[unknown]", file: path}
		if got, want := s.name(at), runtime.FuncForPC(uintptr(pc)).Name(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		at.file = "/lib/libc.so.6"
		if got := s.name(at); got != "" {
			t.Errorf("another file: %q", got)
		}
	}
	if _, err := goSymbols("/bin/sh", "/bin/sh"); err == nil {
		t.Error("Go functions in a shell")
	}
}
