package parity

import (
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
	"github.com/tandem-gpu/tandem/test/incumbent"
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
			differs := v.differs(t, file, machine)
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

// configured is what a file configures for NVIDIA's plugin. What else a section of sharing may have (rename, devices) is parsed and dropped
// with a warning.
func configured(t *testing.T, text []byte) incumbent.Config {
	t.Helper()
	type replicated struct {
		RenameByDefault            bool  `yaml:"renameByDefault"`
		FailRequestsGreaterThanOne *bool `yaml:"failRequestsGreaterThanOne"`
		Resources                  []struct {
			Name     string
			Replicas int
		}
	}
	var file struct {
		Flags struct {
			MIGStrategy string `yaml:"migStrategy"`
		}
		Sharing struct {
			TimeSlicing replicated `yaml:"timeSlicing"`
			MPS         replicated
		}
	}
	must(t, yaml.Unmarshal(text, &file))
	c := incumbent.Config{MIG: file.Flags.MIGStrategy, MPS: len(file.Sharing.MPS.Resources) > 0, Shares: map[string]int{}, Nodes: true}
	sharing := file.Sharing.TimeSlicing
	if c.MPS { // it wins
		sharing = file.Sharing.MPS
	}
	c.Renamed, c.OneShare = sharing.RenameByDefault, sharing.FailRequestsGreaterThanOne != nil && *sharing.FailRequestsGreaterThanOne
	for _, r := range sharing.Resources {
		c.Shares[strings.TrimPrefix(r.Name, "nvidia.com/")] = r.Replicas
	}
	return c
}
