package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// profile is what perf recorded of an idle process.
type profile struct {
	parts map[string]*cost
	// names are the system calls of a minute by name. Nil: perf may not record them.
	names map[string]float64
	// wakeups are the times in a minute that a thread ran when none had for a time.
	wakeups float64
	// inKernel is the share of the samples in the kernel.
	inKernel float64
}

// cost is that of a part.
type cost struct {
	cpu      float64 // share of the samples
	inDriver float64 // of it in the driver library
	// withRuntime is the share with that of the Go runtime and of the kernel, each sample of which belongs to the parts with which it ran:
	// a part that needs 10 us ten times a second costs ten wake-ups, which are samples of the scheduler, of sysmon, of the kernel.
	withRuntime  float64
	calls, waits float64 // system calls of a minute, and how often a thread waited, but in the driver library
}

func (p *profile) part(name string) *cost {
	if p.parts[name] == nil {
		p.parts[name] = &cost{}
	}
	return p.parts[name]
}

// all is the sum of the parts.
func (p *profile) all() (sum cost) {
	for _, c := range p.parts {
		sum.cpu += c.cpu
		sum.inDriver += c.inDriver
		sum.withRuntime += c.withRuntime
		sum.calls += c.calls
		sum.waits += c.waits
	}
	return sum
}

// profile records the process for a time, and then, if perf may, its system calls for as long.
func (p *process) profile(ctx context.Context, r recordings) (*profile, error) {
	dir, err := os.MkdirTemp("", "numbers")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path, err := os.Readlink(p.path("exe"))
	if err != nil {
		return nil, err
	}
	symbols, err := goSymbols(p.path("exe"), path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "numbers: no symbols:", path, err)
	}
	file := filepath.Join(dir, "perf.data")
	if err := (recording{onCPU, p.pid, r.time, file}).make(ctx); err != nil {
		return nil, err
	}
	result := &profile{parts: map[string]*cost{}}
	cpu := cpuSamples{symbols: symbols, profile: result}
	if err := samples(ctx, file, cpu.add); err != nil {
		return nil, err
	}
	cpu.end()
	if !r.calls {
		return result, nil
	}
	if err := (recording{traced, p.pid, r.time, file}).make(ctx); err != nil {
		return nil, err
	}
	calls := tracedSamples{symbols: symbols, profile: result, numbers: systemCallNames(ctx), minutes: r.time.Minutes()}
	result.names = map[string]float64{}
	return result, samples(ctx, file, calls.add)
}

// cpuSamples adds samples of CPU time to a profile.
type cpuSamples struct {
	symbols  *symbols
	profile  *profile
	all      float64
	inKernel float64
	last     time.Duration
	burst    map[string]float64 // samples by part since the process last slept
}

// asleep is longer than the time between two samples of a process that runs, which also waits for the other CPU.
const asleep = 500 * time.Microsecond

func (c *cpuSamples) add(s sample) {
	if s.at-c.last > asleep {
		c.endBurst()
	}
	c.last = s.at
	if c.burst == nil {
		c.burst = map[string]float64{}
	}
	name, inDriver := c.symbols.partOf(s.stack)
	c.burst[name]++
	c.profile.part(name).cpu++
	if inDriver {
		c.profile.part(name).inDriver++
	}
	c.all++
	if len(s.stack) > 0 && s.stack[0].kernel() {
		c.inKernel++
	}
}

// endBurst divides the samples of the runtime among the parts that ran at that time.
func (c *cpuSamples) endBurst() {
	var ofRuntime, ofParts float64
	for name, n := range c.burst {
		if slices.Contains(runtimeParts, name) {
			ofRuntime += n
		} else {
			ofParts += n
		}
	}
	for name, n := range c.burst {
		switch {
		case ofParts == 0:
			c.profile.part(name).withRuntime += n
		case !slices.Contains(runtimeParts, name):
			c.profile.part(name).withRuntime += n * (1 + ofRuntime/ofParts)
		}
	}
	c.burst = nil
}

// end makes shares of the numbers of samples.
func (c *cpuSamples) end() {
	c.endBurst()
	for _, part := range c.profile.parts {
		part.cpu /= max(c.all, 1)
		part.inDriver /= max(c.all, 1)
		part.withRuntime /= max(c.all, 1)
	}
	c.profile.inKernel = c.inKernel / max(c.all, 1)
}

// tracedSamples adds samples of system calls and waits to a profile.
type tracedSamples struct {
	symbols *symbols
	profile *profile
	numbers map[string]string // names of system calls
	minutes float64           // of the recording
	last    time.Duration
}

func (t *tracedSamples) add(s sample) {
	if t.last == 0 || s.at-t.last > asleep {
		t.profile.wakeups += 1 / t.minutes
	}
	t.last = s.at
	name, inDriver := t.symbols.partOf(s.stack)
	if inDriver {
		name = driverLibrary
	}
	part := t.profile.part(name)
	switch s.event {
	case systemCall:
		part.calls += 1 / t.minutes
		_, rest, _ := strings.Cut(s.args, "NR ")
		number, _, _ := strings.Cut(rest, " ")
		call := cmp.Or(t.numbers[number], "system call "+number)
		if inDriver {
			call = driverLibrary + ": " + call
		}
		t.profile.names[call] += 1 / t.minutes
	case threadSwitch:
		_, state, _ := strings.Cut(s.args, "prev_state=")
		if !strings.HasPrefix(state, "R") { // else it has lost its CPU to another thread
			part.waits += 1 / t.minutes
		}
	}
}

// systemCallNames are the names by number, from the C compiler's headers.
func systemCallNames(ctx context.Context) map[string]string {
	names := map[string]string{}
	defines, _ := exec.CommandContext(ctx, "cc", "-dM", "-E", "-x", "c", "-include", "sys/syscall.h", os.DevNull).Output() // else numbers
	for line := range strings.Lines(string(defines)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			continue
		}
		name, ok := strings.CutPrefix(fields[1], "__NR_")
		if _, err := strconv.Atoi(fields[2]); ok && err == nil {
			names[fields[2]] = name
		}
	}
	return names
}
