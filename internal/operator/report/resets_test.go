package report_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// resetReport is a node with GPUs that are reset, were reset, would be, or wait; GPU 7 has no fault.
func resetReport() report.Report {
	at := time.Date(2026, 11, 27, 9, 30, 0, 0, time.UTC)
	end := func(o reset.Outcome, text string) *reset.End {
		return &reset.End{Number: 3, Outcome: o, At: at, Took: 9 * time.Second, Cause: "XID_95", Text: text}
	}
	refusal := strings.Repeat("GPU 00000000:1A:00.0 is connected to other GPUs by NVLink, and they must be reset together ", 3)
	var r report.Report
	for i := range 8 {
		r.Devices = append(r.Devices, report.Device{ID: coretest.GPU(i), GPU: coretest.GPU(i), Index: i, Model: "NVIDIA H100 80GB HBM3"})
	}
	for i := range 2 {
		r.Devices = append(r.Devices, report.Device{ID: gpu.DeviceID("MIG-" + string(rune('0'+i))), GPU: coretest.GPU(8), Index: 8, Instance: &i, Model: "NVIDIA H100 80GB HBM3 MIG 3g.40gb"})
	}
	r.Devices[3].Index = -1
	return r.WithResets(reset.Result{
		State: reset.State{Begun: 12, Records: []reset.Record{
			{GPU: coretest.GPU(0), Last: end(reset.Done, "")}, // of an earlier fault
			{GPU: coretest.GPU(1), Attempts: 1, Last: end(reset.Refused, refusal)},
			{GPU: coretest.GPU(2), Attempts: 1, Last: end(reset.Done, ""), Running: &reset.Running{Number: 12, Cause: "XID_95", Began: at.Add(time.Hour), Called: true}},
			{GPU: coretest.GPU(3), Refusals: 3, Last: end(reset.InUse, "is open in dcgm-exporter (pid 2114)"), Retry: at.Add(30 * time.Minute)},
		}},
		Begin: []reset.Begin{{GPU: coretest.GPU(4), Cause: "XID_95"}},
		Waits: []reset.Wait{
			{GPU: coretest.GPU(1), Code: reset.WaitRefused, Text: "nvidia-smi does not reset it", Alert: true},
			{GPU: coretest.GPU(3), Code: reset.WaitBackOff, Text: "in-use: is open in dcgm-exporter (pid 2114)", Until: at.Add(30 * time.Minute), Alert: true},
			{GPU: coretest.GPU(5), Code: reset.WaitHeld, Text: "pod train/llm-0 has it"},
			{GPU: coretest.GPU(6), Code: reset.WaitHandedOver, Text: "the driver asks for another repair than a reset: NODE_REBOOT", Alert: true},
			{GPU: coretest.GPU(8), Code: reset.WaitMIG, Text: "a reset removes its MIG instances", Alert: true},
		},
	})
}

// The table of resets has GPUs that are faulty, or were reset; a GPU with MIG instances is one row. A reset is the owner of its GPU in top.
func TestResets(t *testing.T) {
	r := resetReport()
	var all bytes.Buffer
	check.NoError(t, r.WriteTable(&all))
	_, table, _ := strings.Cut(all.String(), "RESET")
	all.Reset()
	check.NoError(t, r.WriteTop(&all, "nomad-gpu", topNow, report.Screen{Columns: 100}))
	goldenfile.Compare(t, "testdata/resets.txt", "GPU RESET"+table+"\n"+all.String()+"\n")
	if _, text := render(t, r); !strings.Contains(text, r.Resets[1].Text) || !strings.Contains(text, `"waitsFor": "HELD"`) {
		t.Error("the JSON has not everything")
	}
	if none := r.WithResets(reset.Result{}); none.Resets != nil {
		t.Errorf("no GPU was reset: %+v", none.Resets)
	}
}
