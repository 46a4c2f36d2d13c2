package policy_test

import (
	gocmp "cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// read reads a file with this text.
func read(text string, to policy.Orchestrator) (config.File, error) {
	return config.ParseFile("/c.yaml", []byte(text), to)
}

// configOf is the configuration of an agent with a file.
func configOf(r config.File) core.Config {
	c := core.DefaultConfig()
	c.Policy, c.MIG = r.Policy, gocmp.Or(r.MIG, c.MIG)
	return c
}

// machine has eight H100s. GPU 6 is cut into instances of three profiles.
var machine = coretest.WithMIG(coretest.GPUs(8), 6, "1g.10gb", "1g.10gb+me", "3g.40gb")

// offered is what a machine offers, a line for each pool: its units, their devices by index, and how they are shared.
func offered(c core.Config, s gpu.Snapshot) []string {
	type pool struct {
		units   int
		devices []string
		sharing inventory.Sharing
	}
	pools := map[string]*pool{}
	var names []string
	for u := range core.Build(s, health.Ledger{}, c).Units() {
		p := pools[u.Pool]
		if p == nil {
			p = &pool{sharing: u.Sharing}
			pools[u.Pool], names = p, append(names, u.Pool)
		}
		p.units++
		device := fmt.Sprint(u.Device.Index)
		if u.Device.Profile != "" {
			device += fmt.Sprintf(":%d", u.Device.Instance)
		}
		if !slices.Contains(p.devices, device) {
			p.devices = append(p.devices, device)
		}
	}
	slices.Sort(names)
	var lines []string
	for _, name := range names {
		p := pools[name]
		line := fmt.Sprintf("%s: %d of %s, %s", name, p.units, strings.Join(p.devices, " "), p.sharing)
		if p.sharing.OnePerRequest {
			line += ", one a request"
		}
		if p.sharing.Memory > 0 || p.sharing.Threads > 0 {
			line += fmt.Sprintf(", %d MiB, %d%%", p.sharing.Memory>>20, p.sharing.Threads)
		}
		lines = append(lines, line)
	}
	return lines
}

// What a file offers on the machine.
func TestOffers(t *testing.T) {
	for name, tc := range offers {
		t.Run(name, func(t *testing.T) {
			r, err := read(tc.file, policy.Kubernetes)
			check.NoError(t, err)
			c := configOf(r)
			if diff := cmp.Diff(tc.want, offered(c, machine)); diff != "" {
				t.Error(diff)
			}
			if warnings := core.Build(machine, health.Ledger{}, c).PolicyWarnings(); len(warnings) != tc.warnings {
				t.Errorf("warnings: %v", warnings)
			}
		})
	}
}

const header = "version: v1\nflags: {migStrategy: mixed}\npolicy:\n"

var offers = map[string]struct {
	file     string
	want     []string
	warnings int
}{
	"empty file": {"", []string{"gpu: 8 of 0 1 2 3 4 5 6 7, exclusive"}, 0},
	"the example of the documentation": {`
flags: {mpsRoot: /run/nvidia/mps}
policy:
  rules:
    - select: {index: 7}
      use: reserved
    - select: {index: "2-4"}
      use: time-slicing
      replicas: 4
    - select: {index: [5, 6]}
      use: mps
      replicas: 2
      memory: 30GiB
`, []string{
		"gpu: 2 of 0 1, exclusive",
		"gpu.mps: 4 of 5 6, mps by 2, one a request, 30720 MiB, 0%",
		"gpu.shared: 12 of 2 3 4, time-slicing by 4",
	}, 0},
	"include and exclude": {header + `
  include: [{index: "4-7"}, {uuid: GPU-00000000-0000-4000-8000-000000000001}]
  exclude: [{index: 5}, {migProfile: "3g.*"}]
`, []string{"gpu: 3 of 1 4 7, exclusive", "mig-1g.10gb: 1 of 6:0, exclusive", "mig-1g.10gb.me: 1 of 6:1, exclusive"}, 0},
	"each way to select": {header + `
  rules:
    - {select: {uuid: GPU-00000000-0000-4000-8000-000000000000}, name: uuid}
    - {select: {pci: ["11:00.0", "00000000:12:00.0"]}, name: pci}
    - {select: {index: 3}, name: index}
    - {select: {index: "6:1"}, name: instance}
    - {select: {migProfile: "3g.*"}, name: profile}
    - {select: {memory: {max: 40GiB}}, name: small}
    - {select: {model: "*A100*"}, name: none}
    - {select: {model: "*H100*", memory: {min: 79.5GiB}}, name: large}
`, []string{
		"index: 1 of 3, exclusive", "instance: 1 of 6:1, exclusive", "large: 3 of 4 5 7, exclusive", "pci: 2 of 1 2, exclusive",
		"profile: 1 of 6:2, exclusive", "small: 1 of 6:0, exclusive", "uuid: 1 of 0, exclusive",
	}, 1},
	"MIG by GPU": {`
policy:
  rules:
    - {select: {index: 6}, migStrategy: single}
`, []string{"gpu: 8 of 0 1 2 3 4 5 6:0 7, exclusive"}, 0},
	"the other's are left alone": {header + `
  rules:
    - {select: {index: "0-3"}, for: nomad}
    - {select: {index: 4}, for: kubernetes, use: time-slicing, replicas: 3, failRequestsGreaterThanOne: true}
`, []string{
		"gpu: 2 of 5 7, exclusive", "gpu.shared: 3 of 4, time-slicing by 3, one a request",
		"mig-1g.10gb: 1 of 6:0, exclusive", "mig-1g.10gb.me: 1 of 6:1, exclusive", "mig-3g.40gb: 1 of 6:2, exclusive",
	}, 0},
	"MPS is not of instances": {header + `
  rules:
    - {select: {index: "4-6"}, use: mps, replicas: 2, threads: 50}
`, []string{
		"gpu: 5 of 0 1 2 3 7, exclusive", "gpu.mps: 4 of 4 5, mps by 2, one a request, 0 MiB, 50%",
		"mig-1g.10gb: 1 of 6:0, exclusive", "mig-1g.10gb.me: 1 of 6:1, exclusive", "mig-3g.40gb: 1 of 6:2, exclusive",
	}, 0},
	"names by model and profile": {`
flags: {migStrategy: mixed}
resources:
  gpus: [{pattern: "*A100*", name: a100}, {pattern: "*", name: nvidia.com/h100}]
  mig: [{pattern: "1g.*", name: small}]
`, []string{"h100: 7 of 0 1 2 3 4 5 7, exclusive", "mig-3g.40gb: 1 of 6:2, exclusive", "small: 2 of 6:0 6:1, exclusive"}, 1},
	"some devices": {`
sharing:
  timeSlicing:
    resources: [{name: gpu, replicas: 3, rename: some, devices: [0, GPU-00000000-0000-4000-8000-000000000004]}]
  mps:
    resources: [{name: other, replicas: 2, rename: first, devices: 1}]
policy:
  rules: [{select: {index: "2-3"}, name: other}]
`, []string{
		"first: 2 of 2, mps by 2, one a request", "gpu: 4 of 1 5 6 7, exclusive",
		"other: 1 of 3, exclusive", "some: 6 of 0 4, time-slicing by 3",
	}, 0},
	"exclusive in spite of sharing": {`
sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}
policy: {rules: [{select: {index: 0}, use: exclusive}]}
`, []string{"gpu: 1 of 0, exclusive", "gpu.shared: 14 of 1 2 3 4 5 6 7, time-slicing by 2"}, 0},
	"aliases and merge keys": {header + `
  rules:
    - &first {select: {index: &i [0]}, use: time-slicing, replicas: 2}
    - {<<: *first, select: {index: 1}, name: other}
`, []string{
		"gpu: 5 of 2 3 4 5 7, exclusive", "gpu.shared: 2 of 0, time-slicing by 2",
		"mig-1g.10gb: 1 of 6:0, exclusive", "mig-1g.10gb.me: 1 of 6:1, exclusive", "mig-3g.40gb: 1 of 6:2, exclusive",
		"other: 2 of 1, time-slicing by 2",
	}, 0},
}

// Reasons and warnings of a running agent have the file and the line, not the folder: two agents may read one file under
// two paths.
func TestPlaces(t *testing.T) {
	file := header + `
  exclude: [{index: 0}]
  rules:
    - {select: {index: 1}, for: nomad}
    - {select: {index: 2}, use: reserved}
    - {select: {index: 77}, use: exclusive}
sharing: {timeSlicing: {resources: [{name: mig-7g.80gb, replicas: 2}]}}
`
	r, err := read(file, policy.Kubernetes)
	check.NoError(t, err)
	inv := core.Build(machine, health.Ledger{}, configOf(r)).WithoutHost()
	var reasons []string
	for _, e := range inv.Excluded() {
		reasons = append(reasons, e.Reason)
	}
	want := []string{"excluded by c.yaml:5", "left to nomad by c.yaml:7", "reserved by c.yaml:8"}
	if diff := cmp.Diff(want, reasons); diff != "" {
		t.Error(diff)
	}
	want = []string{
		"c.yaml:9: policy.rules[2].select: selects no device of this node, or only such as earlier rules select",
		"c.yaml:10: sharing.timeSlicing.resources[0]: there is no mig-7g.80gb on this node to share",
	}
	if diff := cmp.Diff(want, inv.PolicyWarnings()); diff != "" {
		t.Error(diff)
	}
	moved, err := read("# a line more\n"+file, policy.Kubernetes)
	if err != nil || cmp.Diff(moved.Policy, r.Policy) == "" || cmp.Diff(moved.Normalized, r.Normalized) != "" {
		t.Errorf("%v\n%+v\n%+v", err, moved, r)
	}
}

// Both agents read one file: a rule for one of them reserves its devices from the other, and flags of Kubernetes must have
// known names for the agent of Nomad, but any value.
func TestOneFileForBoth(t *testing.T) {
	file := `
version: v1
flags:
  migStrategy: single
  mpsRoot: /run/nvidia/mps
  gdsEnabled: [nonsense]
  plugin: {deviceListStrategy: [cdi-cri], sharedDevicesAllocationPolicy: packed}
  gfd: {anything: {at: all}}
imex: {required: true}
health: {recoveryDwell: soon}
policy:
  rules:
    - {select: {index: 0}, for: nomad, use: mps, replicas: 2}
    - {select: {index: 1}, for: kubernetes}
`
	n, err := read(file, policy.Nomad)
	check.NoError(t, err)
	if n.MIG != inventory.MIGSingle || n.MPSRoot != "/run/nvidia/mps" || !strings.HasSuffix(n.MPS, "/c.yaml:13: policy.rules[0].use") {
		t.Errorf("%+v", n)
	}
	k, err := read(file, policy.Kubernetes)
	if err != nil || k.MPS != "" {
		t.Errorf("%+v, %v", k, err)
	}
	reserve := func(r config.File) string { return r.Policy.Rules[0].NotOffered + "|" + r.Policy.Rules[1].NotOffered }
	if got := reserve(n) + " " + reserve(k); got != "|left to kubernetes by c.yaml:14 left to nomad by c.yaml:13|" {
		t.Error(got)
	}
	_, err = read("flags: {migStratgy: none, migStrategy: some, mpsRoot: mps, plugin: {pass: true}}\nhealth: {dwell: 1m}\n", policy.Nomad)
	want := `/c.yaml:1: flags.migStratgy = "none": unknown key: did you mean migStrategy?
/c.yaml:1: flags.plugin.pass = "true": unknown key: did you mean passDeviceSpecs?
/c.yaml:2: health.dwell = "1m": unknown key: did you mean recoveryDwell?
/c.yaml:1: flags.migStrategy = "some": want none, single or mixed
/c.yaml:1: flags.mpsRoot = "mps": want an absolute path such as /run/nvidia/mps`
	if err == nil || cmp.Diff(want, err.Error()) != "" {
		t.Errorf("%v", err)
	}
}

// How tasks get the devices of a rule: the agent of Nomad reads it, and for that of Kubernetes it has no effect.
func TestInjection(t *testing.T) {
	for text, want := range map[string]inventory.Injection{
		"variables":                 {Name: "variables", Runtime: true, Nodes: true},
		"devices":                   {Name: "devices", Nodes: true},
		"[libraries, devices]":      {Name: "devices, libraries", Nodes: true, Libraries: true},
		"[cdi]":                     {Name: "cdi", CDI: inventory.CDIRequired},
		"[cdi, variables]":          {Name: "variables, cdi", Runtime: true, Nodes: true, CDI: inventory.CDIRequired},
		"[libraries, cdi, devices]": {Name: "devices, cdi, libraries", Nodes: true, CDI: inventory.CDIRequired, Libraries: true},
	} {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			r, err := read("policy: {rules: [{select: {index: 0}, injection: "+text+"}]}\n", to)
			if err != nil {
				t.Errorf("%s: %v", text, err)
				continue
			}
			switch rule := r.Policy.Rules[0]; {
			case to == policy.Kubernetes && rule.Injection != nil:
				t.Errorf("%s: %+v under Kubernetes", text, *rule.Injection)
			case to == policy.Nomad:
				if diff := cmp.Diff(&want, rule.Injection); diff != "" {
					t.Errorf("%s: %s", text, diff)
				}
			}
		}
	}
}
