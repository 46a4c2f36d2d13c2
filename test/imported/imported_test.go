package imported

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	imports "github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/incumbent"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const examples = "../../internal/cli/importer/nvidia/testdata/examples"

// On machines with full GPUs, with IMEX channels, with MIG instances of several profiles, and with instances of one profile, each imported example offers the
// same device IDs under the same resources as the original does with NVIDIA's plugin, and answers requests for one unit, two and all in
// the same way. The golden file has the differences; each has its reason in docs/migration.md.
func TestSameAnswers(t *testing.T) {
	files, err := os.ReadDir(examples)
	if err != nil || len(files) < 29 {
		t.Fatal(len(files), err)
	}
	snapshots := map[string]gpu.Snapshot{"h100x8": readMachine(t, "h100x8"), "a100-mig": readMachine(t, "a100-mig", noneEmpty), "all-1g.10gb": uniform(t), "gb200": readMachine(t, "gb200")}
	var differences strings.Builder
	compared, seen := 0, map[string]bool{}
	for _, f := range files {
		r, err := importExample(f.Name())
		if err != nil {
			fmt.Fprintf(&differences, "%s: not imported: %v\n", f.Name(), strings.Split(err.Error(), "\n")[0])
			continue
		}
		for _, file := range r.Files {
			name := f.Name()
			if len(r.Files) > 1 || configures(name+" "+file.Name) {
				name = strings.TrimSpace(name + " " + file.Name)
			}
			seen[name] = true
			for _, machine := range slices.Sorted(maps.Keys(snapshots)) {
				c := comparison{t, name, machine, snapshots[machine], originals[name], &differences}
				compared += c.compare(file)
			}
		}
	}
	for name := range originals {
		if !seen[name] {
			t.Errorf("%s is no example", name)
		}
	}
	if compared < 200 {
		t.Errorf("%d answers compared", compared)
	}
	goldenfile.Compare(t, "testdata/differences.golden", differences.String())
}

func configures(name string) bool { _, ok := originals[name]; return ok }

func importExample(name string) (importer.Result, error) {
	text, err := os.ReadFile(filepath.Join(examples, name))
	if err != nil {
		return importer.Result{}, err
	}
	return imports.Import(imports.Input{Path: name, Text: text})
}

// comparison is one configuration on one machine.
type comparison struct {
	*testing.T
	name, machine string
	snapshot      gpu.Snapshot
	original      incumbent.Config
	differences   *strings.Builder
}

func (c comparison) differ(format string, args ...any) {
	fmt.Fprintf(c.differences, "%s on %s: %s\n", c.name, c.machine, fmt.Sprintf(format, args...))
}

// compare returns the number of answers that were compared.
func (c comparison) compare(file importer.File) (compared int) {
	flags := config.NewFlags(config.KubernetesSpecs())
	_ = flags[config.FlagConfigFile].Set("imported.yaml")
	s, err := config.ReadKubernetes(flags, config.Environment{
		LookupEnv: func(string) (string, bool) { return "", false }, CheckAddress: func(string) error { return nil },
		ReadFile: func(string) ([]byte, error) { return file.Text, nil },
	})
	if err != nil {
		c.Errorf("%s: %v", c.name, err)
		return 0
	}
	host := inventory.Host{CDI: definesAll(c.snapshot), MPS: []string{"gpu", "gpu.shared"}}
	inv := core.Build(c.snapshot, health.Ledger{}, s.Core).WithHost(host, s.Core.Overlap)
	here := map[string][]string{}
	for u := range inv.Units() {
		resource := strings.TrimPrefix(kubeadapter.ResourceOf(u), "nvidia.com/")
		here[resource] = append(here[resource], string(u.ID))
	}
	original, err := incumbent.New(c.original, c.snapshot)
	if err != nil {
		c.differ("NVIDIA's plugin ends: %v; here %s", err, counts(here))
		return 0
	}
	there := original.Resources
	for _, list := range here {
		slices.Sort(list)
	}
	if diff := cmp.Diff(there, here); diff != "" {
		c.differ("there %s; here %s", counts(there), counts(here))
	}
	for _, resource := range slices.Sorted(maps.Keys(there)) {
		if !slices.Equal(there[resource], here[resource]) {
			continue
		}
		for _, n := range slices.Compact([]int{1, min(2, len(there[resource])), len(there[resource])}) {
			units := there[resource][:n]
			want, got := answer(original, c.snapshot, resource, units), c.answer(inv, s, resource, units)
			if !slices.Equal(want, got) {
				c.differ("%d of %s: %s", n, resource, strings.Join(strings.Fields(cmp.Diff(want, got)), " "))
			}
			compared++
		}
	}
	return compared
}

