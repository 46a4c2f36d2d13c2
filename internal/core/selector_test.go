package core_test

import (
	"path"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// deviceName shortens an ID: "0" is the first GPU, "1:0" the first MIG instance of the second.
func deviceName(id gpu.DeviceID) string {
	if tail, ok := strings.CutPrefix(string(id), "MIG-00000000-0000-4000-8000-"); ok {
		return strings.TrimLeft(tail[:8], "0") + tail[8:9] + ":" + tail[11:]
	}
	return string(id[len(id)-1:])
}

// selectedNames lists the devices that a selector selects.
func selectedNames(s inventory.Selector, machine gpu.Snapshot) string {
	var names []string
	for _, d := range machine.Devices {
		if s.Selects(&d, gpu.DeviceIndex{GPU: d.Index, Instance: d.Instance}) {
			names = append(names, deviceName(d.ID))
		}
	}
	return strings.Join(names, " ")
}

func TestSelector(t *testing.T) {
	machine := coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb", "1g.10gb+me", "2g.20gb")
	machine.Devices[len(machine.Devices)-1].Model = "NVIDIA L40S"
	machine.Devices[len(machine.Devices)-1].Memory = 46068 << 20
	whole := func(n int) gpu.DeviceIndex { return gpu.DeviceIndex{GPU: n, Instance: -1} }
	for name, tc := range map[string]struct {
		s    inventory.Selector
		want string
	}{
		"no condition":                         {inventory.Selector{}, "0 1 1:0 1:1 1:2 2"},
		"UUID of a GPU":                        {inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)}}, "0"},
		"UUID of a GPU with instances":         {inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(1)}}, "1 1:0 1:1 1:2"},
		"UUID of an instance":                  {inventory.Selector{IDs: []gpu.DeviceID{coretest.Instance(1, 1)}}, "1:1"},
		"several UUIDs":                        {inventory.Selector{IDs: []gpu.DeviceID{coretest.Instance(1, 1), coretest.GPU(2), "GPU-x"}}, "1:1 2"},
		"the beginning of a UUID":              {inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)[:10]}}, ""},
		"PCI address":                          {inventory.Selector{PCI: []gpu.PCIAddress{"0000:11:00.0", "0000:12:00.0"}}, "1 1:0 1:1 1:2 2"},
		"index":                                {inventory.Selector{Indices: []gpu.DeviceIndex{whole(0), whole(7)}}, "0"},
		"index of a GPU with instances":        {inventory.Selector{Indices: []gpu.DeviceIndex{whole(1)}}, "1 1:0 1:1 1:2"},
		"0:0 of a GPU without instances":       {inventory.Selector{Indices: []gpu.DeviceIndex{{GPU: 0, Instance: 0}}}, ""},
		"1:0 is not the GPU":                   {inventory.Selector{Indices: []gpu.DeviceIndex{{GPU: 1, Instance: 0}}}, "1:0"},
		"1:2 and 2":                            {inventory.Selector{Indices: []gpu.DeviceIndex{{GPU: 1, Instance: 2}, whole(2)}}, "1:2 2"},
		"model":                                {inventory.Selector{Models: []string{"NVIDIA L40S"}}, "2"},
		"model of a GPU with instances":        {inventory.Selector{Models: []string{"NVIDIA H100 80GB HBM3"}}, "0 1 1:0 1:1 1:2"},
		"model with its profile":               {inventory.Selector{Models: []string{"*MIG 1g.10gb"}}, "1:0"},
		"part of a model":                      {inventory.Selector{Models: []string{"H100"}}, ""},
		"models":                               {inventory.Selector{Models: []string{"*H100*", "*L40*"}}, "0 1 1:0 1:1 1:2 2"},
		"profile":                              {inventory.Selector{Profiles: []string{"1g.10gb"}}, "1:0"},
		"any profile":                          {inventory.Selector{Profiles: []string{"*"}}, "1:0 1:1 1:2"},
		"profiles":                             {inventory.Selector{Profiles: []string{"1g.*", "7g.*"}}, "1:0 1:1"},
		"no instances":                         {inventory.Selector{Full: true}, "0 1 2"},
		"at least":                             {inventory.Selector{Memory: inventory.Range{Min: 81559 << 20}}, "0 1"},
		"at most":                              {inventory.Selector{Memory: inventory.Range{Max: 46068 << 20}}, "1:0 1:1 1:2 2"},
		"between":                              {inventory.Selector{Memory: inventory.Range{Min: 40 << 30, Max: 50 << 30}}, "2"},
		"all must hold":                        {inventory.Selector{Models: []string{"*H100*"}, Indices: []gpu.DeviceIndex{whole(1), whole(2)}, Profiles: []string{"1g*"}}, "1:0 1:1"},
		"all must hold, and do not":            {inventory.Selector{Models: []string{"*L40S"}, Indices: []gpu.DeviceIndex{whole(1)}}, ""},
		"where it was written is no condition": {inventory.Selector{At: "policy.yaml:3"}, "0 1 1:0 1:1 1:2 2"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := selectedNames(tc.s, machine); got != tc.want {
				t.Errorf("selects %q, want %q", got, tc.want)
			}
		})
	}
}

