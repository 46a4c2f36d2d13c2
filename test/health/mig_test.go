package health

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// views is a machine file with one GPU in slot 5 that is cut into three compute instances, two of which share
// a GPU instance.
func views(t *testing.T) string {
	t.Helper()
	text, err := simdriver.Text("a100-mig")
	must(t, err)
	head, rest, found := strings.Cut(text, "[gpu 0]")
	_, gpu5, ok := strings.Cut(rest, "[gpu 5]")
	gpu5, _, cut := strings.Cut(gpu5, "instance = ")
	if !found || !ok || !cut {
		t.Fatal("the machine is laid out otherwise now")
	}
	file := filepath.Join(t.TempDir(), "machine.conf")
	must(t, os.WriteFile(file, []byte(head+"[gpu 5]"+gpu5+`
instance = 1c.3g.40gb gi=1 ci=0 start=4 uuid=MIG-506f9790-f629-590a-bc7f-30f284452c1b
instance = 1c.3g.40gb gi=1 ci=1 start=4 uuid=MIG-0b9576ad-3ea4-5bf3-a131-94afae204e87
instance = 1g.10gb gi=9 ci=0 start=2 uuid=MIG-60b1e6f2-6635-54b4-8b54-9876499ea47f
`), 0o644))
	return file
}

const cut = 5 // the slot of the GPU that is cut up

// instances checks the states of the MIG instances of a GPU, in the order of the machine file.
func (m *rig) instances(what string, slot int, want ...health.State) {
	m.t.Helper()
	ids, err := m.Instances(slot)
	must(m.t, err)
	var got []health.State
	for _, id := range ids {
		got = append(got, m.unit(gpu.DeviceID(id)).Health.State)
	}
	if !slices.Equal(got, want) {
		m.t.Errorf("%s (%v in): %v, want %v", what, m.now.Sub(begin), got, want)
	}
}

// What the driver attributes to an instance concerns that instance; but no instance can be reset on its own,
// and nothing is dropped because its instance is not there.
func TestCase17MIGScopes(t *testing.T) {
	const h, d, u = health.Healthy, health.Degraded, health.Unhealthy
	for _, c := range []struct {
		name string
		code uint64
		at   []simdriver.At
		want []health.State
	}{
		{"compute instance", 94, []simdriver.At{{GI: 1, CI: 1}}, []health.State{h, d, h}},
		{"GPU instance", 94, []simdriver.At{{GI: 1, CI: simdriver.WholeInstance}}, []health.State{d, d, h}},
		{"whole GPU", 94, nil, []health.State{d, d, d}},
		{"a reset is nobody's own", 95, []simdriver.At{{GI: 1, CI: 1}}, []health.State{u, u, u}},
		{"nor is a link", 136, []simdriver.At{{GI: 1, CI: 1}}, []health.State{u, u, u}},
		{"unknown GPU instance", 94, []simdriver.At{{GI: 12, CI: 0}}, []health.State{d, d, d}},
		{"unknown compute instance", 94, []simdriver.At{{GI: 9, CI: 3}}, []health.State{d, d, d}},
		{"an application's", 31, []simdriver.At{{GI: 1, CI: 1}}, []health.State{h, h, h}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newRig(t, views(t))
			m.look()
			m.instances("at the start", cut, h, h, h)
			m.xid(cut, c.code, c.at...)
			m.instances("at once", cut, c.want...)
			if m.count(cut, c.code) != 1 {
				t.Error("not counted")
			}
		})
	}
	t.Run("verdict drain and reset", func(t *testing.T) {
		m := newRig(t, views(t))
		m.look()
		m.set(cut, "recovery_action = 4")
		m.xid(cut, 94, simdriver.At{GI: 1, CI: 1})
		m.instances("the GPU is to be drained", cut, u, u, u)
	})
	t.Run("the instance is destroyed", func(t *testing.T) {
		m := newRig(t, views(t))
		m.look()
		m.set(cut, "recovery_action = none") // else its verdict would clear XID 94
		m.xid(cut, 94, simdriver.At{GI: 9, CI: 0})
		must(t, m.SetMIG(cut, "1g.10gb", "1g.10gb"))
		m.step(5 * time.Minute)
		m.instances("taking an instance away repairs nothing", cut, d, d)
	})
}

// Units that share a GPU share its health, in one publication and in the same words. The instances of a
// GPU are what is shared here; for replicas see case 35.
func TestCase18SharedGPU(t *testing.T) {
	m := newRig(t, "a100-mig")
	m.look()
	const h, u = health.Healthy, health.Unhealthy
	m.instances("at the start", cut, h, h, h, h)
	quiet := m.now
	m.step(10 * time.Second)
	m.xid(cut, 48)
	m.instances("XID 48", cut, u, u, u, u)
	m.instances("another GPU", 4, h, h, h, h, h, h, h)
	if p := m.since(quiet); len(p) != 1 {
		t.Errorf("%d publications", len(p))
	}
	ids, err := m.Instances(cut)
	must(t, err)
	for _, id := range ids {
		if got, want := m.unit(gpu.DeviceID(id)).Health.String(), m.unit(gpu.DeviceID(ids[0])).Health.String(); got != want {
			t.Errorf("%q and %q", got, want)
		}
	}
}

// The older event wait does not say which instance an event concerns; the zeros in its place mean nothing.
func TestCase20EventWaitWithoutAttribution(t *testing.T) {
	if machine, ok := inChild(t); ok {
		m := rigOn(t, machine)
		m.look()
		m.xid(cut, 94, simdriver.At{GI: 1, CI: 1})
		m.instances("XID 94 of one instance", cut, health.Degraded, health.Degraded, health.Degraded)
		return
	}
	text, err := os.ReadFile(views(t))
	must(t, err)
	m, err := simdriver.InstallText(t.Context(), t.TempDir(), string(text))
	must(t, err)
	must(t, m.Without(t.Context(), "nvmlEventSetWait_v2"))
	child(t, m.Root)
}
