package resourceslice_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const (
	withdrawn = "  gpu.nvidia.com/withdrawn=:NoSchedule since -\n"
	heldTaint = "  gpu.nvidia.com/held=:NoSchedule since -\n"
)

// A device that a claim holds stays in the slice as it was published, with the taint "withdrawn", when the policy, the driver or the
// machine has it no more, or in another form, and leaves when the claim has ended.
func TestHeldDevicesStay(t *testing.T) {
	two := coretest.GPUs(2)
	slicing := rules(shared(inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}))
	for about, tc := range map[string]struct {
		before, after   gpu.Snapshot
		policy, another func(*core.Config)
		held            string
		separate        bool // shares are devices before
		want            string
	}{
		"the GPU is gone":          {two, coretest.GPUs(1), rules(), rules(), name(1), false, withdrawn},
		"the driver is gone":       {two, gpu.NoDriver(gpu.DriverFailed, "x"), rules(), rules(), name(1), false, withdrawn},
		"excluded by the policy":   {two, two, rules(), func(c *core.Config) { c.Exclude = []gpu.DeviceID{coretest.GPU(1)} }, name(1), false, withdrawn},
		"now the device plugin's":  {two, two, rules(), func(c *core.Config) { c.API = inventory.DevicePlugin }, name(1), false, withdrawn},
		"exclusive, now shared":    {two, two, rules(), slicing, name(1), false, withdrawn},
		"shared, now exclusive":    {two, two, slicing, rules(), name(1), false, withdrawn},
		"shared by another mode":   {two, two, slicing, rules(shared(inventory.Sharing{Mode: inventory.MPS, Replicas: 4})), name(1), false, withdrawn},
		"in another pool":          {two, two, rules(), rules(inventory.Rule{Pool: "big"}), name(1), false, withdrawn},
		"a share, now one device":  {two, two, slicing, slicing, name(1) + "-s2", true, withdrawn},
		"more shares than before":  {two, two, slicing, rules(shared(inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 8})), name(1), false, ""},
		"fewer shares than before": {two, two, slicing, rules(shared(inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2})), name(1), false, ""},
		"a MIG instance is gone":   {coretest.WithMIG(two, 1, "1g.10gb"), two, rules(), rules(), lower(coretest.Instance(1, 0)), false, withdrawn},
		"nothing has changed":      {two, two, slicing, slicing, name(1), false, ""},
	} {
		t.Run(about, func(t *testing.T) {
			in := resourceslice.Input{Allocatable: core.Build(tc.before, health.Ledger{}, config(tc.policy)).WithoutHost(), BootID: boot, SharesAsDevices: tc.separate}
			published := find(t, resourceslice.Devices(in), tc.held)
			in.Prepared = []prepared.Claim{claim("c", in.Allocatable, published)}
			in.Allocatable, in.SharesAsDevices = core.Build(tc.after, health.Ledger{}, config(tc.another)).WithoutHost(), false
			now := find(t, resourceslice.Devices(in), tc.held)
			if got := formatTaints(now.Taints); got != tc.want {
				t.Errorf("taints\n%swant\n%s", got, tc.want)
			}
			if !now.Held || published.Held {
				t.Errorf("held: %t, before the claim %t", now.Held, published.Held)
			}
			if now.Taints, now.Held = nil, false; tc.want != "" {
				if diff := gocmp.Diff(published, now); diff != "" {
					t.Error("not as it was published:", diff)
				}
			}
			for ended, claims := range map[string][]prepared.Claim{"unprepared": nil, "of another boot": {in.Prepared[0]}} {
				after := resourceslice.Input{Allocatable: in.Allocatable, Prepared: claims, BootID: "boot-2"}
				without := resourceslice.Input{Allocatable: in.Allocatable}
				if diff := gocmp.Diff(resourceslice.Devices(without), resourceslice.Devices(after)); diff != "" {
					t.Error("after the claim is", ended, diff)
				}
			}
		})
	}
}

func lower(id gpu.DeviceID) string { return strings.ToLower(string(id)) }

