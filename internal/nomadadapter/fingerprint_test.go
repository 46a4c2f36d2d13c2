package nomadadapter

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func TestFingerprint(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(nodeInventory(coretest.GPUs(8)))
	next := openFingerprint(t, nomadtest.Serve(t, s.Plugin))
	gs := next()
	if diff := cmp.Diff(firstGroups(nodeInventory(coretest.GPUs(8))), gs); diff != "" {
		t.Errorf("over gRPC (-sent +received):\n%s", diff)
	}
	if len(gs) != 1 || len(gs[0].Devices) != 8 {
		t.Fatalf("got %v", gs)
	}
}

func TestHealthChangesOneDeviceOnly(t *testing.T) {
	t.Parallel() // waits for fingerprintInterval
	s := newFixture(t)
	s.Source.Set(nodeInventory(coretest.GPUs(4)))
	next := openFingerprint(t, nomadtest.Serve(t, s.Plugin))
	healthy := next()
	s.Source.Set(nodeInventory(coretest.GPUs(4), lost(2)))
	unhealthy := next()
	s.Source.Set(nodeInventory(coretest.GPUs(4)))
	if diff := cmp.Diff(healthy, next()); diff != "" {
		t.Errorf("recovery differs (-before +after):\n%s", diff)
	}
	d := unhealthy[0].Devices[2]
	if d.Healthy || d.HealthDesc != lostText {
		t.Errorf("the lost GPU is %+v", d)
	}
	if n := unhealthy[0].Attributes[unhealthyKey]; n == nil || *n.Int != 1 {
		t.Errorf("unhealthy devices: %v, want 1", n)
	}
	d.Healthy, d.HealthDesc = true, ""
	delete(unhealthy[0].Attributes, unhealthyKey)
	if diff := cmp.Diff(healthy, unhealthy); diff != "" {
		t.Errorf("more than the health changed (-before +after):\n%s", diff)
	}
}

// The stream continues when the driver is lost, absent and ready again.
func TestDriverLossIsNoError(t *testing.T) {
	t.Parallel()
	s := newFixture(t)
	s.Source.Set(nodeInventory(coretest.GPUs(2)))
	next := openFingerprint(t, nomadtest.Serve(t, s.Plugin))
	next()
	gone, obs := core.Reconcile(coretest.GPUs(2), gpu.NoDriver(gpu.DriverFailed, "ERROR_GPU_IS_LOST"))
	s.Source.Set(nodeInventory(gone, obs...))
	for _, d := range next()[0].Devices {
		if d.Healthy || !strings.HasPrefix(d.HealthDesc, "unknown: driver is not usable (ERROR_GPU_IS_LOST) since ") {
			t.Errorf("%s: healthy %t, %q", d.ID, d.Healthy, d.HealthDesc)
		}
	}
	s.Source.Set(nodeInventory(gpu.NoDriver(gpu.DriverAbsent, "no library")))
	if gs := next(); len(gs) != 0 {
		t.Errorf("without devices: %v", gs)
	}
	s.Source.Set(nodeInventory(coretest.GPUs(1)))
	if gs := next(); len(gs) != 1 || !gs[0].Devices[0].Healthy {
		t.Errorf("not recovered: %v", gs)
	}
}

func TestDisabled(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"enabled": false})
	p := nomadtest.Serve(t, s.Plugin)
	next := openFingerprint(t, p)
	if gs := next(); len(gs) != 0 {
		t.Errorf("disabled: %v", gs)
	}
	if _, err := p.Reserve([]string{"GPU-1"}); err == nil || !errorContains(err, "device is not enabled") {
		t.Errorf("Reserve: %v", err)
	}
	stats := openStats(t.Context(), t, p, time.Hour)
	if r := receive(t, stats); r.Error != nil || len(r.Groups) != 0 {
		t.Errorf("Stats: %+v", r)
	}
	if n := len(s.Started()); n != 0 {
		t.Errorf("%d sources were started", n)
	}
	// The stream is still open.
	s.Source.Set(nodeInventory(coretest.GPUs(1)))
	s.mustConfigure(t, map[string]any{})
	if gs := next(); len(gs) != 1 {
		t.Errorf("enabled: %v", gs)
	}
}
