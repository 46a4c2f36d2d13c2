package nvidia

import (
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestUsage(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	for key, value := range map[string]string{
		"power_usage": "301500 mW", "utilization_gpu": "97", "utilization_memory": "41", "encoder": "3", "decoder": "4",
		"temperature": "63 C", "memory_used": "1024 MiB", "bar1_used": "7 MiB", "ecc_l1": "1", "ecc_l2": "2", "ecc_device": "3",
	} {
		must(t, m.Set(5, key, value))
	}
	s := open(t, m)
	snapshot(t, s)
	usage, err := s.Usage()
	must(t, err)
	const mib = 1 << 20
	want := core.Usage{
		Device: core.DeviceID(m.UUID(5)),
		Power:  core.GaugeOf(301500), PowerLimit: core.GaugeOf(400000), Temperature: core.GaugeOf(63),
		GPU: core.GaugeOf(97), Memory: core.GaugeOf(41), Encoder: core.GaugeOf(3), Decoder: core.GaugeOf(4),
		// What the driver reserves counts as used.
		MemoryUsed: core.GaugeOf((1024 + 615) * mib), MemoryTotal: core.GaugeOf(81920 * mib),
		BAR1Used: core.GaugeOf(7 * mib), BAR1Total: core.GaugeOf(131072 * mib),
		ECCL1: core.GaugeOf(1), ECCL2: core.GaugeOf(2), ECCMemory: core.GaugeOf(3),
	}
	got := map[core.DeviceID]core.Usage{}
	for _, u := range usage {
		got[u.Device] = u
	}
	if len(usage) != 20 || len(got) != 20 {
		t.Errorf("%d entries for %d devices, want 20", len(usage), len(got))
	}
	// NVIDIA's driver answers all of it for a GPU in MIG mode but the utilisation; so does this one or not.
	parent := got[want.Device]
	if !parent.GPU.OK {
		want.GPU, want.Memory, want.Encoder, want.Decoder = core.Gauge{}, core.Gauge{}, core.Gauge{}, core.Gauge{}
	}
	if diff := gocmp.Diff(want, parent); diff != "" {
		t.Error(diff)
	}
	instances, err := m.Instances(5)
	must(t, err)
	u := got[core.DeviceID(instances[0])]
	if u.MemoryTotal != core.GaugeOf(40192*mib) || u.GPU.OK || u.Encoder.OK {
		t.Errorf("instance: %+v", u)
	}
}
