package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

func TestParseFails(t *testing.T) {
	for _, text := range []string{"perf: no data\n", "1 x: cpu-clock: \n", "1 2.0: cpu-clock: \n\tzz main.f (a)\n", "1 2.0: cpu-clock: \n\t1f main.f\n"} {
		if err := parse(strings.NewReader(text), func(sample) {}); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

func TestTracedSamples(t *testing.T) {
	p := &profile{parts: map[string]*cost{}, names: map[string]float64{}}
	calls := tracedSamples{symbols: &symbols{path: recorded}, profile: p, numbers: map[string]string{"202": "futex", "35": "nanosleep"}, minutes: 0.5}
	for _, s := range read(t) {
		if s.event != "cpu-clock" {
			calls.add(s)
		}
	}
	if p.names["futex"] != 2 || p.names["nanosleep"] != 2 || p.names["system call 110"] != 2 {
		t.Error("2 a minute are 1 in half a minute:", p.names)
	}
	if p.wakeups != 2*5 {
		t.Error("want one for each pause in the excerpt:", p.wakeups)
	}
	if sum := p.all(); sum.calls != 2*float64(len(p.names)) || sum.waits != 2 {
		t.Error("want each call, and the one wait of a thread that did not lose its CPU:", sum)
	}
}

// TestBursts divides what the runtime takes among the parts that ran with it.
func TestBursts(t *testing.T) {
	at := func(ms float64, functions ...string) sample {
		s := sample{at: time.Duration(ms * 1e6), event: "cpu-clock"}
		for _, f := range functions {
			s.stack = append(s.stack, frame{address: 1, symbol: f, file: recorded})
		}
		return s
	}
	const kernelLog, socket = module + "internal/node/kmsg.F", module + "internal/operator/control.F"
	p := &profile{parts: map[string]*cost{}}
	c := cpuSamples{symbols: &symbols{path: recorded}, profile: p}
	for _, s := range []sample{
		at(1.00, "runtime.futex", "runtime.mcall"), at(1.05, kernelLog), at(1.10, kernelLog), at(1.15, socket), at(1.20, "runtime.sysmon"), at(1.25, "runtime.sysmon"),
		at(3.00, "runtime.sysmon"), at(3.05, "runtime.sysmon"), // for nothing that a sample hit
		at(9.00, kernelLog), {at: 9.05e6, stack: []frame{{address: 1 << 63}}},
	} {
		c.add(s)
	}
	c.end()
	want := map[string]*cost{
		"kernel log":     {cpu: 0.3, withRuntime: 0.4 + 0.2},
		"control socket": {cpu: 0.1, withRuntime: 0.2},
		sysmon:           {cpu: 0.4, withRuntime: 0.2},
		scheduler:        {cpu: 0.1},
		kernelOnly:       {cpu: 0.1},
	}
	if diff := cmp.Diff(want, p.parts, cmp.AllowUnexported(cost{}), cmpopts.EquateApprox(0, 1e-9)); diff != "" {
		t.Error(diff)
	}
	if p.inKernel != 0.1 {
		t.Error("in the kernel:", p.inKernel)
	}
}

func TestPrintProfiles(t *testing.T) {
	subjectWith := func(name string, ms float64, p *profile) *subject {
		return &subject{name: name, idle: "idle", runs: [][]figure{{{"idle: " + cpuFigure, "ms", ms}}}, profile: p}
	}
	ours := &profile{parts: map[string]*cost{"a": {0.75, 0.25, 0.5, 3, 0}, "b": {0.25, 0, 0.5, 1, 20}}, names: map[string]float64{"futex": 4}}
	theirs := &profile{parts: map[string]*cost{"b": {1, 0, 1, 2, 10}}, names: map[string]float64{"futex": 1, "read": 1}, inKernel: 0.5}
	var out bytes.Buffer
	if err := printProfiles(&out, []*subject{subjectWith("ours", 100, ours), subjectWith("/bin/theirs", 50, theirs)}, time.Minute); err != nil {
		t.Fatal(err)
	}
	lines := map[string]string{}
	for line := range strings.Lines(out.String()) {
		if fields := strings.Fields(line); len(fields) > 1 {
			lines[fields[0]] = strings.Join(fields[1:], " ")
		}
	}
	for name, want := range map[string]string{
		"a":     "75.0 ms 25.0 ms 50.0 ms 3 - - - - - - -",
		"b":     "25.0 ms - 50.0 ms 1 20 50.0 ms - 50.0 ms 2 10 0.50",
		"all":   "100.0 ms 25.0 ms 100.0 ms 4 20 50.0 ms - 50.0 ms 2 10 2.00",
		"futex": "4 1 4.00",
		"read":  "- 1 0.00",
	} {
		if lines[name] != want {
			t.Errorf("%s: %q, want %q", name, lines[name], want)
		}
	}
}

// spin uses CPU time until stop.
//
//go:noinline
func spin(stop *atomic.Bool) (n int) {
	for !stop.Load() {
		n++
	}
	return n
}

// TestRecord records this process while it computes.
func TestRecord(t *testing.T) {
	if err := canRecord(t.Context(), onCPU, 1); err != nil {
		t.Skip(err)
	}
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s, err := goSymbols(path, path)
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	go spin(&stop)
	defer stop.Store(true)
	file := filepath.Join(t.TempDir(), "perf.data")
	if err := (recording{onCPU, os.Getpid(), 300 * time.Millisecond, file}).make(t.Context()); err != nil {
		t.Fatal(err)
	}
	var all, hits int
	err = samples(t.Context(), file, func(x sample) {
		all++
		for _, f := range x.stack {
			if strings.HasSuffix(s.name(f), "/numbers.spin") {
				hits++
			}
		}
	})
	if err != nil || hits == 0 || hits < all/2 {
		t.Errorf("%d of %d samples are in spin: %v", hits, all, err)
	}
}

// TestCPUTime compares with getrusage, which has the time of ended threads as well, and ends a thread.
func TestCPUTime(t *testing.T) {
	ofProcess := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	start, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	machine, err := machineTime()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
		for now := start; now < start+50*time.Millisecond; now, _ = cpuTime(os.Getpid()) {
		}
	}()
	<-ended
	before := ofProcess()
	took, err := cpuTime(os.Getpid())
	after := ofProcess()
	const tick = 4 * time.Millisecond // a thread that runs is counted at the kernel's tick, by either
	if err != nil || took < start+50*time.Millisecond || took < before-tick || took > after+tick {
		t.Errorf("from %v to %v, getrusage %v to %v: %v", start, took, before, after, err)
	}
	if all, err := machineTime(); err != nil || all < machine+20*time.Millisecond { // counted by ticks
		t.Errorf("the machine, which ran this process for 50 ms: from %v to %v: %v", machine, all, err)
	}
	if _, err := cpuTime(math.MaxInt32 >> 4); err == nil {
		t.Error("CPU time of no process")
	}
}

func TestSystemCallNames(t *testing.T) {
	names := systemCallNames(t.Context())
	if got := names[fmt.Sprint(unix.SYS_FUTEX)]; got != "futex" {
		t.Errorf("%q", got)
	}
}
