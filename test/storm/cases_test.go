package storm

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A GPU that hangs before it has ever said who it is keeps no other from work: all that is known of it is an index.
// (Found by the storm: a GPU that was exchanged while its calls hung.)
func TestAGPUThatHangsFromTheStart(t *testing.T) {
	w := newStorm(t, options{seed: 1, slack: 1}, "h100x8", nil, func(m *simdriver.Machine) error {
		return m.Hang(simdriver.GPU(7), "nvmlDeviceGetUUID")
	})
	defer w.verdict()
	w.until(20*time.Second, func() bool { return w.monitor.Stats().Calls != nil })
	began := time.Now()
	w.until(20*time.Second, func() bool { return time.Since(began) > 2*deadline }) // judged all the while
	if n := len(w.nomad.view()); n != 7 {
		t.Errorf("%d GPUs are offered, want the seven that answer", n)
	}
	must(t, w.Heal())
	w.await("GPU 7", recovery, func(string, int) bool { return false })
}
