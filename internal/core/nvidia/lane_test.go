package nvidia

import (
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestHangIsVisible(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	before := snapshot(t, s)
	if busy := s.Busy(); busy != nil {
		t.Errorf("idle: %+v", busy)
	}
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceGetMemoryInfo"))
	started := time.Now()
	read := make(chan core.Snapshot)
	go func() {
		snap, err := s.Snapshot()
		if err != nil {
			t.Error(err)
		}
		read <- snap
	}()
	stuck := eventually(t, func() (core.Call, bool) {
		for _, c := range s.Busy() {
			return c, c.Name == "nvmlDeviceGetMemoryInfo" && c.At == core.WholeGPU(h100ID)
		}
		return core.Call{}, false
	})
	if stuck.Since.Before(started) || stuck.Since.After(time.Now()) {
		t.Errorf("since %v", stuck.Since)
	}
	must(t, m.Heal())
	if after := <-read; !after.Equal(before) {
		t.Error(gocmp.Diff(before, after))
	}
	if busy := s.Busy(); busy != nil {
		t.Errorf("idle again: %+v", busy)
	}
}
