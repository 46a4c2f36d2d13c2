package deviceplugin

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const cdiKind = "k8s.device-plugin.nvidia.com/gpu"

// lists are the strategies that can be combined, by their order in sets.
var lists = []string{"envvar", "volume-mounts", "cdi-annotations", "cdi-cri"}

// sets are all combinations of strategies, single ones first, then pairs.
func sets() (all [][]string) {
	for bits := 1; bits < 1<<len(lists); bits++ {
		var set []string
		for i, name := range lists {
			if bits>>i&1 == 1 {
				set = append(set, name)
			}
		}
		all = append(all, set)
	}
	slices.SortStableFunc(all, func(a, b []string) int { return len(a) - len(b) })
	return all
}

// withStrategies configures a set of strategies.
func withStrategies(c core.Config, set []string) (core.Config, DeviceLists) {
	l := DeviceLists{
		EnvVar: slices.Contains(set, "envvar"), VolumeMounts: slices.Contains(set, "volume-mounts"),
		CDIAnnotations: slices.Contains(set, "cdi-annotations"), CDINames: slices.Contains(set, "cdi-cri"),
	}
	nodes := c.Injection.Nodes
	c.Injection = inventory.Injection{Runtime: l.EnvVar || l.VolumeMounts}
	if c.Injection.Nodes = nodes && c.Injection.Runtime; l.CDIAnnotations || l.CDINames {
		c.Injection.CDI = inventory.CDIRequired
	}
	return c, l
}

// definesAll is a CDI specification of every device of a snapshot.
func definesAll(s gpu.Snapshot, others ...string) *inventory.CDI {
	c := &inventory.CDI{Kind: cdiKind, Others: others, Usable: true, Reason: "hooks found"}
	for _, d := range s.Devices {
		c.Defined = append(c.Defined, d.ID)
	}
	slices.Sort(c.Defined)
	return c
}

// strategyServer returns the service of a resource with a set of strategies; all devices have a CDI specification.
func strategyServer(resource string, s gpu.Snapshot, c core.Config, set []string, others ...string) *server {
	c, l := withStrategies(c, set)
	inv := core.Build(s, health.Ledger{}, c).WithHost(inventory.Host{CDI: definesAll(s, others...)}, c.Overlap)
	srv := newTestServer(resource, inv)
	srv.opts.Lists = l
	return srv
}

// incumbent is the response of NVIDIA's k8s-device-plugin 0.20.0 (internal/plugin/server.go, getAllocateResponse) to a request for
// devices, with an annotation key that is not random, and each name once in canonical order.
func incumbent(set, ids, others []string, annotation string) *v1beta1.ContainerAllocateResponse {
	r := &v1beta1.ContainerAllocateResponse{Envs: map[string]string{}}
	var names []string
	for _, id := range ids {
		names = append(names, cdiKind+"="+id)
	}
	names = append(names, others...)
	for _, strategy := range set {
		switch strategy {
		case "envvar":
			r.Envs["NVIDIA_VISIBLE_DEVICES"] = strings.Join(ids, ",")
		case "volume-mounts": // after envvar: replaces its list
			r.Envs["NVIDIA_VISIBLE_DEVICES"] = "/var/run/nvidia-container-devices"
			for _, id := range ids {
				r.Mounts = append(r.Mounts, &v1beta1.Mount{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + id})
			}
		case "cdi-annotations":
			r.Annotations = map[string]string{annotation: strings.Join(names, ",")}
		case "cdi-cri":
			for _, name := range names {
				r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: name})
			}
		}
	}
	return r
}

var annotationForm = regexp.MustCompile(`^cdi\.k8s\.io/nvidia-device-plugin_[0-9a-f]{32}$`)

// Each combination of strategies responds as NVIDIA's plugin does: on every machine, for full GPUs, MIG instances and replicas, by UUID
// and by index, to requests for one unit, for two (replicas of one device if there are) and for all, in any order, twice, and after a
// restart. The golden file has the responses of some machines to each single strategy, and to all combinations for the smallest one.
func TestStrategies(t *testing.T) {
	var golden strings.Builder
	random := rand.New(rand.NewPCG(1, 2))
	for _, machine := range simdriver.Names() {
		s := readMachine(t, machine)
		for _, replicas := range []int{0, 2} {
			for _, byIndex := range []bool{false, true} {
				c := mixedConfig()
				if c.IndexIDs = byIndex; replicas > 0 {
					c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas}}}
				}
				offered := listDevices(core.Build(s, health.Ledger{}, c).WithoutHost())
				for _, resource := range slices.Sorted(maps.Keys(offered)) {
					shown := slices.Contains([]string{"t4", "h100x8", "a100-mig"}, machine)
					checkStrategies(t, strategyCase{machine, s, c, resource, offered[resource], random, shown, &golden})
				}
			}
		}
	}
	goldenfile.Compare(t, "testdata/strategies.golden", golden.String())
}

