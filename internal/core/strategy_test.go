package core_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// gpuIndices selects GPUs by index, with their instances.
func gpuIndices(indices ...int) (s core.Selector) {
	for _, i := range indices {
		s.Indices = append(s.Indices, core.DeviceIndex{GPU: i, Instance: -1})
	}
	return s
}

// offerText formats an inventory: "gpu: 0 1::0 1::1", one pool after the other.
func offerText(inv *core.Inventory) string {
	var order []string
	names := map[string][]string{}
	for u := range inv.Units() {
		if names[u.Pool] == nil {
			order = append(order, u.Pool)
		}
		name := deviceName(u.Device.ID)
		if u.Sharing.Mode != core.Exclusive {
			name += fmt.Sprintf("::%d", u.Replica)
		}
		names[u.Pool] = append(names[u.Pool], name)
	}
	var lines []string
	for _, pool := range order {
		lines = append(lines, pool+": "+strings.Join(names[pool], " "))
	}
	return strings.Join(lines, "; ")
}

// excludedText lists the excluded devices with reasons.
func excludedText(inv *core.Inventory) string {
	var lines []string
	for _, e := range inv.Excluded() {
		name := fmt.Sprint(e.Index)
		if e.At.GI != core.Whole {
			name += fmt.Sprintf(":%d", e.At.GI-1)
		}
		lines = append(lines, name+" "+e.Reason)
	}
	return strings.Join(lines, "; ")
}

func TestMIGStrategyPerGPU(t *testing.T) {
	const (
		ones    = "1g.10gb"
		off     = "mig-strategy single: MIG mode is off on this GPU"
		bare    = "MIG mode is on and there are no MIG instances"
		another = "mig-strategy single: profile 3g.40gb differs from this node's 1g.10gb"
	)
	cut := func(n int, profiles ...string) func(core.Snapshot) core.Snapshot {
		return func(s core.Snapshot) core.Snapshot { return coretest.WithMIG(s, n, profiles...) }
	}
	type machine []func(core.Snapshot) core.Snapshot
	rule := func(m core.MIGStrategy, gpus ...int) core.Rule { return core.Rule{Select: gpuIndices(gpus...), MIG: m} }
	reserve := func(gpus ...int) core.Rule { return core.Rule{Select: gpuIndices(gpus...), Reserve: "kept"} }
	for name, tc := range map[string]struct {
		machine       machine
		mig           core.MIGStrategy
		rules         []core.Rule
		units, refuse string
	}{
		"mixed: on on one, off on another": {
			machine{cut(1, ones, "3g.40gb")}, core.MIGMixed, nil, "gpu: 0 2; mig-1g.10gb: 1:0; mig-3g.40gb: 1:1", "",
		},
		"none on one of mixed": {
			machine{cut(0, ones), cut(1, ones)}, core.MIGMixed, []core.Rule{rule(core.MIGNone, 1)}, "mig-1g.10gb: 0:0; gpu: 1 2", "",
		},
		"mixed on one of none": {
			machine{cut(0, ones), cut(1, ones)}, core.MIGNone, []core.Rule{rule(core.MIGMixed, 1)}, "gpu: 0 2; mig-1g.10gb: 1:0", "",
		},
		"single on all": {
			machine{cut(0, ones, ones), cut(1, ones), cut(2, ones)}, core.MIGSingle, nil, "gpu: 0:0 0:1 1:0 2:0", "",
		},
		"single, and one GPU does not fit": {
			machine{cut(0, ones, ones), cut(1, ones)}, core.MIGSingle, nil, "gpu: 0:0 0:1 1:0", "2 " + off,
		},
		"single, and one instance does not fit": {
			machine{cut(0, ones, ones), cut(1, ones, "3g.40gb"), cut(2, ones)}, core.MIGSingle, nil, "gpu: 0:0 0:1 1:0 2:0", "1:1 " + another,
		},
		"single, and one is bare": {
			machine{cut(0, ones), cut(1, ones), cut(2)}, core.MIGSingle, nil, "gpu: 0:0 1:0", "2 " + bare,
		},
		"single without MIG": {nil, core.MIGSingle, nil, "gpu: 0 1 2", ""},
		"single on two, none on the third": {
			machine{cut(0, ones), cut(1, ones)}, core.MIGNone, []core.Rule{rule(core.MIGSingle, 0, 1)}, "gpu: 0:0 1:0 2", "",
		},
		"single on one, mixed on another, none on the third": {
			machine{cut(0, ones), cut(1, ones, "3g.40gb"), cut(2, ones)}, core.MIGNone,
			[]core.Rule{rule(core.MIGSingle, 0), rule(core.MIGMixed, 1)}, "gpu: 0:0 2; mig-1g.10gb: 1:0; mig-3g.40gb: 1:1", "",
		},
		"the profile of GPUs that are mixed is not the node's": {
			machine{cut(0, "3g.40gb", "3g.40gb"), cut(1, ones)}, core.MIGSingle,
			[]core.Rule{rule(core.MIGMixed, 0), rule(core.MIGNone, 2)}, "mig-3g.40gb: 0:0 0:1; gpu: 1:0 2", "",
		},
		"the profile of GPUs that are kept back is not the node's": {
			machine{cut(0, "3g.40gb", "3g.40gb"), cut(1, ones), cut(2, ones)}, core.MIGSingle,
			[]core.Rule{reserve(0)}, "gpu: 1:0 2:0", "0:0 kept; 0:1 kept",
		},
		"GPUs that are kept back are cut, the others are not": {
			machine{cut(0, ones, ones)}, core.MIGSingle, []core.Rule{reserve(0)}, "gpu: 1 2", "0:0 kept; 0:1 kept",
		},
		"the first rule decides on MIG, too": {
			machine{cut(0, ones)}, core.MIGNone, []core.Rule{{Select: gpuIndices(0), Pool: "first"}, rule(core.MIGMixed, 0)}, "first: 0; gpu: 1 2", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := coretest.GPUs(3)
			for _, change := range tc.machine {
				s = change(s)
			}
			cfg := core.DefaultConfig()
			cfg.MIG, cfg.Policy.Rules = tc.mig, tc.rules
			inv := core.Build(s, core.Ledger{}, cfg)
			if got := offerText(inv); got != tc.units {
				t.Errorf("offered %q, want %q", got, tc.units)
			}
			if got := excludedText(inv); got != tc.refuse {
				t.Errorf("refused %q, want %q", got, tc.refuse)
			}
		})
	}
}

