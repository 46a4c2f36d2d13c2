package parity

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/incumbent"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
)

// views are what the two orchestrators have of one machine.
type views struct {
	kubelet []pool // by resource
	nomad   []pool // by group
	refused map[string][]gpu.Exclusion

	orchestrators *inprocess.Orchestrators
}

// pool is a resource or a group: what a request can name.
type pool struct {
	name    string
	units   []unit // in the order in which they were sent
	answers []asked
}

type unit struct{ id, place string }

// asked is a request and its answer.
type asked struct {
	what string
	ids  []string
	rig.Grant
	refusal string
}

// ask makes the requests of a pool.
func (p *pool) ask(grant func(...string) (rig.Grant, error)) {
	for _, a := range p.requests() {
		var err error
		if a.Grant, err = grant(a.ids...); err != nil {
			_, a.refusal, _ = strings.Cut(err.Error(), "desc = ")
		}
		for i, node := range a.Nodes {
			a.Nodes[i], _, _ = strings.Cut(node, " ")
		}
		p.answers = append(p.answers, a)
	}
}

// requests are those that show how a pool is allocated: one unit, two beside each other (of one GPU, if that is
// shared), and two of different GPUs.
func (p pool) requests() []asked {
	first, last := p.units[0].id, p.units[len(p.units)-1].id
	all := []asked{{what: "one", ids: []string{first}}}
	if len(p.units) > 1 {
		all = append(all, asked{what: "two", ids: []string{first, p.units[1].id}}, asked{what: "far", ids: []string{first, last}})
	}
	return all
}

func newViews(o *inprocess.Orchestrators, toKubelet, toNomad *inventory.Allocatable) *views {
	v := &views{orchestrators: o, refused: map[string][]gpu.Exclusion{"kubelet": toKubelet.Excluded(), "nomad": toNomad.Excluded()}}
	for _, r := range o.Kubelet.Registrations() {
		p := pool{name: r.Resource}
		devices, _ := o.Kubelet.Devices(r.Resource)
		for _, d := range devices {
			u := unit{id: d.GetID(), place: "no NUMA node"}
			for _, n := range d.GetTopology().GetNodes() {
				u.place = fmt.Sprintf("NUMA node %d", n.GetID())
			}
			p.units = append(p.units, u)
		}
		p.ask(o.Allocate)
		v.kubelet = append(v.kubelet, p)
	}
	slices.SortFunc(v.kubelet, func(a, b pool) int { return strings.Compare(a.name, b.name) })
	for _, g := range o.Nomad.Groups() {
		p := pool{name: g.Vendor + "/" + g.Type + "/" + g.Name}
		for _, d := range g.Devices {
			p.units = append(p.units, unit{d.ID, "PCI " + d.HwLocality.PciBusID})
		}
		p.ask(o.Nomad.Reserve)
		v.nomad = append(v.nomad, p)
	}
	return v
}

// text is a golden file.
func (v *views) text() string {
	var out strings.Builder
	for _, side := range []struct {
		name  string
		pools []pool
	}{{"kubelet", v.kubelet}, {"nomad", v.nomad}} {
		for _, p := range side.pools {
			fmt.Fprintf(&out, "%s %s: %d\n", side.name, p.name, len(p.units))
			for _, line := range p.folded() {
				fmt.Fprintf(&out, "  %s\n", line)
			}
			for _, a := range p.answers {
				fmt.Fprintf(&out, "  %s: %s\n", a.what, a)
			}
		}
		for _, e := range v.refused[side.name] {
			fmt.Fprintf(&out, "%s is not offered GPU %d, %s: %s\n", side.name, e.Index, e.At, e.Reason)
		}
	}
	return out.String()
}

// folded has one line for the units of a device.
func (p pool) folded() (lines []string) {
	for i := 0; i < len(p.units); {
		u, n := p.units[i], 1
		device, _, shared := strings.Cut(u.id, "::")
		for i+n < len(p.units) && strings.HasPrefix(p.units[i+n].id, device+"::") {
			n++
		}
		if shared {
			device += fmt.Sprintf("::0 to ::%d", n-1)
		}
		lines = append(lines, device+"  "+u.place)
		i += n
	}
	return lines
}

func (a asked) String() string {
	if a.refusal != "" {
		return "refused: " + a.refusal
	}
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(a.Env)) {
		parts = append(parts, key+"="+a.Env[key])
	}
	parts = append(parts, a.Mounts...)
	return strings.Join(append(parts, "nodes "+strings.Join(a.Nodes, " ")), "\n    ")
}

// ids are those of pools, each with its pool.
func ids(pools []pool) map[string]string {
	of := map[string]string{}
	for _, p := range pools {
		for _, u := range p.units {
			of[u.id] = p.name
		}
	}
	return of
}