// strategyCase is one resource of a machine under one configuration.
type strategyCase struct {
	machine  string
	snapshot gpu.Snapshot
	config   core.Config
	resource string
	units    []listedDevice
	random   *rand.Rand
	shown    bool // in the golden file
	golden   *strings.Builder
}

func checkStrategies(t *testing.T, c strategyCase) {
	t.Helper()
	for _, n := range slices.Compact([]int{1, min(2, len(c.units)), len(c.units)}) {
		requested, ids := c.request(n)
		if c.shown {
			fmt.Fprintf(c.golden, "%s %s: %d of %d units: %s\n", c.machine, c.resource, n, len(c.units), elided(requested))
		}
		for _, set := range sets() {
			var first []byte
			var got *v1beta1.ContainerAllocateResponse
			for range 2 { // by a server each
				c.random.Shuffle(len(requested), func(i, j int) { requested[i], requested[j] = requested[j], requested[i] })
				response, err := strategyServer(c.resource, c.snapshot, c.config, set).Allocate(t.Context(), allocateRequest(requested))
				if err != nil {
					t.Fatalf("%s %s %v: %v", c.machine, c.resource, set, err)
				}
				raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(response)
				if err != nil || first != nil && !slices.Equal(raw, first) {
					t.Fatalf("%s %s %v: the same request has another response", c.machine, c.resource, set)
				}
				first, got = raw, response.GetContainerResponses()[0]
			}
			key := strings.Join(slices.Collect(maps.Keys(got.GetAnnotations())), " ")
			if _, named, err := cdi.ParseAnnotations(got.GetAnnotations()); key != "" && (!annotationForm.MatchString(key) || err != nil || len(named) != len(ids)) {
				t.Errorf("annotation %s: %v %v", key, named, err)
			}
			if diff := cmp.Diff(incumbent(set, ids, nil, key), got, protocmp.Transform()); diff != "" {
				t.Errorf("%s %s %v %v: %s", c.machine, c.resource, set, requested, diff)
			}
			if c.shown && len(set) == 1 || c.machine == "t4" {
				fmt.Fprintf(c.golden, "  %-32s %s\n", strings.Join(set, ","), renderResponse(got))
			}
		}
	}
}

// request returns n units, and the names of their devices in canonical order.
func (c strategyCase) request(n int) (units, ids []string) {
	for _, d := range c.units[:n] {
		units = append(units, string(d.id))
	}
	for _, d := range c.snapshot.Devices {
		if slices.ContainsFunc(c.units[:n], func(l listedDevice) bool { id, _ := l.id.Split(); return id == d.ID }) {
			name := string(d.ID)
			if c.config.IndexIDs && d.Profile != "" {
				name = fmt.Sprintf("%d:%d", d.Index, d.Instance)
			} else if c.config.IndexIDs {
				name = fmt.Sprint(d.Index)
			}
			ids = append(ids, name)
		}
	}
	return units, ids
}

// readMachine reads a simulated machine once.
func readMachine(t *testing.T, name string) gpu.Snapshot {
	t.Helper()
	m := simdriver.Start(t, name)
	s, err := nvidia.Open(nvidia.Options{Roots: core.Roots{Driver: m.Root, Dev: m.Root, Sys: m.Root + "/sys", Proc: m.Root + "/proc"}})
	check.NoError(t, err)
	snapshot, err := s.Snapshot()
	if err = errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	return snapshot
}

// renderResponse writes a response in one line: the first block of each UUID, and the ends of long lists.
func renderResponse(r *v1beta1.ContainerAllocateResponse) string {
	var parts, mounts, names []string
	for _, name := range slices.Sorted(maps.Keys(r.GetEnvs())) {
		parts = append(parts, name+"="+elided(strings.Split(r.GetEnvs()[name], ",")))
	}
	for _, m := range r.GetMounts() {
		mounts = append(mounts, m.GetHostPath()+":"+m.GetContainerPath())
	}
	for key, list := range r.GetAnnotations() {
		parts = append(parts, key+"="+elided(strings.Split(list, ",")))
	}
	for _, d := range r.GetCdiDevices() {
		names = append(names, d.GetName())
	}
	for _, list := range []struct {
		name  string
		items []string
	}{{"mounts", mounts}, {"CDI", names}} {
		if len(list.items) > 0 {
			parts = append(parts, list.name+" "+elided(list.items))
		}
	}
	return strings.Join(parts, "; ")
}

func elided(items []string) string {
	if n := len(items); n > 3 {
		items = []string{items[0], fmt.Sprintf("(%d more)", n-2), items[n-1]}
	}
	return uuidTail.ReplaceAllString(strings.Join(items, ","), "")
}

var uuidTail = regexp.MustCompile(`-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
