package report_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/report"
)

func TestMissingDeviceNodes(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.DeviceNodes = true
	reading := coretest.GPUs(3)
	reading.Nodes = slices.DeleteFunc(reading.Nodes, func(n string) bool { return n == "/dev/nvidia-uvm" || n == "/dev/nvidia2" })
	r := report.DescribeState(report.Read(t.Context(), coretest.NewMachine(reading).Open, cfg, nil), cfg)
	var table, text bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"device nodes missing (GPU 0, 1): /dev/nvidia-uvm: run nvidia-modprobe -c0 -u\n",
		"device nodes missing (GPU 2): /dev/nvidia-uvm, /dev/nvidia2: run nvidia-modprobe -c0 -u && nvidia-modprobe -c2\n",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no line %s in\n%s", want, table.String())
		}
	}
	if err := r.WriteJSON(&text); err != nil {
		t.Fatal(err)
	}
	var back report.Report
	if err := json.Unmarshal(text.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	for i, d := range back.Devices {
		if want := 1 + i/2; len(d.MissingNodes) != want || d.CreateNodesCommand == "" || !d.Schedulable || !strings.Contains(d.Health, "missing /dev/nvidia-uvm") {
			t.Errorf("%+v", d)
		}
	}
}
