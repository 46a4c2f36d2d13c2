package core_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// deviceName shortens an ID: "0" is the first GPU, "1:0" the first MIG instance of the second.
func deviceName(id core.DeviceID) string {
	if tail, ok := strings.CutPrefix(string(id), "MIG-00000000-0000-4000-8000-"); ok {
		return strings.TrimLeft(tail[:8], "0") + tail[8:9] + ":" + tail[11:]
	}
	return string(id[len(id)-1:])
}

// selectedNames lists the devices that a selector selects.
func selectedNames(s core.Selector, machine core.Snapshot) string {
	var names []string
	for _, d := range machine.Devices {
		if s.Selects(&d, core.DeviceIndex{GPU: d.Index, Instance: d.Instance}) {
			names = append(names, deviceName(d.ID))
		}
	}
	return strings.Join(names, " ")
}

func TestSelector(t *testing.T) {
	machine := coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb", "1g.10gb+me", "2g.20gb")
	machine.Devices[len(machine.Devices)-1].Model = "NVIDIA L40S"
	machine.Devices[len(machine.Devices)-1].Memory = 46068 << 20
	whole := func(n int) core.DeviceIndex { return core.DeviceIndex{GPU: n, Instance: -1} }
	for name, tc := range map[string]struct {
		s    core.Selector
		want string
	}{
		"no condition":                         {core.Selector{}, "0 1 1:0 1:1 1:2 2"},
		"UUID of a GPU":                        {core.Selector{IDs: []core.DeviceID{coretest.GPU(0)}}, "0"},
		"UUID of a GPU with instances":         {core.Selector{IDs: []core.DeviceID{coretest.GPU(1)}}, "1 1:0 1:1 1:2"},
		"UUID of an instance":                  {core.Selector{IDs: []core.DeviceID{coretest.Instance(1, 1)}}, "1:1"},
		"several UUIDs":                        {core.Selector{IDs: []core.DeviceID{coretest.Instance(1, 1), coretest.GPU(2), "GPU-x"}}, "1:1 2"},
		"the beginning of a UUID":              {core.Selector{IDs: []core.DeviceID{coretest.GPU(0)[:10]}}, ""},
		"PCI address":                          {core.Selector{PCI: []core.PCIAddress{"0000:11:00.0", "0000:12:00.0"}}, "1 1:0 1:1 1:2 2"},
		"index":                                {core.Selector{Indices: []core.DeviceIndex{whole(0), whole(7)}}, "0"},
		"index of a GPU with instances":        {core.Selector{Indices: []core.DeviceIndex{whole(1)}}, "1 1:0 1:1 1:2"},
		"0:0 of a GPU without instances":       {core.Selector{Indices: []core.DeviceIndex{{GPU: 0, Instance: 0}}}, ""},
		"1:0 is not the GPU":                   {core.Selector{Indices: []core.DeviceIndex{{GPU: 1, Instance: 0}}}, "1:0"},
		"1:2 and 2":                            {core.Selector{Indices: []core.DeviceIndex{{GPU: 1, Instance: 2}, whole(2)}}, "1:2 2"},
		"model":                                {core.Selector{Models: []string{"NVIDIA L40S"}}, "2"},
		"model of a GPU with instances":        {core.Selector{Models: []string{"NVIDIA H100 80GB HBM3"}}, "0 1 1:0 1:1 1:2"},
		"model with its profile":               {core.Selector{Models: []string{"*MIG 1g.10gb"}}, "1:0"},
		"part of a model":                      {core.Selector{Models: []string{"H100"}}, ""},
		"models":                               {core.Selector{Models: []string{"*H100*", "*L40*"}}, "0 1 1:0 1:1 1:2 2"},
		"profile":                              {core.Selector{Profiles: []string{"1g.10gb"}}, "1:0"},
		"any profile":                          {core.Selector{Profiles: []string{"*"}}, "1:0 1:1 1:2"},
		"profiles":                             {core.Selector{Profiles: []string{"1g.*", "7g.*"}}, "1:0 1:1"},
		"no instances":                         {core.Selector{Full: true}, "0 1 2"},
		"at least":                             {core.Selector{Memory: core.Range{Min: 81559 << 20}}, "0 1"},
		"at most":                              {core.Selector{Memory: core.Range{Max: 46068 << 20}}, "1:0 1:1 1:2 2"},
		"between":                              {core.Selector{Memory: core.Range{Min: 40 << 30, Max: 50 << 30}}, "2"},
		"all must hold":                        {core.Selector{Models: []string{"*H100*"}, Indices: []core.DeviceIndex{whole(1), whole(2)}, Profiles: []string{"1g*"}}, "1:0 1:1"},
		"all must hold, and do not":            {core.Selector{Models: []string{"*L40S"}, Indices: []core.DeviceIndex{whole(1)}}, ""},
		"where it was written is no condition": {core.Selector{At: "policy.yaml:3"}, "0 1 1:0 1:1 1:2 2"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := selectedNames(tc.s, machine); got != tc.want {
				t.Errorf("selects %q, want %q", got, tc.want)
			}
		})
	}
}

func TestPatterns(t *testing.T) {
	for _, tc := range []struct {
		pattern string
		fits    []string
		not     []string
	}{
		{"", []string{""}, []string{"a"}},
		{"a", []string{"a"}, []string{"", "A", "aa", "ab"}},
		{"*", []string{"", "a", "*", "a b"}, nil},
		{"**", []string{"", "a", "ab"}, nil},
		{"a*", []string{"a", "ab", "a*"}, []string{"", "ba"}},
		{"*a", []string{"a", "ba", "aa"}, []string{"", "ab"}},
		{"a*a", []string{"aa", "aba", "aaa"}, []string{"a", "ab"}},
		{"*a*", []string{"a", "bab"}, []string{"", "b"}},
		{"a*b*c", []string{"abc", "abbc", "axbxc", "abcbc"}, []string{"ac", "acb", "abcd"}},
		{"*ab*ab*", []string{"abab", "xabyabz"}, []string{"ab", "aab", "ab a b"}},
		{"*ab*ab", []string{"abab", "ababab", "ab ab"}, []string{"ab", "aba", "abb"}},
		{"*?[a].*", []string{"?[a]."}, []string{"xa."}},
		{"é*", []string{"élan"}, []string{"e"}},
	} {
		fits := func(s string) bool {
			return (&core.Selector{Models: []string{tc.pattern}}).Selects(&core.Device{Model: s}, core.DeviceIndex{})
		}
		for _, s := range tc.fits {
			if !fits(s) {
				t.Errorf("%q does not fit %q", s, tc.pattern)
			}
		}
		for _, s := range tc.not {
			if fits(s) {
				t.Errorf("%q fits %q", s, tc.pattern)
			}
		}
	}
}

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
	s := coretest.WithMIG(coretest.WithMIG(coretest.GPUs(2), 0, "3g.40gb", "3g.40gb"), 1, "1g.10gb")
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
