package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/policy"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// nomad-gpu knows the keys of a file for k8s-gpu without knowing k8s-gpu.
func TestBothAgentsKnowTheSameKeys(t *testing.T) {
	names := func(keys map[string]configfile.Kind) (all []string) {
		for key := range keys {
			all = append(all, key)
		}
		slices.Sort(all)
		return all
	}
	if diff := cmp.Diff(names(known(options())), names(policy.Keys())); diff != "" {
		t.Error(diff)
	}
}

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
	if p := s.core.Policy; len(p.Names) != 1 || len(p.Shares) != 1 || len(p.Rules) != 2 || p.Rules[0].Reserve != "excluded by c.yaml:5" {
		t.Errorf("%+v", p)
	}
	if !s.core.Packed || s.mpsRoot != "/run/nvidia/mps" || len(s.notes) != 0 {
		t.Errorf("%+v", s)
	}
}

// Each source's problems are said together; MPS is refused where there is no folder for its daemons.
func TestPolicyProblems(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		file string
		want string
	}{
		"a root for MPS": {file: "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n",
			want: `c.yaml:1: sharing.mps.resources[0] = "mps": takes --mps-root, MPS_ROOT or flags.mpsRoot: the folder of the MPS control daemons, such as /run/nvidia/mps`},
		"a root for MPS, of the other agent": {file: "policy: {rules: [{select: {index: 0}, for: nomad, use: mps, replicas: 2}]}\n"},
		"a relative root":                    {args: []string{"--mps-root=mps"}, want: `--mps-root = "mps": want an absolute path`},
		"a policy that nobody knows":         {args: []string{"--shared-devices-allocation-policy=random"}, want: `--shared-devices-allocation-policy = "random": want distributed or packed`},
		"all at once": {args: []string{"--rescan=0s"}, file: "flags: {migStratgy: none}\npolicy: {rules: [{select: {index: a}, use: mps}]}\n",
			want: `c.yaml:1: flags.migStratgy: unknown key: did you mean flags.migStrategy?
c.yaml:2: policy.rules[0].select.index = "a": want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"
c.yaml:2: policy.rules[0].replicas = "": want 2 or more, up to 48 (so many clients fit an MPS server)
--rescan = "0s": want a positive duration such as 30s`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := resolveAll(t, c.args, nil, c.file)
			if diff := cmp.Diff(c.want, errorText(err)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Where this process sees the folder of the MPS daemons is not where the host has it: NVIDIA's chart mounts it.
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
		s := settings{driverRoot: "/", mpsRoot: c.root}
		s.findRoots(func(path string) bool { return slices.Contains(c.folders, path) })
		if s.mpsSeen != c.seen || s.mpsRoot != c.root {
			t.Errorf("%+v: %q, %q", c, s.mpsRoot, s.mpsSeen)
		}
	}
}

// What changed is named; that it is written elsewhere, or otherwise, is no change.
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
			if !after.equal(before) {
				after.said["--"+configFlag] = before.said["--"+configFlag] // the test has many
				got = strings.Join(after.changes(before), ", ")
			}
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "--config-file=" + path
	}
	for name, c := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string // what they end with, without the folder
	}{
		"good":     {[]string{"validate", write("policy: {rules: [{select: {index: 0}, use: reserved}]}\n")}, 0, "MIG strategy: none\nc.yaml:1: policy.rules[0].select: not offered: reserved by c.yaml:1\nno problem\n", ""},
		"notes":    {[]string{"--fail-on-init-error", "validate"}, 0, "--fail-on-init-error has no effect: without a driver this agent waits for one\nMIG strategy: none\nno problem\n", ""},
		"bad":      {[]string{"validate", write("policy: {rules: [{use: reserved}, {select: {index: -}}]}\nsharing: 1\n")}, 1, "", "c.yaml:1: policy.rules[0].select = \"\": want a selector such as {index: 0}, or {model: \"*\"} for every device\nc.yaml:1: policy.rules[1].select.index = \"-\": want the number of a GPU, a range or GPU:instance, up to 255: 0, \"2-4\" or \"0:1\"\nc.yaml:2: sharing = \"1\": want a mapping with timeSlicing or mps\n"},
		"argument": {[]string{"validate", "c.yaml"}, 1, "", "validate: unexpected argument \"c.yaml\": the file is named by --config-file\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr strings.Builder
			cmd := exec.CommandContext(t.Context(), binary(t), c.args...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // the code says it
			said := strings.ReplaceAll(stderr.String(), "k8s-gpu: ", "")
			if _, file, ok := strings.Cut(strings.Join(c.args, " "), "--config-file="); ok {
				said = strings.ReplaceAll(said, filepath.Dir(file)+"/", "")
			}
			if code := cmd.ProcessState.ExitCode(); code != c.code || stdout.String() != c.stdout || said != c.stderr {
				t.Errorf("%d %q %q\nwant %d %q %q", code, stdout.String(), said, c.code, c.stdout, c.stderr)
			}
		})
	}
}

// A changed policy is adopted, and what it leaves as it is is not disturbed; a bad one changes nothing.
func TestReloadChangesShares(t *testing.T) {
	m, k, dir, c := simdriver.Start(t, "h100x8"), startKubelet(t), shortDir(t), newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir="+dir)...)
	a.awaitHealthy(k, 8)
	a.said("msg=registered")
	const shares = header + `policy:
  rules:
    - {select: {index: "0-2"}, use: time-slicing, replicas: 4}
    - {select: {index: 7}, for: nomad}
`
	a.reload(c, shares, adopted+`" changed="policy.exclude or policy.rules`)
	a.awaitHealthy(k, 4)
	const shared = "nvidia.com/gpu.shared"
	if err := k.Await(a.ctx, "shares", func() bool { _, healthy := k.Capacity(shared); return healthy == 12 }); err != nil {
		t.Fatal(err)
	}
	r, err := k.Allocate(a.ctx, shared, m.UUID(0)+"::0", m.UUID(0)+"::3")
	if err != nil || r.GetEnvs()[core.VisibleDevices] != m.UUID(0) {
		t.Errorf("%v, %v", r, err)
	}
	a.reload(c, "# as before\n"+shares, unchanged)
	a.reload(c, strings.Replace(shares, "replicas: 4", "replicas: 1", 1), notReloaded)
	a.said(`level=ERROR msg="configuration not reloaded" problem=".*config.yaml:4: policy.rules\[0\].replicas = .*1.*: want 2 or more`)
	if all, healthy := k.Capacity(shared); all != 12 || healthy != 12 {
		t.Errorf("%d shares, %d of them healthy", all, healthy)
	}
	if n := len(k.Registrations()); n != 2 {
		t.Errorf("%d registrations of two resources", n)
	}
	says(t, dir, "left to nomad by config.yaml:5", "inspect")
	a.endsWith(syscall.SIGTERM, k, dir, false)
}
