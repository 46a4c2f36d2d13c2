package config

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// blanks are the spellings of a value that is not there.
var blanks = []string{"", " ~", " null", " Null", " # none"}

// nested is a file with one key: "flags.plugin.x" and " ~" are "flags:\n  plugin:\n    x: ~\n".
func nested(key, value string) string {
	var text strings.Builder
	names := strings.Split(key, ".")
	for i, name := range names {
		text.WriteString(strings.Repeat("  ", i) + name + ":")
		if i == len(names)-1 {
			text.WriteString(value)
		}
		text.WriteString("\n")
	}
	return text.String()
}

// sameInBoth checks that two files mean the same to k8s-gpu, and the same to nomad-gpu.
func sameInBoth(t *testing.T, text, other string) {
	t.Helper()
	forKubernetes := func(text string) Kubernetes {
		t.Helper()
		s, err := resolveAll(t, nil, nil, text)
		if err != nil {
			t.Errorf("k8s-gpu refuses %q: %v", text, err)
		}
		delete(s.values, "--"+FlagConfigFile) // each test file has a path of its own
		return s
	}
	forNomad := func(text string) File {
		t.Helper()
		r, err := ParseFile("/c.yaml", []byte(text), policy.Nomad)
		if err != nil {
			t.Errorf("nomad-gpu refuses %q: %v", text, err)
		}
		return r
	}
	k, want := forKubernetes(text), forKubernetes(other)
	if !k.Equal(want) || !maps.Equal(k.values, want.values) || !slices.Equal(k.Notes, want.Notes) {
		t.Errorf("to k8s-gpu %q is %v %q", text, k.Changes(want), k.Notes)
	}
	n, wanted := forNomad(text), forNomad(other)
	if diff := cmp.Diff(wanted.Normalized, n.Normalized); diff != "" || n.MIG != wanted.MIG || n.MPSRoot != wanted.MPSRoot {
		t.Errorf("to nomad-gpu %q is MIG %q, MPS root %q, %s", text, n.MIG, n.MPSRoot, diff)
	}
}

// A key without a value is the default to both agents, as to NVIDIA's plugin: whichever it is, and a whole section too.
func TestBlankKeysAreTheDefaultToBothAgents(t *testing.T) {
	keys := map[string]bool{"version": true, "resources": true, "sharing": true, "policy": true}
	for key := range fileKinds(true) {
		for ; key != "" && !keys[key]; key = key[:max(strings.LastIndex(key, "."), 0)] {
			keys[key] = true
		}
	}
	for _, key := range []string{
		"sharing.timeSlicing", "sharing.timeSlicing.resources", "sharing.timeSlicing.renameByDefault", "sharing.timeSlicing.failRequestsGreaterThanOne",
		"sharing.mps", "sharing.mps.resources", "sharing.mps.renameByDefault", "sharing.mps.failRequestsGreaterThanOne",
		"resources.gpus", "resources.mig", "policy.include", "policy.exclude", "policy.rules",
	} {
		keys[key] = true
	}
	if len(keys) < 50 {
		t.Fatalf("only %d keys", len(keys))
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		for _, blank := range blanks {
			sameInBoth(t, nested(key, blank), "version: v1\n")
		}
	}
}

// Of NVIDIA's keys that both agents read, and of the version, an empty text is the default, as to NVIDIA's plugin.
func TestEmptyTextIsTheDefaultToBothAgents(t *testing.T) {
	for _, key := range []string{"version", "flags.migStrategy", "flags.mpsRoot", "flags.nvidiaDevRoot"} {
		sameInBoth(t, nested(key, ` ""`), "version: v1\n")
	}
}

// Within a rule and a shared resource, too, a key without a value is one that is not there.
func TestBlankKeysWithinLists(t *testing.T) {
	const file = `flags: {mpsRoot: /run/nvidia/mps}
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing: {timeSlicing: {resources: [{name: h100, replicas: 2%s}]}}
policy: {rules: [{select: {index: 0%s}, use: exclusive%s}, {select: {index: 1}, use: mps, replicas: 2%s}, {select: {index: 2}, use: time-slicing, replicas: 2%s}]}
`
	parts := []string{
		", rename: , devices: ", ", uuid: , pci: , model: ~, migProfile: , memory: ",
		", for: , replicas: , failRequestsGreaterThanOne: , memory: , threads: , migStrategy: , name: ",
		", for: , failRequestsGreaterThanOne: ~, memory: , threads: , migStrategy: , name: ",
		", for: , failRequestsGreaterThanOne: , memory: , threads: ~, migStrategy: , name: ",
	}
	text, plain := file, file
	for _, part := range parts {
		text, plain = strings.Replace(text, "%s", part, 1), strings.Replace(plain, "%s", "", 1)
	}
	sameInBoth(t, text, plain)
}

