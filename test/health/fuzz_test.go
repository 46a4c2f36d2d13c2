package health

import (
	"maps"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Whatever a person, a disk or a kernel writes, nothing panics. Two fuzz targets live with what they fuzz
// (make fuzz runs all of them); their seeds run here, so that one that is gone is missed. The third is below.
func TestCase34Fuzz(t *testing.T) {
	for target, pkg := range map[string]string{
		"FuzzParse": "internal/kmsg",       // a record of the kernel log
		"FuzzLoad":  "internal/checkpoint", // the state file
	} {
		t.Run(target, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), "go", "test", "-v", "-run", "^"+target+"$", "../../"+pkg).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "--- PASS: "+target) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// FuzzSettings: what a setting accepts makes a valid configuration, and XIDs that were understood, written
// down again, are understood the same.
func FuzzSettings(f *testing.F) {
	for _, k := range config.HealthSpecs() {
		f.Add(k.HCL, k.Default)
	}
	f.Add(config.XIDs, "63=ignore, 94=degraded,999=unhealthy")
	f.Add(config.XIDs, "63=ignore,63=ignore")
	f.Add(config.XIDs, "=,0=ignore,-1=degraded,99999999999=unhealthy")
	f.Fuzz(func(t *testing.T, key, text string) {
		s, _, err := config.NewBlock(map[string]any{key: text}).Read()
		if err != nil {
			return
		}
		if err := s.Core.Validate(); err != nil {
			t.Errorf("%s = %q is accepted: %v", key, text, err)
		}
		if key != config.XIDs {
			return
		}
		again, _, err := config.NewBlock(map[string]any{key: written(s.Health.Policy.XIDs)}).Read()
		if err != nil || !maps.Equal(again.Health.Policy.XIDs, s.Health.Policy.XIDs) {
			t.Errorf("%q: %v, then %v, %v", text, s.Health.Policy.XIDs, again.Health.Policy.XIDs, err)
		}
	})
}

// written are effects of XIDs as an operator would write them.
func written(xids map[uint64]xid.Effect) string {
	words := map[xid.Effect]string{xid.None: "ignore", xid.Degrades: "degraded", xid.Withdraws: "unhealthy"}
	var items []string
	for code, effect := range xids {
		items = append(items, strconv.FormatUint(code, 10)+"="+words[effect])
	}
	return strings.Join(items, ",")
}
