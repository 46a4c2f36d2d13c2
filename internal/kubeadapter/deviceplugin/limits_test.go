package deviceplugin

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// limitedServer serves shares of one GPU whose memory is limited to 20 GiB, with a set of strategies.
func limitedServer(mode inventory.LimitMode, set ...string) *server {
	c, lists := withStrategies(mixedConfig(), set)
	c.API = inventory.DevicePlugin
	c.Policy = inventory.Policy{Limits: inventory.LimitPolicy{On: true, Reserve: 1 << 30}, Rules: []inventory.Rule{{
		Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, Memory: 20 << 30, Limit: mode},
	}}}
	s := coretest.GPUs(1)
	defines := definesAll(s, "k8s.device-plugin.nvidia.com/gds=all")
	defines.LimitKind, defines.Limits = "k8s.device-plugin.nvidia.com/memory-limit", []uint64{20 << 30, 40 << 30, 60 << 30}
	host := inventory.Host{CDI: defines, Limits: &inventory.Limits{Backend: "misc", Withheld: map[gpu.DeviceID]inventory.LimitMissing{coretest.GPU(0): {}}}}
	srv := newTestServer("nvidia.com/gpu.shared", core.Build(s, health.Ledger{}, c).WithHost(host, c.Overlap))
	srv.opts.Lists = lists
	return srv
}

// Fence 29: the limit is the name of a CDI device behind the GPU's, with every strategy that has names, and no variable: of two equal variables the hook reads the first, which can
// be the image's.
func TestLimitIsOnlyACDIName(t *testing.T) {
	names := []string{cdiKind + "=" + gpuIDs(0)[0], "k8s.device-plugin.nvidia.com/gds=all", "k8s.device-plugin.nvidia.com/memory-limit=40960"}
	for _, mode := range []inventory.LimitMode{inventory.LimitRequired, inventory.LimitBestEffort} {
		got := allocated(t, limitedServer(mode, "cdi-cri", "cdi-annotations"), replica(0, 0), replica(0, 2))
		want := &v1beta1.ContainerAllocateResponse{Annotations: map[string]string{
			"cdi.k8s.io/nvidia-device-plugin_" + listHash("nvidia.com/gpu.shared", strings.Join(names, ",")): strings.Join(names, ","),
		}}
		for _, n := range names {
			want.CdiDevices = append(want.CdiDevices, &v1beta1.CDIDevice{Name: n})
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s: %s", mode, diff)
		}
	}
}

// Strategies without CDI can't give a limit: a container of a pool that requires one gets no share, and one of a pool with best effort the response of a pool without limits.
func TestStrategiesWithoutCDIHaveNoLimits(t *testing.T) {
	for _, set := range [][]string{{"envvar"}, {"volume-mounts"}} {
		if r, err := limitedServer(inventory.LimitRequired, set...).Allocate(t.Context(), allocateRequest([]string{replica(0, 0)})); err == nil || !strings.Contains(err.Error(), "no limit of memory") {
			t.Errorf("%v: %v, %v", set, r, err)
		}
		want := allocated(t, limitedServer(inventory.LimitNone, set...), replica(0, 0))
		if diff := cmp.Diff(want, allocated(t, limitedServer(inventory.LimitBestEffort, set...), replica(0, 0)), protocmp.Transform()); diff != "" {
			t.Errorf("%v: %s", set, diff)
		}
	}
}
