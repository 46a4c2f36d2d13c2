package parity

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// examples are files of users of NVIDIA's k8s-device-plugin, the last ones with our sections. Both agents read each of them
// for one machine.
var examples = []struct {
	file, machine string
	prepare       func(*simdriver.Machine) error
	beyond        bool // the incumbent does otherwise: testdata/policies/incumbent.md has the differences and reasons
	ignored       bool // the incumbent ignores a field that counts here: the agents warn of it
	split         bool // nothing is offered to both
}{
	{file: "plain", machine: "h100x8"},
	{file: "time-slicing", machine: "h100x8"},
	{file: "time-slicing-renamed", machine: "h100x8"},
	{file: "time-slicing-one", machine: "h100x8"},
	{file: "mps", machine: "h100x8"},
	{file: "mps-renamed", machine: "h100x8"},
	{file: "mig-none", machine: "a100-mig"},
	{file: "mig-single", machine: "h100x8", prepare: inSevens},
	{file: "mig-mixed", machine: "a100-mig", prepare: noneEmpty},
	{file: "mig-mixed-suffixes", machine: "rtxpro6000"},
	{file: "mig-time-slicing", machine: "a100-mig", prepare: noneEmpty},

	{file: "mig-single-odd", machine: "a100-mig", beyond: true},
	{file: "mig-mixed-empty", machine: "a100-mig", beyond: true},
	{file: "mig-mixed-slice", machine: "a100-mig", beyond: true, prepare: func(m *simdriver.Machine) error {
		return m.SetMIG(7, "1c.3g.40gb")
	}},
	{file: "rename", machine: "h100x8", beyond: true, ignored: true},
	{file: "some-devices", machine: "h100x8", beyond: true, ignored: true},
	{file: "resources", machine: "a100-mig", prepare: noneEmpty, beyond: true, ignored: true},
	{file: "time-slicing-and-mps", machine: "a100-mig", prepare: noneEmpty, beyond: true, ignored: true},

	{file: "rules", machine: "h100x8", beyond: true},
	{file: "mig-per-gpu", machine: "a100-mig", beyond: true},
	{file: "split", machine: "h100x8", beyond: true, split: true},
}

// inSevens cuts every GPU alike, as the strategy single has it.
func inSevens(m *simdriver.Machine) error {
	slots, err := m.Slots()
	for _, slot := range slots {
		if err == nil {
			err = m.SetMIG(slot, slices.Repeat([]string{"1g.10gb"}, 7)...)
		}
	}
	return err
}

// noneEmpty has no GPU in MIG mode without instances, over which the incumbent does not start.
func noneEmpty(m *simdriver.Machine) error { return m.MIGOff(7) }

func TestPolicies(t *testing.T) {
	defects, err := os.ReadFile("testdata/policies/incumbent.md")
	must(t, err)
	for _, c := range examples {
		t.Run(c.file, func(t *testing.T) {
			machine := read(t, c.machine, c.prepare)
			path := filepath.Join("testdata/policies", c.file+".yaml")
			toKubelet, warnings := offer(t, machine, path, policy.Kubernetes)
			toNomad, inNomad := offer(t, machine, path, policy.Nomad)
			if len(warnings) > 0 != c.ignored || !slices.Equal(warnings, inNomad) {
				t.Errorf("ignored by the incumbent: %t, warnings %q and %q", c.ignored, warnings, inNomad)
			}
			v := view(t, toKubelet, toNomad)
			goldenfile.Compare(t, filepath.Join("testdata/policies", c.file+".golden"), v.text())
			if c.split {
				v.haveNothingInCommon(t)
			} else {
				v.meanTheSame(t)
			}
			file, err := os.ReadFile(path)
			must(t, err)
			differs := v.differs(t, file, machine.Devices)
			if listed := strings.Contains(string(defects), "\n## "+c.file+"\n"); listed != c.beyond || c.beyond != (differs != "") {
				t.Errorf("beyond the incumbent: %t, listed: %t, and differs in:\n%s", c.beyond, listed, differs)
			}
		})
	}
}

// read is a reading of a machine that comes with the simulated driver.
func read(t *testing.T, machine string, prepare func(*simdriver.Machine) error) gpu.Snapshot {
	t.Helper()
	m := simdriver.Start(t, machine)
	if prepare != nil {
		must(t, prepare(m))
	}
	return named(t, machine, inprocess.Read(t, m))
}

// named gives MIG instances that were made just now, by chance, IDs that are the same every time.
func named(t *testing.T, machine string, s gpu.Snapshot) gpu.Snapshot {
	t.Helper()
	known, err := simdriver.Text(machine)
	must(t, err)
	for i, d := range s.Devices {
		if !strings.Contains(known, string(d.ID)) {
			s.Devices[i].ID = gpu.DeviceID(fmt.Sprintf("MIG-00000000-0000-4000-8000-%06d%06d", d.Index, d.At.GI))
		}
	}
	return gpu.NewSnapshot(s)
}

// incumbent is what NVIDIA's k8s-device-plugin v0.20.0 makes of a file and a machine, by its own rules: written from
// its sources (internal/rm/device_map.go, internal/rm/rm.go, internal/plugin/server.go and mps.go,
// api/config/v1/config.go) and not from ours. What it leaves to the order of Go's maps is sorted here.
type incumbent struct {
	file struct {
		Flags struct {
			MIGStrategy string `yaml:"migStrategy"`
		}
		Sharing struct {
			TimeSlicing replicated `yaml:"timeSlicing"`
			MPS         replicated
		}
	}
	byID      map[string]gpu.Device
	resources map[string][]string // IDs by resource, sorted
}

