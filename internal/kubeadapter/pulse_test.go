package kubeadapter

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Every loop of the adapter is on the board for as long as it lives, and is not late while all is well.
func TestLoopsBeat(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.src.Set(buildInventory(coretest.GPUs(2), core.DefaultConfig()))
	board := watchdog.NewRegistry()
	r.start(func(a *Adapter) { a.opts.Watchdog = board })
	r.awaitHealthy(GPUResource, 2)
	names := func() (names []string) {
		for _, s := range board.Tasks() {
			names = append(names, s.Name)
		}
		return names
	}
	want := []string{"ListAndWatch " + GPUResource, "endpoint " + GPUResource, "plugin directory", "pod resources"}
	if got := names(); !slices.Equal(got, want) {
		t.Errorf("on the board: %v, want %v", got, want)
	}
	if late := board.Late(time.Now()); len(late) != 0 {
		t.Errorf("late: %v", late)
	}
	r.kubelet.Stop()
	r.await("the end of the stream", func() bool { return !slices.Contains(names(), "ListAndWatch "+GPUResource) })
	r.stop()
	if got := names(); len(got) != 0 {
		t.Errorf("left on the board: %v", got)
	}
}
