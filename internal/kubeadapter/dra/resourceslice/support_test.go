package resourceslice_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const boot = "boot-1"

var start = time.Date(2026, time.November, 20, 10, 31, 0, 400_000_000, time.UTC)

// config returns a configuration that offers devices through DRA.
func config(change ...func(*core.Config)) core.Config {
	c := core.DefaultConfig()
	c.API, c.MIG = inventory.DRA, inventory.MIGMixed
	for _, f := range change {
		f(&c)
	}
	return c
}

// rules returns the change of a configuration that has these rules.
func rules(all ...inventory.Rule) func(*core.Config) {
	return func(c *core.Config) { c.Policy.Rules = all }
}

func shared(s inventory.Sharing) inventory.Rule { return inventory.Rule{Sharing: &s} }

// gpuRule returns a rule for one GPU.
func gpuRule(n int, r inventory.Rule) inventory.Rule {
	r.Select.IDs = []gpu.DeviceID{coretest.GPU(n)}
	return r
}

// ledger returns a ledger of observations, each a second after the one before.
func ledger(obs ...health.Observation) (l health.Ledger) {
	for i, o := range obs {
		l = l.Apply(health.DefaultPolicy(), start.Add(time.Duration(i)*time.Second), o)
	}
	return l
}

func xidOf(n int, code uint64) health.Observation {
	return health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.XID, Code: code}
}

// claim returns a prepared claim for devices as they are published.
func claim(uid string, inv *inventory.Allocatable, devices ...kubeapi.Device) prepared.Claim {
	c := prepared.Claim{Version: 1, BootID: boot, Namespace: "default", Name: uid, UID: uid, State: prepared.Complete}
	for _, d := range devices {
		u, _ := resourceslice.Resolve(inv, d.Name)
		c.Results = append(c.Results, prepared.Result{
			Request: "gpu", Pool: "node", Device: d.Name, Unit: u.ID, At: u.Device.At,
			Exclusive: u.Sharing.Mode == inventory.Exclusive, Published: resourceslice.Published(d),
		})
	}
	return c
}

// find returns a device by name.
func find(t testing.TB, all []kubeapi.Device, name string) kubeapi.Device {
	t.Helper()
	for _, d := range all {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("no device %s among %v", name, names(all))
	return kubeapi.Device{}
}

func names(all []kubeapi.Device) (of []string) {
	for _, d := range all {
		of = append(of, d.Name)
	}
	return of
}

// name is the name of the n-th GPU.
func name(n int) string { return strings.ToLower(string(coretest.GPU(n))) }

// format returns devices as text, one line for each attribute, capacity and taint.
func format(all []kubeapi.Device) string {
	var b strings.Builder
	for _, d := range all {
		fmt.Fprintf(&b, "%s", d.Name)
		if d.AllowMultipleAllocations {
			b.WriteString(" (allows multiple allocations)")
		}
		b.WriteString("\n")
		for _, key := range slices.Sorted(maps.Keys(d.Attributes)) {
			switch a := d.Attributes[key]; {
			case a.Int != nil:
				fmt.Fprintf(&b, "  %s = %d\n", key, *a.Int)
			case a.Version != nil:
				fmt.Fprintf(&b, "  %s = version %s\n", key, *a.Version)
			case a.String != nil:
				fmt.Fprintf(&b, "  %s = %q\n", key, *a.String)
			}
		}
		for _, key := range slices.Sorted(maps.Keys(d.Capacity)) {
			c := d.Capacity[key]
			fmt.Fprintf(&b, "  %s: %s", key, c.Value)
			if p := c.RequestPolicy; p != nil {
				fmt.Fprintf(&b, ", default %s, min %s, step %q", p.Default, p.ValidRange.Min, p.ValidRange.Step)
			}
			b.WriteString("\n")
		}
		b.WriteString(formatTaints(d.Taints))
	}
	return b.String()
}

func formatTaints(all []kubeapi.DeviceTaint) string {
	var b strings.Builder
	for _, t := range all {
		at := "-"
		if !t.TimeAdded.IsZero() {
			at = t.TimeAdded.Format(time.RFC3339Nano)
		}
		fmt.Fprintf(&b, "  %s=%s:%s since %s\n", t.Key, t.Value, t.Effect, at)
	}
	return b.String()
}
