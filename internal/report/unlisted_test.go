package report_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/report"
)

// What the kernel log has of a PCI address without a GPU is said where the operator looks for it: with the GPU that was
// seen there and can't be read, else in a note.
func TestXIDsOfGPUsThatAreNotListed(t *testing.T) {
	cfg, reading := core.DefaultConfig(), coretest.GPUs(1)
	reading.Excluded = []core.Exclusion{{Index: 1, PCI: "0000:5a:00.0", Failure: core.FailureLost, Reason: "GPU is lost"}}
	s := core.NewState(cfg).Read(cfg, time.Now(), reading)
	for _, pci := range []core.PCIAddress{"0000:5a:00.0", "0000:fe:00.0"} {
		for _, code := range []uint64{79, 154, 79} {
			s = s.Observe(cfg, time.Now(), core.Observation{PCI: pci, Kind: core.XID, Code: code, FromKernelLog: true})
		}
	}
	r := report.DescribeState(s, cfg, "a note")
	if want := []string{"a note", "the kernel log has XID 79, 154 of 0000:fe:00.0, where no GPU is listed"}; !slices.Equal(r.Warnings, want) {
		t.Errorf("notes: %q", r.Warnings)
	}
	if len(r.Excluded) != 1 || r.Excluded[0].Reason != "GPU is lost; the kernel log has XID 79, 154" {
		t.Errorf("excluded: %+v", r.Excluded)
	}
}
