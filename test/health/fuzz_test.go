package health

import (
	"maps"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// FuzzSettings: a setting that is accepted makes a valid configuration, and XIDs that were read are read again from
// their text.
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
		again, _, err := config.NewBlock(map[string]any{key: written(s.Core.Health.XIDs)}).Read()
		if err != nil || !maps.Equal(again.Core.Health.XIDs, s.Core.Health.XIDs) {
			t.Errorf("%q: %v, then %v, %v", text, s.Core.Health.XIDs, again.Core.Health.XIDs, err)
		}
	})
}

// written returns effects of XIDs as an operator writes them.
func written(xids map[uint64]xid.Effect) string {
	words := map[xid.Effect]string{xid.None: "ignore", xid.Degrades: "degraded", xid.Withdraws: "unhealthy"}
	var items []string
	for code, effect := range xids {
		items = append(items, strconv.FormatUint(code, 10)+"="+words[effect])
	}
	return strings.Join(items, ",")
}
