package config

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPolicyOfTheFile(t *testing.T) {
	s, err := resolveAll(t, nil, map[string]string{"MPS_ROOT": "/run/nvidia/mps", "SHARED_DEVICES_ALLOCATION_POLICY": "packed"}, `
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing: {timeSlicing: {resources: [{name: h100, replicas: 4}]}}
policy:
  exclude: [{index: 7}]
  rules: [{select: {index: 0}, use: mps, replicas: 2}]
`)
	if err != nil {
		t.Fatal(err)
	}
	if p := s.Core.Policy; len(p.Names) != 1 || len(p.Shares) != 1 || len(p.Rules) != 2 || p.Rules[0].Reserve != "excluded by c.yaml:5" {
		t.Errorf("%+v", p)
	}
	if !s.Core.Packed || s.MPSRoot != "/run/nvidia/mps" || len(s.Notes) != 0 {
		t.Errorf("%+v", s)
	}
}

// The problems of all sources are reported together; MPS without a folder of control daemons is refused.
func TestPolicyProblems(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		file string
		want string
	}{
		"a root for MPS": {file: "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n",
			want: `c.yaml:1: sharing.mps.resources[0] = "mps": takes --mps-root, MPS_ROOT or flags.mpsRoot: the folder of the MPS control daemons, such as /run/nvidia/mps`},
		"a root for MPS, of the other agent": {file: "policy: {rules: [{select: {index: 0}, for: nomad, use: mps, replicas: 2}]}\n"},
		"a relative root":                    {args: []string{"--mps-root=mps"}, want: `--mps-root = "mps": want an absolute path such as /run/nvidia/mps`},
		"an unknown allocation policy":       {args: []string{"--shared-devices-allocation-policy=random"}, want: `--shared-devices-allocation-policy = "random": want distributed or packed`},
		"all at once": {args: []string{"--rescan=0s"}, file: "flags: {migStratgy: none}\npolicy: {rules: [{select: {index: a}, use: mps}]}\n",
			want: `c.yaml:1: flags.migStratgy = "none": unknown key: did you mean migStrategy?
c.yaml:2: policy.rules[0].select.index = "a": want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"
c.yaml:2: policy.rules[0].replicas = "": want 2 or more, up to 48 (so many clients fit an MPS server)
--rescan = "0s": want a positive duration such as 30s or 1m`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := resolveAll(t, c.args, nil, c.file)
			if diff := cmp.Diff(c.want, errorText(err)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// NVIDIA's chart mounts the folder of the MPS daemons at another path than that of the host.
func TestMPSRoots(t *testing.T) {
	for _, c := range []struct {
		root    string
		folders []string
		seen    string
	}{
		{"", []string{"/mps"}, ""},
		{"/run/nvidia/mps", nil, "/run/nvidia/mps"},
		{"/run/nvidia/mps", []string{"/mps"}, "/mps"},
	} {
		s := Kubernetes{DriverRoot: "/", MPSRoot: c.root}
		s.findRoots(func(path string) bool { return slices.Contains(c.folders, path) })
		if s.MPSMount != c.seen || s.MPSRoot != c.root {
			t.Errorf("%+v: %q, %q", c, s.MPSRoot, s.MPSMount)
		}
	}
}

// Changes names what changed; another line or spelling is no change.
func TestPolicyChanges(t *testing.T) {
	const was = `
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}
policy: {include: [{model: "*"}], rules: [{select: {index: 0}, use: reserved}]}
`
	before, err := resolveAll(t, nil, nil, was)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ old, is, want string }{
		"a comment":    {"\nresources", "\n# names\n\nresources", ""},
		"another form": {"index: 0", "index: [0]", ""},
		"a name":       {"name: h100", "name: hopper", "resources"},
		"replicas":     {"replicas: 2", "replicas: 3", "sharing"},
		"an include":   {`model: "*"`, "model: x", "policy.include"},
		"a rule":       {"index: 0", "index: 1", "policy.exclude or policy.rules"},
		"everything":   {was, "flags: {plugin: {sharedDevicesAllocationPolicy: packed}}\n", `flags.plugin.sharedDevicesAllocationPolicy from "distributed" to "packed", resources, sharing, policy.include, policy.exclude or policy.rules`},
	} {
		t.Run(name, func(t *testing.T) {
			after, err := resolveAll(t, nil, nil, strings.Replace(was, c.old, c.is, 1))
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if !after.Equal(before) {
				after.values["--"+FlagConfigFile] = before.values["--"+FlagConfigFile] // the test has many
				got = strings.Join(after.Changes(before), ", ")
			}
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}