// What shares hardware with a held device under another name takes no new work: a GPU whose instance a claim holds, an instance of a GPU
// that a claim holds, a GPU one of whose shares was a device. The other shares of a device are not affected.
func TestHeldHardwareUnderAnotherName(t *testing.T) {
	two := coretest.GPUs(2)
	cut := coretest.WithMIG(two, 1, "1g.10gb", "1g.10gb")
	slicing := config(rules(shared(inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2})))
	taints := func(in resourceslice.Input, device string) string {
		return formatTaints(find(t, resourceslice.Devices(in), device).Taints)
	}
	of := func(s gpu.Snapshot, c core.Config, separate bool, device string) (in resourceslice.Input) {
		in = resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, c).WithoutHost(), BootID: boot, SharesAsDevices: separate}
		in.Prepared = []prepared.Claim{claim("c", in.Allocatable, find(t, resourceslice.Devices(in), device))}
		return in
	}

	in := of(cut, config(), false, lower(coretest.Instance(1, 0)))
	if got := taints(in, lower(coretest.Instance(1, 1))); got != "" {
		t.Error("the instance beside it:", got)
	}
	in.Allocatable = core.Build(two, health.Ledger{}, config()).WithoutHost()
	if got := taints(in, name(1)); got != heldTaint {
		t.Error("the GPU whose instance is held:", got)
	}
	if got := taints(in, name(0)); got != "" {
		t.Error("the other GPU:", got)
	}
	in.Prepared[0].Results[0].Admin = true
	if got := taints(in, name(1)); got != "" || len(resourceslice.Devices(in)) != 2 {
		t.Error("a claim with admin access holds the GPU:", got)
	}

	in = of(two, config(), false, name(1))
	in.Allocatable = core.Build(cut, health.Ledger{}, config()).WithoutHost()
	if got := taints(in, lower(coretest.Instance(1, 0))); got != heldTaint {
		t.Error("an instance of the held GPU:", got)
	}

	in = of(two, slicing, true, name(1)+"-s0")
	if got := taints(in, name(1)+"-s1"); got != "" {
		t.Error("the other share:", got)
	}
	in.SharesAsDevices = false
	if got := taints(in, name(1)); got != heldTaint {
		t.Error("the device of a share that is held as a device:", got)
	}
	in = of(two, slicing, false, name(1))
	in.SharesAsDevices = true
	if got := taints(in, name(1)+"-s0"); got != heldTaint {
		t.Error("a share of a device that is held:", got)
	}
}

// A record of another version of the agent has no device, or one without some attributes or capacities: the device is listed with all of them.
func TestRecordWithoutDevice(t *testing.T) {
	in := resourceslice.Input{Allocatable: build(health.Ledger{}, rules(shared(inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}))), BootID: boot}
	all := resourceslice.Devices(in)
	for _, text := range []string{"", "null", "{", `{"name":"another"}`, `{"name":"` + name(1) + `","attributes":{"uuid":{"string":"x"}}}`} {
		c := claim("c", in.Allocatable, all[1])
		c.Results[0].Published = []byte(text)
		gone := resourceslice.Input{Allocatable: core.Build(coretest.GPUs(1), health.Ledger{}, config()).WithoutHost(), BootID: boot, Prepared: []prepared.Claim{c}}
		d := resourceslice.Devices(gone)[1]
		for key := range all[0].Attributes {
			if _, ok := d.Attributes[key]; !ok && key != "resource.kubernetes.io/numaNode" {
				t.Errorf("%s: no attribute %s", text, key)
			}
		}
		if _, ok := d.Capacity["memory"]; !ok {
			t.Errorf("%s: no capacity memory", text)
		}
		if d.Name != name(1) || *d.Attributes["type"].String != "shared-gpu" || formatTaints(d.Taints) != withdrawn {
			t.Errorf("%s: %s", text, format([]kubeapi.Device{d}))
		}
	}
}

