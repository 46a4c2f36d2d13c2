package deviceplugin

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// The driver is unloaded and loaded again, and the goroutine that follows inventories is so late that it sees the end only:
//
//	inventory  driver 1, specified -> no driver -> driver 2, not specified yet -> driver 2, specified
//	offered    driver 1, specified                 nothing                        driver 2, specified
//
// A container with the specification for driver 1 could get device numbers and files of a driver that is gone. The inventory before is
// offered only while the driver is not another one: after a change of the policy.
func TestNothingIsOfferedByTheSpecificationOfAnEarlierDriver(t *testing.T) {
	c, l := withStrategies(mixedConfig(), []string{"cdi-cri"})
	now, machine := time.Unix(0, 0), coretest.GPUs(1)
	specified := func(s core.State) core.State {
		cdi := definesAll(machine)
		cdi.Incarnation = s.Incarnation
		return s.WithHost(c, now, inventory.Host{CDI: cdi})
	}
	first := specified(core.NewState(c).Read(c, now, machine))
	again := first.Read(c, now, gpu.NoDriver(gpu.DriverAbsent, "unloaded")).Read(c, now, machine)
	srv := newTestServer(kubeadapter.GPUResource, first.Allocatable)
	srv.opts.Lists = l
	id := string(coretest.GPU(0))
	allocated(t, srv, id)

	srv.tracker.setInventory(again.Allocatable)
	if response, err := srv.Allocate(t.Context(), allocateRequest([]string{id})); err == nil {
		t.Errorf("the specification is that of driver %d, the driver is %d: %v", first.Incarnation, again.Incarnation, response)
	}
	srv.tracker.setInventory(specified(again).Allocatable)
	allocated(t, srv, id)
}
