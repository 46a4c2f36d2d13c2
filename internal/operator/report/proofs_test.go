package report_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// provedReport is a node whose GPUs have been proved, or not: two MIG instances are of one GPU.
func provedReport(t *testing.T) report.Report {
	t.Helper()
	at := time.Date(2026, 11, 27, 9, 30, 0, 0, time.UTC)
	passed := &proof.Verdict{Passed: true, Reason: proof.Boot, At: at, Took: 31 * time.Second, Summary: "passed: NVIDIA H100 80GB HBM3, 71.1 GiB of memory", Values: map[string]float64{"memory_gbps": 2400}}
	failed := &proof.Verdict{Reason: proof.Reset, At: at, Took: time.Second, Summary: strings.Repeat("a word of memory is wrong, ", 9)}
	var r report.Report
	for i := range 6 {
		r.Devices = append(r.Devices, report.Device{ID: coretest.GPU(i), GPU: coretest.GPU(i), Index: i, Model: "NVIDIA H100 80GB HBM3"})
	}
	for i := range 2 {
		r.Devices = append(r.Devices, report.Device{ID: gpu.DeviceID(fmt.Sprint("MIG-", i)), GPU: coretest.GPU(6), Index: 6, Instance: &i, Model: "NVIDIA H100 80GB HBM3 MIG 3g.40gb"})
	}
	r.Devices[5].Index = -1
	r.Devices[2].Processes = []report.Process{{PID: 4711}}
	return r.WithProofs(proof.Result{
		State: proof.State{Records: []proof.Record{
			{GPU: coretest.GPU(0), Last: passed},
			{GPU: coretest.GPU(1), Last: failed, NeedsService: true},
			{GPU: coretest.GPU(2), Last: passed, Running: &proof.Running{Number: 3, Reason: proof.Idle, Began: at.Add(time.Hour - 33*time.Second), Runs: at.Add(time.Hour)}},
			{GPU: coretest.GPU(3), Tries: &proof.Tries{Count: 2, At: at, Retry: at.Add(6 * time.Hour), Detail: "exit status 127"}},
			{GPU: coretest.GPU(4), Running: &proof.Running{Number: 4, Reason: proof.Boot, Began: at}},
			{GPU: coretest.GPU(6), Last: passed},
		}},
		Waits: []proof.Wait{
			{GPU: coretest.GPU(0), Code: proof.WaitDue, Text: "its last proof is not old enough", Until: at.Add(150 * time.Hour)},
			{GPU: coretest.GPU(1), Code: proof.WaitService, Text: "it failed again after a reset or a boot: it needs service", Alert: true},
			{GPU: coretest.GPU(3), Code: proof.WaitBackOff, Text: "the check could not run: exit status 127", Until: at.Add(6 * time.Hour)},
			{GPU: coretest.GPU(6), Code: proof.WaitHeld, Text: "pod train/a-long-name-of-a-pod-0, pod train/a-long-name-of-a-pod-1 and 5 more has it"},
		},
	})
}

// The table of proofs fits a screen however long a summary is; a GPU with MIG instances is one row. A proof is the owner of its GPU in top.
func TestProofs(t *testing.T) {
	r := provedReport(t)
	var all bytes.Buffer
	check.NoError(t, r.WriteTable(&all))
	_, table, _ := strings.Cut(all.String(), "PROOF")
	all.Reset()
	check.NoError(t, r.WriteTop(&all, "k8s-gpu", topNow, report.Screen{Columns: 100}))
	goldenfile.Compare(t, "testdata/proofs.txt", "GPU PROOF"+table+"\n"+all.String()+"\n")
	if _, text := render(t, r); !strings.Contains(text, strings.Repeat("a word of memory is wrong, ", 9)) {
		t.Error("the JSON has not the whole summary")
	}
}
