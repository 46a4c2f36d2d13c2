package nomadadapter

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"google.golang.org/grpc"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// sentStats is a plugin whose responses the test sends.
type sentStats struct {
	*Plugin
	responses chan *device.StatsResponse
	option    grpc.ServerOption
}

// newSentStats returns p with the responses of the test, and an option for its server.
func newSentStats(p *Plugin, option func(device.DevicePlugin) grpc.ServerOption) sentStats {
	s := sentStats{Plugin: p, responses: make(chan *device.StatsResponse)}
	s.option = option(s)
	return s
}

// noOption leaves the server as Nomad's device.PluginDevice makes it.
func noOption(device.DevicePlugin) grpc.ServerOption { return grpc.EmptyServerOption{} }

func (s sentStats) ServerOption() grpc.ServerOption { return s.option }

func (s sentStats) Stats(context.Context, time.Duration) (<-chan *device.StatsResponse, error) {
	return s.responses, nil
}

// Nomad's client receives the same from the server of this plugin and from that of device.PluginDevice.
func TestEncodedOnceLikeByNomad(t *testing.T) {
	statsOf := func(inv *inventory.Allocatable, used ...gpu.Usage) *device.StatsResponse {
		var s statsGroups
		s.update(&groupNamer{}, inv, config.GroupByNone)
		return &device.StatsResponse{Groups: s.stats(used, time.Unix(1_800_000_000, 987_654_321))}
	}
	extreme := usage(1)
	extreme.GPU, extreme.Memory, extreme.Temperature = gpu.OptionalUint64Of(0), gpu.OptionalUint64Of(math.MaxUint64), gpu.OptionalUint64{}
	extreme.At = time.Unix(-1, 5)
	responses := []*device.StatsResponse{
		statsOf(nodeInventory(coretest.GPUs(3), lost(2)), usage(0), extreme),
		statsOf(inventoryUnder(mixedPolicy, coretest.GPUs(8), lost(3)), usage(0), usage(3), usage(5)),
		{Groups: []*device.DeviceGroupStats{newGroupStats("gpu", h100, 0), newGroupStats("gpu-mps", h100, 0)}},
		statsOf(sharedGPUs(16, 100, lost(15)), usage(0), extreme), // larger than the responses before and after
		{},
		statsOf(nodeInventory(coretest.GPUs(1)), usage(0)),
	}
	plugin := newFixture(t, nil).Plugin
	ours, nomads := newSentStats(plugin, encodeOnce), newSentStats(plugin, noOption)
	received := openStats(t.Context(), t, nomadtest.Serve(t, ours), time.Hour)
	want := openStats(t.Context(), t, nomadtest.Serve(t, nomads), time.Hour)
	for _, r := range responses {
		ours.responses <- r
		nomads.responses <- r
		checkEqual(t, "response", receive(t, want), receive(t, received))
	}
}