// Devices that are excluded, or not included, do not count for the common profile.
func TestCommonProfileOfOfferedDevices(t *testing.T) {
	s := coretest.Cut(coretest.Cut(coretest.GPUs(2), 0, "3g.40gb", "3g.40gb"), 1, "1g.10gb")
	cfg := core.DefaultConfig()
	cfg.MIG = core.MIGSingle
	for name, change := range map[string]func(*core.Config){
		"excluded by ID": func(c *core.Config) { c.Exclude = []core.DeviceID{coretest.Instance(0, 0), coretest.Instance(0, 1)} },
		"not included":   func(c *core.Config) { c.Policy.Include = []core.Selector{gpuIndices(1)} },
	} {
		c := cfg
		change(&c)
		if got := offerText(core.Build(s, core.Ledger{}, c)); got != "gpu: 1:0" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// A rule that selects only hidden devices has no effect, unless it sets the strategy.
func TestRulesWithoutEffect(t *testing.T) {
	const idle = "p:1: selects no device of this machine, or only such as earlier rules select"
	s := coretest.WithMIG(coretest.GPUs(2), 0, "1g.10gb", "1g.10gb")
	ones := core.Selector{At: "p:1", Profiles: []string{"1g.*"}}
	big := core.Selector{At: "p:1", Memory: core.Range{Min: 40 << 30}, Indices: gpuIndices(0).Indices}
	for name, tc := range map[string]struct {
		mig  core.MIGStrategy
		rule core.Rule
		want string
	}{
		"instances, offered":                  {core.MIGMixed, core.Rule{Select: ones, Pool: "small"}, ""},
		"instances, not offered":              {core.MIGNone, core.Rule{Select: ones, Pool: "small"}, idle},
		"a GPU that is cut, itself":           {core.MIGMixed, core.Rule{Select: big, Pool: "big"}, idle},
		"a GPU that is cut, and its strategy": {core.MIGMixed, core.Rule{Select: big, MIG: core.MIGMixed}, ""},
		"a GPU that is cut, offered whole":    {core.MIGNone, core.Rule{Select: big, Pool: "big"}, ""},
		"a GPU with its instances":            {core.MIGMixed, core.Rule{Select: gpuIndices(0), Pool: "small"}, ""},
		"a GPU that does not fit":             {core.MIGSingle, core.Rule{Select: gpuIndices(1), Pool: "one"}, ""},
	} {
		cfg := core.DefaultConfig()
		cfg.MIG, cfg.Policy.Rules = tc.mig, []core.Rule{tc.rule}
		if got := strings.Join(core.Build(s, core.Ledger{}, cfg).PolicyWarnings(), "; "); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}
