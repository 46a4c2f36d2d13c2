package deviceconfig

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const driver = "gpu.nvidia.com"

func config(source, kind, rest string, requests ...string) kubeapi.DeviceAllocationConfiguration {
	text := `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + kind + `"` + rest + `}`
	return kubeapi.DeviceAllocationConfiguration{Source: source, Requests: requests, Opaque: &kubeapi.OpaqueConfiguration{Driver: driver, Parameters: []byte(text)}}
}

func claim(kind, sharing string, requests ...string) kubeapi.DeviceAllocationConfiguration {
	return config("FromClaim", kind, `,"sharing":`+sharing, requests...)
}

var (
	exclusive = inventory.Unit{Device: gpu.Device{ID: "GPU-1"}, Pool: "gpu"}
	sliced    = inventory.Unit{Device: gpu.Device{ID: "GPU-2"}, Pool: "gpu.shared", Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}
	mps       = inventory.Unit{Device: gpu.Device{ID: "GPU-3"}, Pool: "gpu.mps", Sharing: inventory.Sharing{Mode: inventory.MPS, Replicas: 4, Threads: 50, Memory: 8 << 30}}
	instance  = inventory.Unit{Device: gpu.Device{ID: "MIG-1", Profile: "1g.10gb"}, Pool: "mig"}
)

