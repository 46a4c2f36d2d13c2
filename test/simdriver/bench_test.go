package simdriver_test

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// What the simulated driver itself costs a call: two stats and a mutex.
func BenchmarkCall(b *testing.B) {
	dev := open(b, "h100x8").gpu(0)
	b.ReportAllocs()
	for b.Loop() {
		if _, ret := dev.GetTemperature(nvml.TEMPERATURE_GPU); ret != nvml.SUCCESS {
			b.Fatal(ret)
		}
	}
}
