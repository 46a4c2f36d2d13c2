package config

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// setHealth sets the key of health with this HCL name; the error is the remedy.
func setHealth(h *Health, key, text string) error {
	for _, o := range healthOptions(h) {
		if o.HCL == key {
			return o.set(Value{Text: text})
		}
	}
	return errors.New("unknown key " + key)
}

// The documented default of each key is the default.
func TestHealthDefaults(t *testing.T) {
	h := DefaultHealth()
	for _, s := range HealthSpecs() {
		if err := setHealth(&h, s.HCL, s.Default); err != nil {
			t.Errorf("%s: %v", s.HCL, err)
		}
	}
	if want := DefaultHealth(); !reflect.DeepEqual(h, want) {
		t.Errorf("the defaults as texts give %+v, want %+v", h, want)
	}
	c := core.DefaultConfig()
	h.Apply(&c)
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

func TestHealthSpellings(t *testing.T) {
	got := map[string][]string{}
	for _, s := range HealthSpecs() {
		got[s.HCL] = []string{s.Flag, s.Key, variable(s.Flag)}
	}
	for name, want := range map[string][]string{
		"recovery_dwell": {"recovery-dwell", "health.recoveryDwell", "RECOVERY_DWELL"},
		XIDs:             {"xids", "health.xids", "XIDS"},
	} {
		if !reflect.DeepEqual(got[name], want) {
			t.Errorf("%s: %q", name, got[name])
		}
	}
}

func TestOverlapReachesTheCore(t *testing.T) {
	h := DefaultHealth()
	if err := setHealth(&h, "overlap", "refuse"); err != nil {
		t.Fatal(err)
	}
	c := core.DefaultConfig()
	if h.Apply(&c); c.Overlap != inventory.OverlapRefuse {
		t.Errorf("%q", c.Overlap)
	}
}

func TestXIDs(t *testing.T) {
	h := DefaultHealth()
	if err := setHealth(&h, XIDs, " 63=ignore, 94=degraded,999=unhealthy,"); err != nil {
		t.Fatal(err)
	}
	want := map[uint64]xid.Effect{63: xid.None, 94: xid.Degrades, 999: xid.Withdraws}
	if !reflect.DeepEqual(h.Policy.XIDs, want) {
		t.Errorf("%v", h.Policy.XIDs)
	}
}

func TestHealthRefusals(t *testing.T) {
	for name, values := range map[string][]string{
		"health_mode":     {"", "enforced", "Observe"},
		"xids":            {"63", "63=fine", "x=ignore", "-1=ignore", "0=ignore", "63=ignore,63=unhealthy"},
		"health_period":   {"", "10", "0s", "-1s"},
		"recovery_checks": {"0", "three", ""},
		"recovery":        {"never"},
		"kernel_log":      {"", "dev/kmsg"},
		"state_dir":       {"var/lib"},
		"simulation":      {"yes"},
		"overlap":         {"", "Refuse", "forbid"},
	} {
		for _, value := range values {
			h := DefaultHealth()
			err := setHealth(&h, name, value)
			if err == nil || !strings.Contains(err.Error(), "want") && !strings.Contains(err.Error(), "twice") {
				t.Errorf("%s = %q: %v", name, value, err)
			}
		}
	}
}