// replicated is a section "sharing". What else it may say (rename, devices) is parsed and dropped with a warning.
type replicated struct {
	RenameByDefault            bool  `yaml:"renameByDefault"`
	FailRequestsGreaterThanOne *bool `yaml:"failRequestsGreaterThanOne"`
	Resources                  []struct {
		Name     string
		Replicas int
	}
}

// newIncumbent is an error if the plugin would not start.
func newIncumbent(file []byte, devices []gpu.Device) (*incumbent, error) {
	p := &incumbent{byID: map[string]gpu.Device{}, resources: map[string][]string{}}
	if err := yaml.Unmarshal(file, &p.file); err != nil {
		return nil, err
	}
	plain, err := p.plain(devices)
	if err != nil {
		return nil, err
	}
	for name, ids := range plain {
		of, n := p.sharing(), 1
		for _, r := range of.Resources {
			if domain(r.Name) == name {
				n = r.Replicas
			}
		}
		if n > 1 && of.RenameByDefault {
			name += ".shared"
		}
		for _, id := range ids {
			if n == 1 {
				p.resources[name] = append(p.resources[name], id)
				continue
			}
			for i := range n {
				p.resources[name] = append(p.resources[name], fmt.Sprintf("%s::%d", id, i))
			}
		}
		slices.Sort(p.resources[name])
	}
	return p, nil
}

func domain(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return "nvidia.com/" + name
}

// sharing is what counts: MPS wins over time-slicing.
func (p *incumbent) sharing() replicated {
	if p.mps() {
		return p.file.Sharing.MPS
	}
	return p.file.Sharing.TimeSlicing
}

func (p *incumbent) mps() bool { return len(p.file.Sharing.MPS.Resources) > 0 }

// plain are the devices by resource before any is shared.
func (p *incumbent) plain(devices []gpu.Device) (map[string][]string, error) {
	resources := map[string][]string{}
	strategy := p.file.Flags.MIGStrategy
	profiles, full := map[string]bool{}, false
	for _, d := range devices {
		name := "nvidia.com/gpu"
		switch {
		case d.Profile == "" && d.MIG && strategy != "" && strategy != "none":
			if !slices.ContainsFunc(devices, func(i gpu.Device) bool { return i.Profile != "" && i.At.GPU == d.ID }) {
				return nil, errors.New("at least one device with migEnabled=true was not configured correctly")
			}
			continue
		case d.Profile == "":
			full = true
		case strategy == "mixed":
			if strings.Contains(d.Profile, "c.") {
				return nil, fmt.Errorf("MIG profile '%s' does not match any resource patterns", d.Profile)
			}
			name = "nvidia.com/mig-" + strings.ReplaceAll(d.Profile, "+", ".")
		case strategy == "single":
			profiles[d.Profile] = true
		default:
			continue
		}
		if p.mps() && d.Profile != "" {
			return nil, errors.New("sharing using MPS is not supported for MIG devices")
		}
		p.byID[string(d.ID)] = d
		resources[name] = append(resources[name], string(d.ID))
	}
	if len(profiles) > 1 {
		return nil, errors.New("more than one MIG device type present on node")
	}
	if len(profiles) > 0 && full {
		return nil, errors.New("all devices on the node must be configured with the same migEnabled value")
	}
	return resources, nil
}

// allocate is its answer to an Allocate: environment, mounts, and device nodes as with passDeviceSpecs.
func (p *incumbent) allocate(resource string, ids ...string) (rig.Grant, error) {
	shared := false
	var visible, paths []string
	for _, id := range ids {
		if !slices.Contains(p.resources[resource], id) {
			return rig.Grant{}, fmt.Errorf("invalid allocation request for %q: invalid request: unknown device: %s", resource, id)
		}
		uuid, _, replica := strings.Cut(id, "::")
		shared = shared || replica
		if !slices.Contains(visible, uuid) {
			visible = append(visible, uuid)
		}
		paths = append(paths, nodes(p.byID[uuid])...) // of two replicas of one GPU twice
	}
	one := p.sharing().FailRequestsGreaterThanOne
	if shared && len(ids) > 1 && (p.mps() || one != nil && *one) {
		return rig.Grant{}, fmt.Errorf("invalid allocation request for %q: invalid request: maximum request size for shared resources is 1; found %d", resource, len(ids))
	}
	a := rig.Grant{Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(visible, ",")}, Nodes: paths}
	if p.mps() { // also for a resource that is not shared
		a.Env["CUDA_MPS_PIPE_DIRECTORY"] = "/mps/" + resource + "/pipe"
		a.Mounts = []string{
			"/run/nvidia/mps/" + resource + "/pipe -> /mps/" + resource + "/pipe",
			"/run/nvidia/mps/shm -> /dev/shm",
		}
	}
	return a, nil
}

// nodes are those of a device alone; four more are for every container.
func nodes(d gpu.Device) []string {
	paths := []string{fmt.Sprintf("/dev/nvidia%d", d.Minor)}
	if d.Profile != "" {
		paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.GICap), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.CICap))
	}
	return paths
}