// answer is the response of k8s-gpu, in the form of that of NVIDIA's plugin.
func (c comparison) answer(inv *inventory.Allocatable, s config.Kubernetes, resource string, units []string) (lines []string) {
	r, err := deviceplugin.Answer(inv, "nvidia.com/"+resource, units, deviceplugin.Options{
		DevRoot: s.DevRoot, MPSRoot: s.MPSRoot, Lists: deviceplugin.DeviceLists{
			EnvVar: s.Strategies.EnvVar, VolumeMounts: s.Strategies.VolumeMounts, CDIAnnotations: s.Strategies.CDIAnnotations, CDINames: s.Strategies.CDICRI,
		},
	})
	if err != nil {
		return []string{"error"}
	}
	return render(r)
}

func render(r *v1beta1.ContainerAllocateResponse) (lines []string) {
	for name, value := range r.GetEnvs() {
		lines = append(lines, "env "+name+"="+sorted(value))
	}
	for _, m := range r.GetMounts() {
		lines = append(lines, "mount "+m.GetHostPath()+" -> "+m.GetContainerPath())
	}
	for _, names := range r.GetAnnotations() {
		for name := range strings.SplitSeq(names, ",") {
			lines = append(lines, "CDI "+name)
		}
	}
	for _, d := range r.GetDevices() {
		lines = append(lines, "node "+d.GetContainerPath()+" "+d.GetPermissions())
	}
	slices.Sort(lines)
	return lines
}

// sorted is a list in a variable, whose order has no meaning.
func sorted(list string) string { return strings.Join(slices.Sorted(strings.SplitSeq(list, ",")), ",") }

func counts(ids map[string][]string) string {
	var parts []string
	for _, resource := range slices.Sorted(maps.Keys(ids)) {
		parts = append(parts, fmt.Sprintf("%s=%d", resource, len(ids[resource])))
	}
	return strings.Join(parts, " ")
}

func definesAll(s gpu.Snapshot) *inventory.CDI {
	c := &inventory.CDI{Kind: "k8s.device-plugin.nvidia.com/gpu", Usable: true, Reason: "hooks found"}
	for _, d := range s.Devices {
		c.Defined = append(c.Defined, d.ID)
	}
	slices.Sort(c.Defined)
	return c
}

func readMachine(t *testing.T, name string, change ...func(*simdriver.Machine) error) gpu.Snapshot {
	t.Helper()
	m := simdriver.Start(t, name)
	for _, f := range change {
		if err := f(m); err != nil {
			t.Fatal(err)
		}
	}
	return inprocess.Read(t, m)
}

// noneEmpty has no GPU in MIG mode without instances, over which NVIDIA's plugin does not start.
func noneEmpty(m *simdriver.Machine) error { return m.MIGOff(7) }

// uniform is a machine whose GPUs have two instances of one profile each.
func uniform(t *testing.T) gpu.Snapshot {
	t.Helper()
	return readMachine(t, "a100-mig", func(m *simdriver.Machine) error {
		slots, err := m.Slots()
		for _, slot := range slots {
			err = errors.Join(err, m.SetMIG(slot, "1g.10gb", "1g.10gb"))
		}
		return err
	})
}