// What asks for what the node does is accepted; anything else is refused by its name, with a remedy.
func TestConfigurations(t *testing.T) {
	const limits = `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":20,"defaultPinnedDeviceMemoryLimit":"4Gi","multiUser":false,"defaultPerDevicePinnedMemoryLimit":{}}}`
	type all = []kubeapi.DeviceAllocationConfiguration
	foreign := kubeapi.DeviceAllocationConfiguration{Source: "FromClaim", Opaque: &kubeapi.OpaqueConfiguration{Driver: "nic.example.com", Parameters: []byte(`{"kind":"Nonsense"`)}}
	raw := func(text string) all {
		return all{{Source: "FromClaim", Opaque: &kubeapi.OpaqueConfiguration{Driver: driver, Parameters: []byte(text)}}}
	}
	limited := mps.Sharing
	limited.Threads, limited.Memory = 20, 4<<30
	for name, c := range map[string]struct {
		configs all
		request string
		unit    inventory.Unit
		want    inventory.Sharing
		err     string // in the error
	}{
		"none":                     {unit: mps, want: mps.Sharing},
		"foreign driver":           {configs: all{foreign, {Source: "FromClass"}}, unit: exclusive},
		"no sharing":               {configs: all{config("FromClaim", "GpuConfig", "")}, unit: exclusive},
		"time-slicing by default":  {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Default"}}`)}, unit: exclusive},
		"of a shared device":       {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing"}`)}, unit: sliced, want: sliced.Sharing},
		"MPS":                      {configs: all{claim("GpuConfig", limits)}, unit: mps, want: limited},
		"MIG":                      {configs: all{claim("MigDeviceConfig", `{"strategy":"TimeSlicing"}`)}, unit: instance},
		"GpuConfig beside MIG":     {configs: all{claim("GpuConfig", `{"strategy":"MPS"}`)}, unit: instance},
		"claim over class":         {configs: all{claim("GpuConfig", limits), config("FromClass", "GpuConfig", `,"sharing":{"strategy":"TimeSlicing"}`)}, unit: mps, want: limited},
		"the later one":            {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing"}`), claim("GpuConfig", limits)}, unit: mps, want: limited},
		"of another request":       {configs: all{claim("GpuConfig", `{"strategy":"MPS"}`, "other")}, request: "gpu", unit: exclusive},
		"of the request":           {configs: all{claim("GpuConfig", `{"strategy":"MPS"}`, "gpu")}, request: "gpu/large", unit: exclusive, err: "claim, config 0: sharing.strategy MPS: device GPU-1 is exclusive on this node; ask for a class"},
		"of the subrequest":        {configs: all{claim("GpuConfig", `{"strategy":"MPS"}`, "gpu/large")}, request: "gpu/large", unit: sliced, err: "is time-slicing by 4 on this node"},
		"of another subrequest":    {configs: all{claim("GpuConfig", `{"strategy":"MPS"}`, "gpu/small")}, request: "gpu/large", unit: exclusive},
		"time-slicing of MPS":      {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing"}`)}, unit: mps, err: "sharing.strategy TimeSlicing: device GPU-3 is shared by MPS"},
		"kind of another device":   {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing"}`, "gpu")}, request: "gpu", unit: instance, err: "GpuConfig can't apply to request \"gpu\", whose device MIG-1 needs MigDeviceConfig"},
		"more threads":             {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":60}}`)}, unit: mps, err: "defaultActiveThreadPercentage 60: a client of pool gpu.mps has at most 50"},
		"more memory":              {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"10Gi"}}`)}, unit: mps, err: "10240Mi: a client of pool gpu.mps has at most 8192Mi"},
		"interval":                 {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`)}, err: "sharing.timeSlicingConfig.interval Long is not supported: this agent does not change the time slice"},
		"unknown interval":         {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"long"}}`)}, err: `interval "long" is not known`},
		"unknown field":            {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"threads":3}}`)}, err: "field sharing.mpsConfig.threads is not known; known are defaultActiveThreadPercentage"},
		"case of a field":          {configs: all{claim("GpuConfig", `{"Strategy":"MPS"}`)}, err: "field sharing.Strategy is not known"},
		"intervals of MIG":         {configs: all{claim("MigDeviceConfig", `{"strategy":"TimeSlicing","timeSlicingConfig":{}}`)}, err: "field sharing.timeSlicingConfig is not known"},
		"no strategy":              {configs: all{claim("GpuConfig", `{}`)}, err: "sharing.strategy is missing"},
		"unknown strategy":         {configs: all{claim("GpuConfig", `{"strategy":"vGPU"}`)}, err: `sharing.strategy "vGPU" is not supported: it is TimeSlicing or MPS`},
		"config of another":        {configs: all{claim("GpuConfig", `{"strategy":"TimeSlicing","mpsConfig":{}}`)}, err: "sharing.mpsConfig needs the strategy MPS"},
		"several users":            {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"multiUser":true}}`)}, err: "multiUser is not supported"},
		"limits by device":         {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi"}}}`)}, err: "defaultPerDevicePinnedMemoryLimit is not supported"},
		"percent":                  {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":101}}`)}, err: "101 is not a number from 1 to 100"},
		"amount":                   {configs: all{claim("GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"a lot"}}`)}, err: `"a lot" is not an amount of at least 1Mi`},
		"virtual machines":         {configs: all{config("FromClass", "VfioDeviceConfig", "")}, err: "class, config 0: VfioDeviceConfig is not supported"},
		"compute domain":           {configs: all{config("FromClaim", "ComputeDomainChannelConfig", "")}, err: "ComputeDomainChannelConfig is not supported"},
		"unknown kind":             {configs: all{config("FromClaim", "GPUConfig", "")}, err: "kind GPUConfig is not supported"},
		"another version":          {configs: raw(`{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`), err: `GpuConfig of apiVersion "resource.nvidia.com/v1" is not supported`},
		"no object":                {configs: raw(`[]`), err: "parameters are not an object"},
		"all problems at once":     {configs: append(raw(`{}`), config("FromClass", "VfioDeviceConfig", "")), err: "claim, config 0:"},
		"all problems, the second": {configs: append(raw(`{}`), config("FromClass", "VfioDeviceConfig", "")), err: "class, config 1: VfioDeviceConfig"},
	} {
		t.Run(name, func(t *testing.T) {
			configs, err := Parse(c.configs, driver)
			var got inventory.Sharing
			if err == nil {
				got, err = configs.For(c.request, c.unit)
			}
			if c.err != "" {
				if _, typed := errors.AsType[*Error](err); !typed || !strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "\n") {
					t.Errorf("%v, want %q", err, c.err)
				}
				return
			}
			if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
				t.Error(err, diff)
			}
		})
	}
}

func TestParseMemory(t *testing.T) {
	for text, want := range map[string]uint64{
		`"1Mi"`: 1 << 20, `"1.5Gi"`: 3 << 29, `"2G"`: 2e9, `1048576`: 1 << 20, `"8192Mi"`: 8 << 30, `"1Ti"`: 1 << 40,
		`"4e9"`: 4e9, `4e9`: 4e9, `"2000000000000m"`: 2e9, `"0.000001P"`: 1e9,
		`"1Ki"`: 0, `""`: 0, `"Gi"`: 0, `"-1Gi"`: 0, `"1e999999999"`: 0, `"1/3"`: 0, `"9999999Ti"`: 0, `"1m"`: 0, `{}`: 0,
	} {
		if got := parseMemory([]byte(text)); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
}