// In a pattern * matches any text and nothing else is special. path.Match is the reference for texts without the
// characters that are special there.
func TestPatterns(t *testing.T) {
	selects := func(pattern, model string) bool {
		return (&inventory.Selector{Models: []string{pattern}}).Selects(&gpu.Device{Model: model}, gpu.DeviceIndex{})
	}
	texts := words("ab", 6)
	for _, pattern := range words("ab*", 5) {
		for _, text := range texts {
			if want, err := path.Match(pattern, text); selects(pattern, text) != want || err != nil {
				t.Errorf("%q matches %q: %t, %v", pattern, text, !want, err)
			}
		}
	}
	for _, tc := range []struct {
		pattern, text string
		want          bool
	}{
		{"a", "A", false}, {"*", "*", true}, {"*", "a/b", true}, {"*?[a].*", "?[a].", true}, {"*?[a].*", "xa.", false}, {"é*", "élan", true}, {"é*", "e", false},
	} {
		if selects(tc.pattern, tc.text) != tc.want {
			t.Errorf("%q matches %q: %t", tc.pattern, tc.text, !tc.want)
		}
	}
}

// words returns all texts of at most n letters.
func words(letters string, n int) []string {
	all := []string{""}
	for done := 0; len(all[done]) < n; done++ {
		for _, letter := range letters {
			all = append(all, all[done]+string(letter))
		}
	}
	return all
}

// gpuIndices selects GPUs by index, with their instances.
func gpuIndices(indices ...int) (s inventory.Selector) {
	for _, i := range indices {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: i, Instance: -1})
	}
	return s
}

func TestMIGStrategies(t *testing.T) {
	const (
		ones    = "1g.10gb"
		off     = "mig-strategy single: MIG mode is off on this GPU"
		bare    = "MIG mode is on and there are no MIG instances"
		another = "mig-strategy single: profile 3g.40gb differs from this node's 1g.10gb"
	)
	cut := func(n int, profiles ...string) func(gpu.Snapshot) gpu.Snapshot {
		return func(s gpu.Snapshot) gpu.Snapshot { return coretest.WithMIG(s, n, profiles...) }
	}
	type machine []func(gpu.Snapshot) gpu.Snapshot
	rule := func(m inventory.MIGStrategy, gpus ...int) inventory.Rule {
		return inventory.Rule{Select: gpuIndices(gpus...), MIG: m}
	}
	under := func(m inventory.MIGStrategy, rules ...inventory.Rule) inventory.Config {
		return inventory.Config{MIG: m, Policy: inventory.Policy{Rules: rules}}
	}
	reserve := func(gpus ...int) inventory.Rule {
		return inventory.Rule{Select: gpuIndices(gpus...), NotOffered: "kept"}
	}
	for name, tc := range map[string]struct {
		machine        machine
		config         inventory.Config
		units, refused string
	}{
		"mixed: on on one, off on another": {
			machine{cut(1, ones, "3g.40gb")}, under(inventory.MIGMixed), "gpu: 0 2; mig-1g.10gb: 1:0; mig-3g.40gb: 1:1", "",
		},
		"none on one of mixed": {
			machine{cut(0, ones), cut(1, ones)}, under(inventory.MIGMixed, rule(inventory.MIGNone, 1)), "mig-1g.10gb: 0:0; gpu: 1 2", "",
		},
		"mixed on one of none": {
			machine{cut(0, ones), cut(1, ones)}, under(inventory.MIGNone, rule(inventory.MIGMixed, 1)), "gpu: 0 2; mig-1g.10gb: 1:0", "",
		},
		"single on all": {
			machine{cut(0, ones, ones), cut(1, ones), cut(2, ones)}, under(inventory.MIGSingle), "gpu: 0:0 0:1 1:0 2:0", "",
		},
		"single, and one GPU does not fit": {
			machine{cut(0, ones, ones), cut(1, ones)}, under(inventory.MIGSingle), "gpu: 0:0 0:1 1:0", "2 " + off,
		},
		"single, and one instance does not fit": {
			machine{cut(0, ones, ones), cut(1, ones, "3g.40gb"), cut(2, ones)}, under(inventory.MIGSingle), "gpu: 0:0 0:1 1:0 2:0", "1:1 " + another,
		},
		"single, and one is bare": {
			machine{cut(0, ones), cut(1, ones), cut(2)}, under(inventory.MIGSingle), "gpu: 0:0 1:0", "2 " + bare,
		},
		"single without MIG": {nil, under(inventory.MIGSingle), "gpu: 0 1 2", ""},
		"single on two, none on the third": {
			machine{cut(0, ones), cut(1, ones)}, under(inventory.MIGNone, rule(inventory.MIGSingle, 0, 1)), "gpu: 0:0 1:0 2", "",
		},
		"single on one, mixed on another, none on the third": {
			machine{cut(0, ones), cut(1, ones, "3g.40gb"), cut(2, ones)}, under(inventory.MIGNone, rule(inventory.MIGSingle, 0), rule(inventory.MIGMixed, 1)), "gpu: 0:0 2; mig-1g.10gb: 1:0; mig-3g.40gb: 1:1", "",
		},
		"the profile of GPUs that are mixed is not the node's": {
			machine{cut(0, "3g.40gb", "3g.40gb"), cut(1, ones)}, under(inventory.MIGSingle, rule(inventory.MIGMixed, 0), rule(inventory.MIGNone, 2)), "mig-3g.40gb: 0:0 0:1; gpu: 1:0 2", "",
		},
		"the profile of GPUs that are kept back is not the node's": {
			machine{cut(0, "3g.40gb", "3g.40gb"), cut(1, ones), cut(2, ones)}, under(inventory.MIGSingle, reserve(0)), "gpu: 1:0 2:0", "0:0 kept; 0:1 kept",
		},
		"GPUs that are kept back are cut, the others are not": {
			machine{cut(0, ones, ones)}, under(inventory.MIGSingle, reserve(0)), "gpu: 1 2", "0:0 kept; 0:1 kept",
		},
		"mixed, and one is bare": {machine{cut(0)}, under(inventory.MIGMixed), "gpu: 1 2", "0 " + bare},
		"the UUID of a GPU does not exclude its instances": { // as in nomad-device-nvidia
			machine{cut(0, ones, "3g.40gb")}, inventory.Config{MIG: inventory.MIGMixed, Exclude: []gpu.DeviceID{coretest.GPU(0), coretest.Instance(0, 1)}},
			"mig-1g.10gb: 0:0; gpu: 1 2", "0:1 ignored by configuration; 0 ignored by configuration",
		},
		"the profile of devices that are excluded is not the node's": {
			machine{cut(0, "3g.40gb", "3g.40gb"), cut(1, ones)},
			inventory.Config{MIG: inventory.MIGSingle, Exclude: []gpu.DeviceID{coretest.Instance(0, 0), coretest.Instance(0, 1)}},
			"gpu: 1:0", "0:0 ignored by configuration; 0:1 ignored by configuration; 2 " + off,
		},
		"the profile of devices that are not included is not the node's": {
			machine{cut(0, "3g.40gb", "3g.40gb"), cut(1, ones)},
			inventory.Config{MIG: inventory.MIGSingle, Policy: inventory.Policy{Include: []inventory.Selector{gpuIndices(1)}}},
			"gpu: 1:0", "0:0 " + notIncluded + "; 0:1 " + notIncluded + "; 2 " + notIncluded,
		},
		"the first rule decides on MIG, too": {
			machine{cut(0, ones)}, under(inventory.MIGNone, inventory.Rule{Select: gpuIndices(0), Pool: "first"}, rule(inventory.MIGMixed, 0)), "first: 0; gpu: 1 2", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := coretest.GPUs(3)
			for _, change := range tc.machine {
				s = change(s)
			}
			expectOffer(t, core.Build(s, health.Ledger{}, core.Config{Config: tc.config}).WithoutHost(), tc.units, tc.refused)
		})
	}
}

