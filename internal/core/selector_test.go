package core_test

import (
	"slices"
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

// FuzzPatterns compares the matcher with the definition: * matches any text.
func FuzzPatterns(f *testing.F) {
	f.Add("a*b*c", "axbxc")
	f.Add("*", "")
	f.Add("ab*ba", "aba")
	var fits func(pattern, s string) bool
	fits = func(pattern, s string) bool {
		head, rest, wild := strings.Cut(pattern, "*")
		if !wild {
			return pattern == s
		}
		return strings.HasPrefix(s, head) && slices.ContainsFunc(suffixes(s[len(head):]), func(tail string) bool { return fits(rest, tail) })
	}
	f.Fuzz(func(t *testing.T, pattern, s string) {
		if len(pattern) > 12 || len(s) > 12 || strings.Contains(s, " MIG ") {
			return // the definition is slow
		}
		if got := (&core.Selector{Models: []string{pattern}}).Selects(&core.Device{Model: s}, core.DeviceIndex{}); got != fits(pattern, s) {
			t.Errorf("%q fits %q: %t", s, pattern, got)
		}
	})
}

func suffixes(s string) (all []string) {
	for i := range len(s) + 1 {
		all = append(all, s[i:])
	}
	return all
}
