package docs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceclass"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceconfig"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/nodelabels"
	"github.com/tandem-gpu/tandem/test/docs/names"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// checkedElsewhere are lists that are not compared with the program here, and why.
var checkedElsewhere = map[string]string{
	"k8s-device-plugin-values": "test/chart renders the chart with each",
	"dra-driver-values":        "test/chart renders the chart with each",
	"k8s-device-plugin-names":  "what pods get: test/imported compares resources and answers with a model of NVIDIA's plugin, test/conformance/cdi its CDI files",
	"dra-driver-gates":         "the agents have no feature gates; test/chart: the chart refuses those of NVIDIA's",
}

// programs report for each other list whether the agents have a name, with the same meaning: nil if so.
var programs = map[string]func(*testing.T) func(names.Name) error{
	"nomad-device-nvidia-keys":       nomadKeys,
	"nomad-device-nvidia-attributes": nomadAttributes,
	"nomad-device-nvidia-statistics": nomadStatistics,
	"nomad-device-nvidia-names":      nomadNames,
	"k8s-device-plugin-options":      options,
	"k8s-device-plugin-keys":         fileKeys,
	"config-manager-options":         options,
	"mps-control-daemon-options":     options,
	"gpu-feature-discovery-options":  options,
	"gpu-feature-discovery-labels":   labels,
	"dra-driver-options":             options,
	"dra-driver-attributes":          draAttributes,
	"dra-driver-names":               draNames,
	"dra-driver-parameters":          draParameters,
}