// Through random changes of policy, machine and cluster, with claims that come and go: no name is there twice; a held device is there, in
// a form with the capacities from which its claims took; of two devices on the same hardware at most one takes new claims, unless they
// are shares of one device; devices have the same attributes; without a change nothing changes.
func TestRandomChanges(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 16)) //nolint:gosec // reproducible
		in := resourceslice.Input{BootID: boot}
		for step := range 30 {
			in.Allocatable, in.SharesAsDevices = randomInventory(r), r.IntN(4) == 0
			all := resourceslice.Devices(in)
			if diff := gocmp.Diff(all, resourceslice.Devices(in)); diff != "" {
				t.Fatal(diff)
			}
			checkDevices(t, in, all)
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
			in.Prepared = slices.DeleteFunc(slices.Clone(in.Prepared), func(prepared.Claim) bool { return r.IntN(3) == 0 })
			for _, d := range all {
				if r.IntN(4) == 0 && schedulable(d) && (d.AllowMultipleAllocations || !isHeld(in, d.Name)) {
					in.Prepared = append(in.Prepared, claim(fmt.Sprintf("%d-%s", step, d.Name), in.Allocatable, d))
				}
			}
		}
	}
}

func randomInventory(r *rand.Rand) *inventory.Allocatable {
	s := coretest.GPUs(3)
	if r.IntN(2) == 0 {
		s = coretest.WithMIG(s, r.IntN(3), "1g.10gb", "1g.10gb")
	}
	if r.IntN(4) == 0 {
		s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool { return d.At.GPU == coretest.GPU(1) })
	}
	var all []inventory.Rule
	for n := range 3 {
		rule := gpuRule(n, inventory.Rule{Pool: []string{"", "", "a", "b"}[r.IntN(4)]})
		if mode := inventory.SharingMode(r.IntN(3)); mode != inventory.Exclusive { //nolint:gosec // 0 to 2
			rule.Sharing = &inventory.Sharing{Mode: mode, Replicas: 2 + r.IntN(3)}
		}
		all = append(all, rule)
	}
	return core.Build(s, health.Ledger{}, config(rules(all...), func(c *core.Config) {
		if r.IntN(6) == 0 {
			c.API = inventory.DevicePlugin
		}
	})).WithoutHost()
}

// schedulable reports whether the scheduler gives a device to a claim without tolerations.
func schedulable(d kubeapi.Device) bool {
	return !slices.ContainsFunc(d.Taints, func(t kubeapi.DeviceTaint) bool { return t.Effect != kubeapi.NoEffect })
}

func isHeld(in resourceslice.Input, device string) bool {
	return slices.ContainsFunc(in.Prepared, func(c prepared.Claim) bool { return c.Results[0].Device == device })
}

func checkDevices(t *testing.T, in resourceslice.Input, all []kubeapi.Device) {
	t.Helper()
	byName := map[string]kubeapi.Device{}
	for _, d := range all {
		if _, ok := byName[d.Name]; ok {
			t.Errorf("%s is there twice", d.Name)
		}
		byName[d.Name] = d
		if len(d.Attributes) < 14 {
			t.Errorf("%s has %d attributes", d.Name, len(d.Attributes))
		}
	}
	for _, c := range in.Prepared {
		held := c.Results[0]
		d, ok := byName[held.Device]
		if !ok {
			t.Errorf("%s has left, and %s holds it", held.Device, c.UID)
			continue
		}
		if _, has := d.Capacity["shares"]; has == held.Exclusive || d.AllowMultipleAllocations != strings.Contains(string(held.Published), `"allowMultipleAllocations":true`) {
			t.Errorf("%s has changed its form, and %s holds it:\n%s", d.Name, c.UID, format([]kubeapi.Device{d}))
		}
		for _, other := range all {
			u, ok := resourceslice.Resolve(in.Allocatable, other.Name)
			beside := ok && in.SharesAsDevices && schedulable(d) && u.Sharing.Mode != inventory.Exclusive // a share beside the held one
			if ok && other.Name != d.Name && u.Device.At.Overlaps(held.At) && schedulable(other) && !beside {
				t.Errorf("%s takes claims, and %s holds its hardware as %s", other.Name, c.UID, held.Device)
			}
		}
	}
}