// A rule that selects only hidden devices has no effect, unless it sets the strategy.
func TestRulesWithoutEffect(t *testing.T) {
	const unmatched = "p:1: selects no device of this node, or only such as earlier rules select"
	s := coretest.WithMIG(coretest.GPUs(2), 0, "1g.10gb", "1g.10gb")
	ones := inventory.Selector{At: "p:1", Profiles: []string{"1g.*"}}
	big := inventory.Selector{At: "p:1", Memory: inventory.Range{Min: 40 << 30}, Indices: gpuIndices(0).Indices}
	for name, tc := range map[string]struct {
		mig  inventory.MIGStrategy
		rule inventory.Rule
		want string
	}{
		"instances, offered":                  {inventory.MIGMixed, inventory.Rule{Select: ones, Pool: "small"}, ""},
		"instances, not offered":              {inventory.MIGNone, inventory.Rule{Select: ones, Pool: "small"}, unmatched},
		"a GPU that is cut, itself":           {inventory.MIGMixed, inventory.Rule{Select: big, Pool: "big"}, unmatched},
		"a GPU that is cut, and its strategy": {inventory.MIGMixed, inventory.Rule{Select: big, MIG: inventory.MIGMixed}, ""},
		"a GPU that is cut, offered whole":    {inventory.MIGNone, inventory.Rule{Select: big, Pool: "big"}, ""},
		"a GPU with its instances":            {inventory.MIGMixed, inventory.Rule{Select: gpuIndices(0), Pool: "small"}, ""},
		"a GPU that does not fit":             {inventory.MIGSingle, inventory.Rule{Select: gpuIndices(1), Pool: "one"}, ""},
	} {
		cfg := core.DefaultConfig()
		cfg.MIG, cfg.Policy.Rules = tc.mig, []inventory.Rule{tc.rule}
		if got := strings.Join(core.Build(s, health.Ledger{}, cfg).PolicyWarnings(), "; "); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}
