package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// settle is longer than the time between two checks: what came before has ended.
const settle = 12 * time.Second

// idleMinutes measures a time without a request, with all GPUs healthy and, of a simulated machine, with one lost. The figures are those of a
// minute.
func (o options) idleMinutes(p *process, m *simdriver.Machine, s *subject) ([]figure, error) {
	healthy, err := p.minute(m, o.idle, s.idle)
	if err != nil || m == nil {
		return healthy, err
	}
	slots, err := m.Slots()
	if err != nil {
		return nil, err
	}
	if err := m.Lose(slots[len(slots)/2]); err != nil {
		return nil, err
	}
	lost, err := p.minute(m, o.idle, s.idle+", one GPU lost")
	return slices.Concat(healthy, lost), err
}

func (p *process) minute(m *simdriver.Machine, d time.Duration, name string) ([]figure, error) {
	time.Sleep(settle)
	before, err := p.spent(m)
	if err != nil {
		return nil, err
	}
	time.Sleep(d)
	after, err := p.spent(m)
	for i := range after {
		after[i].value = (after[i].value - before[i].value) / d.Minutes()
		after[i].name = name + ": " + after[i].name
	}
	return after, err
}

// spent is what the process has cost so far; the calls are those of a simulated driver.
func (p *process) spent(m *simdriver.Machine) ([]figure, error) {
	cpu, err := cpuTime(p.pid)
	if err != nil {
		return nil, err
	}
	wakeups, err := p.wakeups()
	if err != nil {
		return nil, err
	}
	machine, err := machineTime()
	if err != nil {
		return nil, err
	}
	figures := []figure{
		{"CPU", "ms", float64(cpu.Nanoseconds()) / 1e6}, {"CPU of all processes", "s", machine.Seconds()}, {"waits of threads", "", wakeups},
	}
	if m == nil {
		return figures, nil
	}
	calls, err := m.CallsOf(p.pid)
	if err != nil {
		return nil, err
	}
	var all, waits float64
	for name, n := range calls {
		all += float64(n)
		if strings.HasPrefix(name, "nvmlEventSetWait") {
			waits += float64(n)
		}
	}
	return append(figures, figure{"driver calls", "", all}, figure{"of them event waits", "", waits}), nil
}

// cpuTime is the CPU time of a process from its CPU clock (clock_getcpuclockid(3)), which is exact to the nanosecond and has that of
// threads that have ended; not that of other processes it started. /proc/PID/stat has ticks of 10 ms, a fifth of what an idle
// minute may cost, and /proc/PID/task/*/schedstat lacks ended threads.
func cpuTime(pid int) (time.Duration, error) {
	const ofScheduler = 2 // CPUCLOCK_SCHED of the kernel's posix-timers.h
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|ofScheduler), &t); err != nil {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// machineTime is the time for which the CPUs of the machine were not idle (proc_stat(5)). The more of it other processes have, the more an
// idle process costs, because its code and data are in no cache.
func machineTime() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	var user, nice, system, idle, iowait, irq, softirq, steal time.Duration
	_, err = fmt.Sscanf(line, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal)
	if err != nil {
		return 0, fmt.Errorf("/proc/stat: %q: %w", line, err)
	}
	const tick = 10 * time.Millisecond // USER_HZ
	return (user + nice + system + irq + softirq + steal) * tick, nil
}

// wakeups is how often threads have waited, and so were woken (proc(5), voluntary_ctxt_switches). Those of ended threads are lost.
func (p *process) wakeups() (n float64, err error) {
	threads, err := filepath.Glob(p.path("task/*/status"))
	for _, path := range threads {
		text, _ := os.ReadFile(path) // the thread may have ended
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		var switches float64
		_, _ = fmt.Sscan(rest, &switches)
		n += switches
	}
	return n, err
}