// meanTheSame fails unless both sides have the same units, a group is of one resource, and both exclude the same devices.
func (v *views) meanTheSame(t *testing.T) {
	t.Helper()
	resources, groups := ids(v.kubelet), ids(v.nomad)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(resources)), slices.Sorted(maps.Keys(groups))); diff != "" {
		t.Error("units (kubelet, Nomad):", diff)
	}
	of := map[string]string{}
	for id, group := range groups {
		if r := resources[id]; of[group] != "" && of[group] != r {
			t.Errorf("group %s has units of %s and of %s", group, r, of[group])
		} else {
			of[group] = r
		}
	}
	if diff := cmp.Diff(v.refused["kubelet"], v.refused["nomad"]); diff != "" {
		t.Error("not offered (kubelet, Nomad):", diff)
	}
}

func (v *views) haveNothingInCommon(t *testing.T) {
	t.Helper()
	resources, groups := ids(v.kubelet), ids(v.nomad)
	for id := range resources {
		if groups[id] != "" {
			t.Errorf("%s is offered to both", id)
		}
	}
	if len(resources) == 0 || len(groups) == 0 {
		t.Errorf("%d units for the kubelet, %d for Nomad", len(resources), len(groups))
	}
}

// differs returns where the incumbent would have sent something else; "" = nowhere. Its device nodes are compared as a
// set, and without those of every container: the order is random, and a node can be there twice.
func (v *views) differs(t *testing.T, file []byte, machine gpu.Snapshot) string {
	t.Helper()
	other, err := incumbent.New(configured(t, file), machine)
	if err != nil {
		return "it does not start: " + err.Error()
	}
	ours, diff := map[string][]string{}, ""
	for _, p := range v.kubelet {
		name := strings.TrimPrefix(p.name, "nvidia.com/")
		for _, u := range p.units {
			ours[name] = append(ours[name], u.id)
		}
		slices.Sort(ours[name])
		for _, a := range p.answers {
			theirs, err := other.Allocate(name, a.ids...)
			refusal := ""
			if err != nil {
				refusal = err.Error()
			}
			a.Nodes = slices.DeleteFunc(slices.Sorted(slices.Values(a.Nodes)), func(path string) bool { return slices.Contains(incumbent.CommonNodes, path) })
			diff += cmp.Diff(theirs, incumbent.Answer{Env: a.Env, Mounts: a.Mounts, Nodes: a.Nodes}, cmpopts.EquateEmpty()) + cmp.Diff(refusal, a.refusal)
		}
	}
	return cmp.Diff(other.Resources, ours) + diff
}

// build returns the inventory of a machine by a file, and the warnings about the file.
func build(t *testing.T, machine gpu.Snapshot, path string, to policy.Orchestrator, by inventory.Injection) (*inventory.Inventory, []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	r, err := config.ParseFile(path, text, to)
	must(t, err)
	cfg := core.DefaultConfig()
	cfg.Policy, cfg.Injection = r.Policy, by
	cfg.API = map[policy.Orchestrator]inventory.API{policy.Kubernetes: inventory.DevicePlugin, policy.Nomad: inventory.Nomad}[to]
	if cfg.MIG = r.MIG; r.MIG == "" {
		cfg.MIG = map[policy.Orchestrator]inventory.MIGStrategy{policy.Kubernetes: inventory.MIGNone, policy.Nomad: inventory.MIGMixed}[to]
	}
	inv := core.Build(machine, health.Ledger{}, cfg)
	if f := inv.WithoutHost().PolicyWarnings(); len(f) > 0 {
		t.Errorf("%s: warnings %q", to, f)
	}
	return inv, r.Warnings
}

// offer returns the inventory of a machine on which every MPS daemon answers, by a file, and the warnings about the file.
func offer(t *testing.T, machine gpu.Snapshot, path string, to policy.Orchestrator) (*inventory.Allocatable, []string) {
	t.Helper()
	built, warnings := build(t, machine, path, to, inventory.Injection{Runtime: true, Nodes: true})
	inv := built.WithoutHost()
	var daemons inventory.Host
	for u := range inv.Units() {
		if u.Sharing.Mode == inventory.MPS && !slices.Contains(daemons.MPS, u.Pool) {
			daemons.MPS = append(daemons.MPS, u.Pool)
		}
	}
	return inv.WithHost(daemons, inventory.OverlapWarn), warnings
}

// view serves two inventories and waits until both orchestrators have all of theirs.
func view(t *testing.T, toKubelet, toNomad *inventory.Allocatable) *views {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	k, n := coretest.NewSource(), coretest.NewSource()
	k.Set(toKubelet)
	n.Set(toNomad)
	o := inprocess.Serve(ctx, t, k, n, &running)
	must(t, o.Kubelet.Await(ctx, "all resources", func() bool { return len(o.KubeletDevices()) == toKubelet.Len() }))
	until(t, "all groups", func() bool { return len(o.Nomad.Devices()) == toNomad.Len() })
	return newViews(o, toKubelet, toNomad)
}
