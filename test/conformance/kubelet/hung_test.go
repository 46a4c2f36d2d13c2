package kubelet

import (
	"testing"
	"time"
)

// Case 14 while a call to a GPU hangs: Allocate of others, for which the kubelet's sync loop waits, does not wait for the driver.
func TestCase14HungDriver(t *testing.T) {
	n, _ := newReady(t, "--health-period=1s", "--call-deadline=2s")
	n.Sim("hang", "3", "*")
	began := time.Now()
	n.Must(n.allocate(n.pod("now", nil, 2)))
	if took := time.Since(began); took > time.Second {
		t.Errorf("Allocate took %v", took)
	}
	n.awaitCapacity(gpus, 8, 7)
}
