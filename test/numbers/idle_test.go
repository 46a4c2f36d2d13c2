package main

import (
	"math"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"
)

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
