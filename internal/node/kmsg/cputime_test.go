package kmsg

import (
	"testing"
	"time"
)

// The pause after a read follows from the CPU time that it took, and not from the time for which it waited.
func TestCPUTime(t *testing.T) {
	if waited := cpuTime(func() { time.Sleep(50 * time.Millisecond) }); waited > 10*time.Millisecond {
		t.Errorf("a wait of 50 ms took %v", waited)
	}
	worked := cpuTime(func() {
		for began := time.Now(); time.Since(began) < 50*time.Millisecond; {
		}
	})
	if worked == 0 || worked > 50*time.Millisecond+10*time.Millisecond {
		t.Errorf("work of at most 50 ms took %v", worked)
	}
}
