package report_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/report"
)

// XIDs in the kernel log at a PCI address without a listed GPU are reported with the GPU that is excluded there, else in a
// warning.
func TestXIDsOfGPUsThatAreNotListed(t *testing.T) {
	cfg, reading := core.DefaultConfig(), coretest.GPUs(1)
	reading.Excluded = []gpu.Exclusion{{Index: 1, PCI: "0000:5a:00.0", Failure: gpu.FailureLost, Reason: "GPU is lost"}}
	s := core.NewState(cfg).Read(cfg, time.Now(), reading)
	for _, pci := range []gpu.PCIAddress{"0000:5a:00.0", "0000:fe:00.0"} {
		for _, code := range []uint64{79, 154, 79} {
			s = s.Observe(cfg, time.Now(), health.Observation{PCI: pci, Kind: health.XID, Code: code, FromKernelLog: true})
		}
	}
	r := report.DescribeState(s, cfg, "a warning")
	if want := []string{"a warning", "the kernel log has XID 79, 154 of 0000:fe:00.0, where no GPU is listed"}; !slices.Equal(r.Warnings, want) {
		t.Errorf("warnings: %q", r.Warnings)
	}
	if len(r.Excluded) != 1 || r.Excluded[0].Reason != "GPU is lost; the kernel log has XID 79, 154" {
		t.Errorf("excluded: %+v", r.Excluded)
	}
}