// docs/compatibility.md has for each name of the programs that are replaced whether it is the same here, and that is true.
func TestNamesOfReplacedPrograms(t *testing.T) {
	lists, err := names.Read(root)
	if err != nil {
		t.Error(err)
	}
	for list, all := range lists {
		program, here := programs[list]
		if _, elsewhere := checkedElsewhere[list]; here == elsewhere {
			t.Errorf("%s is in one of programs and checkedElsewhere: %v, %v", list, here, elsewhere)
		}
		if !here {
			continue
		}
		t.Run(list, func(t *testing.T) {
			has := program(t)
			for _, n := range all {
				if err := names.Check(list, n, has(n)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func anyAddress(string) error { return nil }

var errAbsent = errors.New("it is not there")

// among reports whether a name is one of these.
func among(all []string) func(names.Name) error {
	return func(n names.Name) error {
		if !slices.Contains(all, n.Name) {
			return errAbsent
		}
		return nil
	}
}

// options are the flags of k8s-gpu that have an effect, and the environment variables that it reads.
func options(t *testing.T) func(names.Name) error {
	t.Helper()
	var all []string
	lookup := func(name string) (string, bool) {
		all = append(all, name)
		return "", false
	}
	_, err := config.ReadKubernetes(config.NewFlags(config.KubernetesSpecs()), config.Environment{LookupEnv: lookup, CheckAddress: anyAddress})
	must(t, err)
	for _, s := range config.KubernetesSpecs() {
		for _, flag := range append([]string{s.Flag}, s.Aliases...) {
			if flag != "" && !s.Hidden {
				all = append(all, "--"+flag)
			}
		}
	}
	return among(all)
}

// fileKeys tries a configuration file that has the key: it is accepted without a remark, and changes the settings.
func fileKeys(t *testing.T) func(names.Name) error {
	t.Helper()
	read := func(file string) (config.Kubernetes, error) {
		flags := config.NewFlags(config.KubernetesSpecs())
		must(t, flags[config.FlagConfigFile].Set("/etc/tandem/policy.yaml"))
		return config.ReadKubernetes(flags, config.Environment{
			CheckAddress: anyAddress,
			ReadFile:     func(string) ([]byte, error) { return []byte(file), nil },
			LookupEnv: func(name string) (string, bool) {
				if name == "MPS_ROOT" && strings.Contains(file, "mps:") {
					return "/run/nvidia/mps", true
				}
				return "", false
			},
		})
	}
	without, err := read("")
	must(t, err)
	return func(n names.Name) error {
		switch with, err := read(n.Detail); {
		case err != nil:
			return err
		case len(with.Notes) > 0:
			return errors.New(strings.Join(with.Notes, "; "))
		case n.Name != "version" && with.Equal(without):
			return errors.New("it changes nothing")
		}
		return nil
	}
}

func nomadKeys(*testing.T) func(names.Name) error { return among(config.NomadKeys()) }

// served is a simulated machine that Nomad has a fingerprint of.
func served(t *testing.T) *inprocess.Rig {
	t.Helper()
	r := inprocess.Start(t, simdriver.Start(t, "h100x8"))
	r.AwaitOnly("all healthy", r.Units())
	return r
}

// nomadAttributes are those of the groups of a simulated machine, with their units.
func nomadAttributes(t *testing.T) func(names.Name) error {
	t.Helper()
	units := map[string]string{}
	for _, g := range served(t).Nomad.Groups() {
		for name, a := range g.Attributes {
			units[name] = a.Unit
		}
	}
	return withUnits(units)
}

// nomadStatistics are those of the devices of a simulated machine, with their units.
func nomadStatistics(t *testing.T) func(names.Name) error {
	t.Helper()
	r := served(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must(t, r.Nomad.FollowStatistics(ctx, time.Second))
	units := map[string]string{}
	for _, g := range r.Nomad.NextStatistics(ctx) {
		for _, d := range g.InstanceStats {
			for name, v := range d.Stats.Attributes {
				units[name] = v.Unit
			}
		}
	}
	return withUnits(units)
}

func withUnits(units map[string]string) func(names.Name) error {
	return func(n names.Name) error {
		switch unit, ok := units[n.Name]; {
		case !ok:
			return errAbsent
		case unit != n.Detail:
			return fmt.Errorf("its unit is %q, want %q", unit, n.Detail)
		}
		return nil
	}
}

// nomadNames are the plugin's name, the type of its groups, and the variables of a task.
func nomadNames(t *testing.T) func(names.Name) error {
	t.Helper()
	src := coretest.NewSource()
	s := core.NewState(core.DefaultConfig()).Read(core.DefaultConfig(), time.Now(), coretest.GPUs(1))
	src.Set(s.Allocatable)
	info, err := inprocess.Nomad(t.Context(), t, src).PluginInfo()
	must(t, err)
	all := []string{info.Name}
	r := served(t)
	for _, g := range r.Nomad.Groups() {
		all = append(all, g.Vendor+"/"+g.Type)
	}
	task, err := r.Nomad.Reserve(r.Units()[0])
	must(t, err)
	return among(slices.AppendSeq(all, maps.Keys(task.Env)))
}

// labels are those of machines with and without MIG, a clique over nodes, and a virtual GPU, that are written to a file.
func labels(t *testing.T) func(names.Name) error {
	t.Helper()
	clique := health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked, Sample: health.Sample{Clique: "cluster.1"}}
	virtual := nodelabels.Host{VGPUKnown: true, VGPU: true, HostDriver: "580.65.06", HostBranch: "r580_00"}
	whole := nodelabels.Of(core.NewState(core.DefaultConfig()).Read(core.DefaultConfig(), time.Now(), coretest.GPUs(1), clique), inventory.MIGNone, virtual)
	var file strings.Builder
	file.Write(whole.Text())
	for strategy, machine := range map[inventory.MIGStrategy]string{inventory.MIGSingle: "a100x16-mig", inventory.MIGMixed: "a100-mig"} {
		cfg := core.DefaultConfig()
		cfg.MIG = strategy
		s := core.NewState(cfg).Read(cfg, time.Now(), snapshotOf(t, machine))
		file.Write(nodelabels.Of(s, strategy, nodelabels.Host{}).Text())
	}
	profile := regexp.MustCompile(`^nvidia\.com/mig-\d+g\.\d+gb\.`)
	var all []string
	for line := range strings.Lines(file.String()) {
		name, _, _ := strings.Cut(line, "=")
		all = append(all, profile.ReplaceAllString(name, "nvidia.com/mig-<profile>."))
	}
	return among(all)
}

// snapshotOf reads a simulated machine.
func snapshotOf(t *testing.T, machine string) (s gpu.Snapshot) {
	t.Helper()
	t.Run(machine, func(t *testing.T) { s = inprocess.Read(t, simdriver.Start(t, machine)) }) // a process has one machine at a time
	return s
}

// draAttributes are the attributes and capacities of the devices of a simulated machine, shared and not.
func draAttributes(t *testing.T) func(names.Name) error {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.API, cfg.MIG = inventory.DRA, inventory.MIGMixed
	machine := snapshotOf(t, "a100-mig")
	shared := cfg
	shared.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
	number := regexp.MustCompile(`^(memorySlice|partition)\d+$`)
	var all []string
	for _, c := range []core.Config{cfg, shared} {
		s := core.NewState(c).Read(c, time.Now(), machine)
		for _, d := range resourceslice.Devices(resourceslice.Input{Allocatable: s.Allocatable}) {
			all = slices.AppendSeq(all, maps.Keys(d.Attributes))
			for capacity := range d.Capacity {
				all = append(all, number.ReplaceAllString(capacity, "$1<n>"))
			}
		}
	}
	return among(all)
}

// draNames are the driver, the classes and their extended resources, and the taints of docs/dra.md, whose table is generated.
func draNames(t *testing.T) func(names.Name) error {
	t.Helper()
	classes, err := deviceclass.Of([]deviceclass.Configuration{{MIG: inventory.MIGNone}}, deviceclass.Options{ExtendedResources: true})
	must(t, err)
	all := []string{resourceslice.Driver}
	for _, c := range classes {
		all = append(all, c.Name, c.ExtendedResource)
	}
	text, err := os.ReadFile(root + "/docs/dra.md")
	must(t, err)
	for _, m := range regexp.MustCompile("(?m)^\\| `(gpu\\.nvidia\\.com/[a-z-]+)").FindAllSubmatch(text, -1) {
		all = append(all, string(m[1]))
	}
	return among(all)
}

// draParameters tries parameters of a claim, on devices whose policy does what they ask for.
func draParameters(t *testing.T) func(names.Name) error {
	t.Helper()
	return func(n names.Name) error {
		var fields map[string]any
		must(t, yaml.Unmarshal([]byte(n.Detail), &fields))
		fields["apiVersion"] = deviceconfig.APIVersion
		text, err := json.Marshal(fields)
		must(t, err)
		configs, err := deviceconfig.Parse([]kubeapi.DeviceAllocationConfiguration{{
			Source: "FromClaim", Opaque: &kubeapi.OpaqueConfiguration{Driver: resourceslice.Driver, Parameters: text},
		}}, resourceslice.Driver)
		if err != nil {
			return err
		}
		u := inventory.Unit{Device: gpu.Device{ID: coretest.GPU(0)}}
		if fields["kind"] == string(deviceconfig.MIG) {
			u.Device.Profile = "1g.10gb"
		}
		if strings.Contains(n.Detail, "strategy: MPS") {
			u.Sharing = inventory.Sharing{Mode: inventory.MPS, Replicas: 4}
		}
		_, err = configs.For("gpu", u)
		return err
	}
}
