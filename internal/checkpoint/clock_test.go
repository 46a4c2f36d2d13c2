package checkpoint_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// A test may set the wall clock of a history.
func TestHistoryIsOnTheWallClockThatIsSet(t *testing.T) {
	d := newDisk(t)
	if err := os.WriteFile(filepath.Join(d.proc, "uptime"), []byte("7200.00 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, boot := d.open().Load()
	lost := time.Now().Add(-time.Hour)
	r.BootID, r.Conditions = boot, []core.Condition{{At: core.WholeGPU("GPU-a"), Reason: core.ReasonLost, State: core.GPULost, Since: lost, Last: lost, Count: 1}}
	d.save(d.open(), r)
	f := d.open()
	f.SetWallClock(func() time.Time { return time.Now().Add(-26 * time.Hour) })
	if r, _ := f.Load(); r.Conditions[0].Last.Sub(lost.Add(-26*time.Hour)).Abs() > 2*time.Second {
		t.Errorf("lost at %v, want 26 h before %v", r.Conditions[0].Last, lost)
	}
}
