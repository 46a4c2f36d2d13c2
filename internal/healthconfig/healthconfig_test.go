package healthconfig_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
)

func key(t *testing.T, name string) healthconfig.Key {
	t.Helper()
	for _, k := range healthconfig.Keys() {
		if k.Name == name {
			return k
		}
	}
	t.Fatalf("no key %s", name)
	return healthconfig.Key{}
}

// What the documentation says is the default is what holds where nothing is said.
func TestDefaults(t *testing.T) {
	v := healthconfig.Default()
	for _, k := range healthconfig.Keys() {
		if err := k.Set(&v, k.Default); err != nil {
			t.Errorf("%s: %v", k.Name, err)
		}
	}
	want := healthconfig.Default()
	want.Health.XIDs = map[uint64]xid.Effect{}
	if !reflect.DeepEqual(v, want) {
		t.Errorf("the defaults as texts give %+v, want %+v", v, want)
	}
	c := core.DefaultConfig()
	v.Apply(&c)
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

func TestSpellings(t *testing.T) {
	k := key(t, "recovery_dwell")
	if got := []string{k.Flag(), k.Env(), k.YAML()}; !reflect.DeepEqual(got, []string{"recovery-dwell", "RECOVERY_DWELL", "recoveryDwell"}) {
		t.Error(got)
	}
	if got := key(t, healthconfig.XIDs).YAML(); got != "xids" {
		t.Error(got)
	}
}

func TestOverlapReachesTheCore(t *testing.T) {
	v := healthconfig.Default()
	if err := key(t, "overlap").Set(&v, "refuse"); err != nil {
		t.Fatal(err)
	}
	c := core.DefaultConfig()
	if v.Apply(&c); c.Overlap != core.OverlapRefuse {
		t.Errorf("%q", c.Overlap)
	}
}

func TestXIDs(t *testing.T) {
	v := healthconfig.Default()
	if err := key(t, "xids").Set(&v, " 63=ignore, 94=degraded,999=unhealthy,"); err != nil {
		t.Fatal(err)
	}
	want := map[uint64]xid.Effect{63: xid.None, 94: xid.Degrades, 999: xid.Withdraws}
	if !reflect.DeepEqual(v.Health.XIDs, want) {
		t.Errorf("%v", v.Health.XIDs)
	}
}

func TestRefusals(t *testing.T) {
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
			v := healthconfig.Default()
			err := key(t, name).Set(&v, value)
			if err == nil || !strings.Contains(err.Error(), "want") && !strings.Contains(err.Error(), "twice") {
				t.Errorf("%s = %q: %v", name, value, err)
			}
		}
	}
}
