package core_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A unit that needs CDI takes work only while its device is defined for the driver's present incarnation.
func TestUnitsNeedTheirDefinition(t *testing.T) {
	const kind = "k8s.device-plugin.nvidia.com/gpu"
	both := []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}
	libraries := []inventory.Mount{{HostPath: "/usr/lib/libcuda.so.580.95.05", ContainerPath: "/usr/lib/libcuda.so.1", ReadOnly: true}}
	required, auto := inventory.Injection{CDI: inventory.CDIRequired}, inventory.Injection{Runtime: true, CDI: inventory.CDIAuto}
	for name, tc := range map[string]struct {
		injection   inventory.Injection
		cdi         *inventory.CDI
		provisional bool
		why         string   // GPU 1 is unhealthy
		names       []string // of the plan of GPU 0
	}{
		"not needed":              {injection: inventory.Injection{Runtime: true}, cdi: &inventory.CDI{Problem: "disk full"}},
		"not attempted yet":       {injection: required, provisional: true, why: "not written yet"},
		"defined":                 {required, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both}, false, "", []string{kind + "=" + string(both[0])}},
		"an earlier driver":       {injection: required, provisional: true, cdi: &inventory.CDI{Kind: kind, Defined: both}, why: "not written yet"},
		"one is not defined":      {required, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both[:1], Others: []string{"v/gds=all"}}, false, "not written yet", []string{kind + "=" + string(both[0]), "v/gds=all"}},
		"one has a reason":        {required, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both[:1], Problem: "disk full", Undefined: []inventory.Undefined{{Device: both[1], Reason: "no node"}}}, false, "no node", []string{kind + "=" + string(both[0])}},
		"none has, disk full":     {injection: required, cdi: &inventory.CDI{Incarnation: 1, Problem: "disk full"}, why: "disk full"},
		"auto, not attempted":     {injection: auto, provisional: true, why: "not written yet"},
		"auto, an earlier driver": {injection: auto, provisional: true, cdi: &inventory.CDI{Problem: "the driver is not ready"}, why: "not written yet"},
		"auto, not usable":        {injection: auto, cdi: &inventory.CDI{Incarnation: 1, Problem: "disk full"}},
		"auto, usable":            {auto, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both, Usable: true}, false, "", []string{kind + "=" + string(both[0])}},
		"auto, one missing":       {auto, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both[:1], Usable: true}, false, "not written yet", []string{kind + "=" + string(both[0])}},
		"libraries":               {injection: inventory.Injection{Libraries: true}, cdi: &inventory.CDI{Incarnation: 1, Defined: both, Libraries: libraries}},
	} {
		cfg := core.DefaultConfig()
		cfg.Injection = tc.injection
		s := core.NewState(cfg).Read(cfg, time.Unix(0, 0), coretest.GPUs(2), checked(both...)...).WithHost(cfg, time.Unix(0, 0), inventory.Host{CDI: tc.cdi})
		inv := s.Allocatable
		if inv.Provisional() != tc.provisional {
			t.Errorf("%s: provisional %t", name, inv.Provisional())
		}
		u, _ := inv.Unit(inventory.UnitID(both[1]))
		if why := u.Health.Detail; why != tc.why || (why != "") != (u.Health.Reason == health.ReasonNoCDI) || u.Health.Schedulable() != (why == "") {
			t.Errorf("%s: %s, want %q", name, u.Health, tc.why)
		}
		p, err := inv.Reserve(inventory.UnitID(both[0]))
		if diff := cmp.Diff(tc.names, p.CDI); diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
		if (p.Mounts != nil) != tc.injection.Libraries {
			t.Errorf("%s: %v", name, p.Mounts)
		}
	}
}

// Plans identify devices by index on request, as NVIDIA's container runtime does.
func TestPlanWithIndices(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.IndexIDs = inventory.MIGMixed, true
	inv := core.Build(coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb"), health.Ledger{}, cfg).WithoutHost()
	for ids, want := range map[string]string{"2 0": "0,2", "1:0": "1:0"} {
		units := parseUnits(ids)
		if strings.Contains(ids, ":") {
			units = []inventory.UnitID{inventory.UnitID(coretest.Instance(1, 0))}
		}
		if p, err := inv.Reserve(units...); err != nil || p.VisibleDevices() != want {
			t.Errorf("%s: %q, %v; want %s", ids, p.VisibleDevices(), err, want)
		}
	}
}

func checked(ids ...gpu.DeviceID) (obs []health.Observation) {
	for _, id := range ids {
		obs = append(obs, health.Observation{At: gpu.WholeGPU(id), Kind: health.Checked})
	}
	return obs
}
