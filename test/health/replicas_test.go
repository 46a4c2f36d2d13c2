package health

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// byFour shares every device by four. What is degraded takes no work, so that orchestrators hear of it.
func byFour(c *core.Config) {
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
	c.Health.DegradedTakesNoWork = true
}

// sevenths is the slot of the GPU with seven instances in the machine "a100-mig"; third is one of them.
const (
	sevenths = 4
	third    = 2
)

var thirdAt = simdriver.At{GI: 9, CI: 0}

// replicas are the units of devices, each four times.
func replicas(ids ...string) (units []string) {
	for _, id := range ids {
		for n := range 4 {
			units = append(units, fmt.Sprintf("%s::%d", id, n))
		}
	}
	return slices.Sorted(slices.Values(units))
}

// ill are the units that take no work.
func ill(inv *inventory.Inventory) (units []string) {
	for u := range inv.Units() {
		if !u.Health.Schedulable() {
			units = append(units, string(u.ID))
		}
	}
	return slices.Sorted(slices.Values(units))
}

// shares checks that exactly these units take no work, and that all of a device are in the same words.
func (m *rig) shares(what string, want []string) {
	m.t.Helper()
	if got := ill(m.state.Inventory); !slices.Equal(got, want) {
		m.t.Errorf("%s (%v in): take no work:\n%s\nwant\n%s", what, m.now.Sub(begin), strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	said := map[gpu.DeviceID]health.Health{}
	for u := range m.state.Inventory.Units() {
		if h, ok := said[u.Device.ID]; ok && h != u.Health {
			m.t.Errorf("%s: %s is %q, another share of it %q", what, u.ID, u.Health, h)
		}
		said[u.Device.ID] = u.Health
	}
}

// mend is what an operator does: a reset, which shows because the driver wants it before and not after.
func mend(m *rig, slot int) {
	m.set(slot, "recovery_action = 1")
	m.step(10 * time.Second)
	m.reset(slot)
}

// A share is as well as its device: a fault of the GPU is one of all units on it, whatever they are, and a fault of an
// instance one of its shares only. They fall ill in one publication, and get well in one.
func TestCase35Replicas(t *testing.T) {
	for _, c := range []struct {
		name string
		slot int
		code uint64
		at   []simdriver.At
		heal func(*rig, int) // nil = the driver's verdict does
		ill  func(whole string, instances []string) []string
	}{
		{"a GPU", 0, 46, nil, mend, func(whole string, _ []string) []string { return replicas(whole) }},
		{"a GPU with seven instances", sevenths, 46, nil, mend, func(_ string, all []string) []string { return replicas(all...) }},
		{"what takes a reset is nobody's own", sevenths, 46, []simdriver.At{thirdAt}, mend, func(_ string, all []string) []string { return replicas(all...) }},
		{"one instance", sevenths, 94, []simdriver.At{thirdAt}, nil, func(_ string, all []string) []string { return replicas(all[third]) }},
		{"all instances", sevenths, 94, nil, nil, func(_ string, all []string) []string { return replicas(all...) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newRig(t, "a100-mig", byFour)
			m.look()
			m.shares("at the start", nil)
			instances, err := m.Instances(c.slot)
			must(t, err)
			m.step(10 * time.Second)
			quiet := m.now
			m.step(10 * time.Second)
			m.xid(c.slot, c.code, c.at...)
			m.shares("at once", c.ill(m.UUID(c.slot), instances))
			if p := m.since(quiet); len(p) != 1 {
				t.Errorf("%d publications", len(p))
			}
			if n := m.count(c.slot, c.code); n != 1 {
				t.Errorf("XID %d was counted %d times", c.code, n)
			}
			if c.heal != nil {
				c.heal(m, c.slot)
			}
			m.step(5 * time.Minute)
			m.shares("in the end", nil)
			for _, p := range m.since(quiet) {
				if n := len(ill(p.inventory)); n != 0 && n != len(c.ill(m.UUID(c.slot), instances)) {
					t.Errorf("%v in, %d units took no work", p.at.Sub(begin), n)
				}
			}
		})
	}
}

// books are what both orchestrators were told last.
type books struct {
	mu      sync.Mutex
	nomad   map[string]bool // healthy, by unit
	kubelet *kubelettest.Kubelet
}

// keep opens both adapters on a machine.
func (f *live) keep() *books {
	b := &books{kubelet: f.kubelet()}
	stream := f.fingerprint()
	go func() {
		for r := range stream {
			told := map[string]bool{}
			for _, g := range r.Devices {
				for _, d := range g.Devices {
					told[d.ID] = d.Healthy
				}
			}
			b.mu.Lock()
			b.nomad = told
			b.mu.Unlock()
		}
	}()
	return b
}

// word waits until the agent has heard what the driver wants done about a GPU.
func (f *live) word(slot int, want health.RecoveryAction) {
	f.t.Helper()
	until(f.t, "the driver's word", func() bool {
		chart, _ := f.State().Ledger.History(gpu.DeviceID(f.UUID(slot)))
		return chart.Sample.RecoveryAction == want
	})
}

// told are all units as Nomad and as the kubelet have them.
func (b *books) told() (nomad, kubelet map[string]bool) {
	kubelet = map[string]bool{}
	for _, r := range b.kubelet.Registrations() {
		devices, _ := b.kubelet.Devices(r.Resource)
		for _, d := range devices {
			kubelet[d.GetID()] = d.GetHealth() == v1beta1.Healthy
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.nomad), kubelet
}

// agree waits until both have all units, of which exactly these take no work.
func (b *books) agree(t *testing.T, what string, all, want []string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			nomad, kubelet := b.told()
			t.Logf("%s: Nomad has %v\nthe kubelet %v", what, nomad, kubelet)
		}
	}()
	until(t, what, func() bool {
		nomad, kubelet := b.told()
		var sick []string
		for id, healthy := range nomad {
			if !healthy {
				sick = append(sick, id)
			}
		}
		return maps.Equal(nomad, kubelet) && slices.Equal(slices.Sorted(maps.Keys(nomad)), all) &&
			slices.Equal(slices.Sorted(slices.Values(sick)), want)
	})
}

// Both orchestrators are told the same of every share.
func TestCase35BothSidesAgree(t *testing.T) {
	linger := func(c *core.Config) { c.Health.SettleTime = 4 * time.Second } // else the driver's word mends an instance before it is seen
	f := follow(t, simdriver.Start(t, "a100-mig"), hasty, byFour, linger)
	f.until("the machine is read", func(inv *inventory.Inventory) bool { return inv.Len() > 0 })
	var all []string
	for u := range f.Current().Units() {
		all = append(all, string(u.ID))
	}
	slices.Sort(all)
	instances, err := f.Instances(sevenths)
	must(t, err)
	b := f.keep()
	b.agree(t, "all is well", all, nil)
	must(t, f.XID(sevenths, 94, thirdAt))
	b.agree(t, "one instance", all, replicas(instances[third]))
	b.agree(t, "and it is well", all, nil)
	must(t, f.XID(0, 46))
	b.agree(t, "a GPU", all, replicas(f.UUID(0)))
	must(t, f.XID(sevenths, 46))
	b.agree(t, "and one with instances", all, replicas(append(instances, f.UUID(0))...))
	for _, slot := range []int{0, sevenths} {
		must(t, f.Change(slot, "recovery_action = 1"))
		f.word(slot, health.RecoveryReset)
		must(t, f.Reset(slot))
	}
	b.agree(t, "all is well again", all, nil)
}
