package history

import (
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/check"
)

// FuzzLoad checks that an agent starts with any file, and that the valid parts of it are saved unchanged.
func FuzzLoad(f *testing.F) {
	golden, err := os.ReadFile("testdata/v2.json")
	check.NoError(f, err)
	f.Add(golden)
	f.Add([]byte(`{"Version":2,"Agent":"k8s-gpu","Record":{"Conditions":[{"At":{"GPU":"GPU-a"},"Reason":"RECOVERY_ACTION","Code":255}]}}`))
	f.Add([]byte(`{"Version":2,"Agent":"k8s-gpu","Record":{"GPUs":{"GPU-a":{"Sample":{"RecoveryAction":"reset"}}},"Devices":[{"ID":"GPU-a","At":{"GPU":"GPU-a"}}]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := decode(text, "k8s-gpu")
		if err != nil {
			return
		}
		r := d.record
		cfg, now := core.DefaultConfig(), time.Now()
		s := core.Restore(cfg, r, r.BootID).Read(cfg, now, coretest.GPUs(1)).Observe(cfg, now.Add(time.Hour))
		for u := range s.Allocatable.Units() {
			if line := u.Health.String(); len(line) > 200 || u.Health.State > health.Healthy && u.Health.Cause() == "" {
				t.Errorf("health %q, cause %q", line, u.Health.Cause())
			}
		}
		for _, c := range s.Ledger.Conditions() {
			if c.String() == "" || c.Cause() == "" {
				t.Errorf("%+v has no text", c)
			}
		}
		for _, record := range []core.Checkpoint{r, s.Checkpoint(r.BootID)} {
			text, err := encode(record, "k8s-gpu")
			check.NoError(t, err)
			again, err := decode(text, "k8s-gpu")
			if err != nil || len(again.skipped) > 0 {
				t.Errorf("%v, %v", err, again.skipped)
			}
			if diff := cmp.Diff(record, again.record, cmpopts.IgnoreUnexported(health.GPUHistory{}, health.FaultCount{}), cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
		}
	})
}
