package nodelabels

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

func read(c core.Config, s gpu.Snapshot) core.State {
	return core.NewState(c).Read(c, time.Unix(1e9, 0), s)
}

// What NVIDIA's program can't have, because its file has no policy for single GPUs, and what it leaves to chance.
func TestLabelsOfOwnPolicies(t *testing.T) {
	one := func(n int) inventory.Selector { return inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(n)}} }
	slices4 := &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}
	other := coretest.GPUs(3)
	other.Devices[0].Model = "NVIDIA A30"
	for name, c := range map[string]struct {
		rules   []inventory.Rule
		machine gpu.Snapshot
		want    map[string]string
	}{
		"some GPUs are shared under their own name": {
			[]inventory.Rule{{Select: one(0), Sharing: slices4}}, coretest.GPUs(2),
			map[string]string{"gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none"},
		},
		"all GPUs are shared under their own name": {
			[]inventory.Rule{{Sharing: slices4}}, coretest.GPUs(2),
			map[string]string{"gpu.count": "2", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", "gpu.product": "NVIDIA-H100-80GB-HBM3"},
		},
		"all GPUs are shared under the name of whole ones": {
			[]inventory.Rule{{Sharing: slices4, Pool: "gpu"}}, coretest.GPUs(2),
			map[string]string{"gpu.replicas": "4", "gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"},
		},
		"a GPU is reserved": {
			[]inventory.Rule{{Select: one(1), NotOffered: "display"}}, coretest.GPUs(2),
			map[string]string{"gpu.count": "2", "gpu.replicas": "1"},
		},
		"instances of one GPU by a rule": {
			[]inventory.Rule{{Select: one(0), MIG: inventory.MIGMixed}}, coretest.WithMIG(coretest.GPUs(2), 0, "1g.10gb", "3g.40gb"),
			map[string]string{"mig.strategy": "mixed", "mig-1g.10gb.count": "1", "mig-3g.40gb.count": "1", "gpu.count": "2"},
		},
		"two models": {nil, other, map[string]string{"gpu.count": "2", "gpu.product": "NVIDIA-H100-80GB-HBM3"}},
	} {
		cfg := core.DefaultConfig()
		cfg.Policy.Rules = c.rules
		l := Of(read(cfg, c.machine), cfg.MIG, Host{})
		for label, want := range c.want {
			if got := l[prefix+label]; got != want {
				t.Errorf("%s: %s = %q, want %q", name, label, got, want)
			}
		}
	}
}

// A container without SYS_ADMIN can't read the configuration spaces: whether the GPUs are virtual is then what the driver reports, of all of them or not at
// all, and nothing is known of the driver on their host.
func TestVGPUByTheDriver(t *testing.T) {
	const present = prefix + "vgpu.present"
	for name, c := range map[string]struct {
		driver []health.Tristate // of each GPU
		host   Host
		want   string
	}{
		"physical GPUs":          {driver: []health.Tristate{health.No, health.No}, want: "false"},
		"virtual GPUs":           {driver: []health.Tristate{health.Yes, health.Yes}, want: "true"},
		"one is virtual":         {driver: []health.Tristate{health.No, health.Yes}, want: "true"},
		"one is not known":       {driver: []health.Tristate{health.No, health.NotReported}, want: ""},
		"not checked yet":        {driver: []health.Tristate{health.NotReported, health.NotReported}, want: ""},
		"the bus is more exact":  {driver: []health.Tristate{health.No, health.No}, host: Host{VGPUKnown: true, VGPU: true, HostDriver: "460.16"}, want: "true"},
		"the bus without driver": {driver: []health.Tristate{health.NotReported, health.NotReported}, host: Host{VGPUKnown: true}, want: "false"},
	} {
		cfg := core.DefaultConfig()
		s := read(cfg, coretest.GPUs(2))
		for i, v := range c.driver {
			s = s.Observe(cfg, time.Unix(1e9, 0), health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.Checked, Sample: health.Sample{VGPU: v}})
		}
		l := Of(s, cfg.MIG, c.host)
		if version := l[prefix+"vgpu.host-driver-version"]; l[present] != c.want || version != c.host.HostDriver {
			t.Errorf("%s: %q, host driver %q; want %q", name, l[present], version, c.want)
		}
	}
}

// No machine type, model or version makes a file that NFD reads otherwise than it was meant.
func FuzzText(f *testing.F) {
	f.Add("Simulated (R) machine", "NVIDIA H100\n", "570.124.06", "12.8")
	f.Fuzz(func(t *testing.T, machine, model, driver, cuda string) {
		s := coretest.GPUs(1)
		s.Devices[0].Model = model
		if strings.ContainsAny(driver+cuda, "\n\r=") {
			return // NVML's versions are numbers
		}
		s.Driver.Version, s.Driver.CUDA = driver, cuda
		l := Of(read(core.DefaultConfig(), s), inventory.MIGNone, Host{Machine: machine})
		back, _ := parse(l.at(time.Unix(1e9, 0)).Text())
		if len(back) != len(l) {
			t.Fatalf("%q became %q", l, back)
		}
		for name, value := range l {
			if back[name] != value {
				t.Errorf("%s: %q became %q", name, value, back[name])
			}
		}
	})
}

// Any 256 bytes can be a configuration space.
func FuzzVGPU(f *testing.F) {
	config := make([]byte, configSize)
	config[statusByte], config[capabilityList] = statusHasList, 0xd0
	copy(config[0xd0:], "\x09\x00\x1bVF\x00\x16460.16\x00\x00\x00\x00r460_00\x00\x00\x00\x00")
	f.Add(config)
	f.Fuzz(func(t *testing.T, config []byte) {
		if len(config) < configSize {
			return
		}
		if record, ok := vgpuRecord(config); ok {
			if version, branch := hostDriver(record); len(version) > versionLength || len(branch) > versionLength {
				t.Errorf("%q, %q", version, branch)
			}
		}
	})
}