func TestPolicyOfTheFile(t *testing.T) {
	s, err := resolveAll(t, nil, map[string]string{"MPS_ROOT": "/run/nvidia/mps", "SHARED_DEVICES_ALLOCATION_POLICY": "packed"}, `
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing: {timeSlicing: {resources: [{name: h100, replicas: 4}]}}
policy:
  exclude: [{index: 7}]
  rules: [{select: {index: 0}, use: mps, replicas: 2}]
`)
	check.NoError(t, err)
	if p := s.Core.Policy; len(p.Names) != 1 || len(p.Shares) != 1 || len(p.Rules) != 2 || p.Rules[0].NotOffered != "excluded by c.yaml:5" {
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
			sameProblems(t, err, c.want)
		})
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
	check.NoError(t, err)
	for name, c := range map[string]struct{ old, is, want string }{
		"a comment":    {"\nresources", "\n# names\n\nresources", ""},
		"another form": {"index: 0", "index: [0]", ""},
		"a name":       {"name: h100", "name: hopper", "resources"},
		"replicas":     {"replicas: 2", "replicas: 3", "sharing"},
		"an include":   {`model: "*"`, "model: x", "policy.include"},
		"a rule":       {"index: 0", "index: 1", "policy.exclude or policy.rules"},
		"a proof":      {"policy: {", "prove: {command: [/usr/bin/check]}\npolicy: {", "prove"},
		"a reset":      {"policy: {", "reset: {mode: report}\npolicy: {", "reset"},
		"everything":   {was, "flags: {plugin: {sharedDevicesAllocationPolicy: packed}}\n", `flags.plugin.sharedDevicesAllocationPolicy from "distributed" to "packed", resources, sharing, policy.include, policy.exclude or policy.rules`},
	} {
		t.Run(name, func(t *testing.T) {
			after, err := resolveAll(t, nil, nil, strings.Replace(was, c.old, c.is, 1))
			check.NoError(t, err)
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

// The block has precedence over the policy file, and the file over the defaults.
func TestBlockAndPolicyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	check.NoError(t, os.WriteFile(path, []byte("flags: {migStrategy: single, mpsRoot: /file}\n"), 0o600))
	for name, c := range map[string]struct {
		block   map[string]any
		mig     inventory.MIGStrategy
		mpsRoot string
	}{
		"defaults": {map[string]any{}, inventory.MIGMixed, defaultMPSRoot},
		"file":     {map[string]any{"policy_file": path}, inventory.MIGSingle, "/file"},
		"block":    {map[string]any{"policy_file": path, "mig_strategy": "none", "mps_root": "/block/"}, inventory.MIGNone, "/block"},
	} {
		s, f, err := NewBlock(c.block).Read()
		if err != nil || s.Core.MIG != c.mig || s.MPSRoot != c.mpsRoot || (f.Text == "") != (name == "defaults") {
			t.Errorf("%s: %s, %s, %q, %v", name, s.Core.MIG, s.MPSRoot, f.Text, err)
		}
	}
}

// The problems of the block and of the policy file are reported together.
func TestBlockProblems(t *testing.T) {
	block := map[string]any{
		"enabled": "maybe", "ignored_gpu_ids": []any{"GPU-1", "0"}, "driver_root": "run", "policy_file": "/nowhere/policy.yaml",
		"mig_strategy": "double", "group_by": []any{"numa"}, "mps_root": "mps", "xids": []any{"63"}, "recovery_checks": 2.5,
	}
	const want = `enabled = "maybe": want true or false
ignored_gpu_ids = "0": want UUIDs (GPU-... or MIG-...) as nvidia-smi -L prints them
driver_root = "run": want an absolute path such as /
mig_strategy = "double": want none, single or mixed
group_by = "[numa]": want a single value
mps_root = "mps": want an absolute path such as /run/nvidia/mps
xids = "[63]": want a mapping
recovery_checks = "2.5": want a number of 1 or more`
	_, _, err := NewBlock(block).Read()
	sameProblems(t, err, "configuration file: open /nowhere/policy.yaml: no such file or directory\n"+want)
	_, _, err = NewBlock(block).Compile("/c.yaml", []byte("flags: {migStrategy: some}\n"))
	sameProblems(t, err, want+"\n"+`/c.yaml:1: flags.migStrategy = "some": want none, single or mixed`)
}
