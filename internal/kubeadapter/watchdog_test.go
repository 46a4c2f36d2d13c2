package kubeadapter

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Each goroutine of the adapter is registered while it runs, and is not late without a fault.
func TestWatchdogTasks(t *testing.T) {
	registry := watchdog.NewRegistry()
	r := newRunning(t, 2, func(a *Adapter) { a.opts.Watchdog = registry })
	names := func() (names []string) {
		for _, s := range registry.Tasks() {
			names = append(names, s.Name)
		}
		return names
	}
	want := []string{"ListAndWatch " + GPUResource, "endpoint " + GPUResource, "plugin directory", "pod resources"}
	if got := names(); !slices.Equal(got, want) {
		t.Errorf("registered: %v, want %v", got, want)
	}
	if late := registry.Late(time.Now()); len(late) != 0 {
		t.Errorf("late: %v", late)
	}
	r.kubelet.Stop()
	r.await("the end of the stream", func() bool { return !slices.Contains(names(), "ListAndWatch "+GPUResource) })
	r.stop()
	if got := names(); len(got) != 0 {
		t.Errorf("still registered: %v", got)
	}
}
