package report_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/report"
)

// on selects GPUs by index.
func on(indices ...int) (s inventory.Selector) {
	for _, i := range indices {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: i, Instance: -1})
	}
	return s
}

// shared is a host with each kind of rule that a policy can have.
func shared() (core.State, core.Config) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Overlap = inventory.MIGMixed, inventory.OverlapRefuse
	cfg.Policy.Rules = []inventory.Rule{
		{Select: on(0), Pool: "h100"},
		{Select: on(1), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 100, OnePerRequest: true}},
		{Select: on(2), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 30 << 30, Threads: 50}},
		{Select: on(3), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 4, OnePerRequest: true}, Pool: "small"},
		{Select: on(4), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}},
		{Select: on(5), Reserve: "reserved by policy.yaml:12"},
		{Select: inventory.Selector{At: "policy.yaml:20: rules[6].select", IDs: []gpu.DeviceID{"GPU-x"}}, Pool: "unused"},
	}
	reading := coretest.WithMIG(coretest.GPUs(8), 6, "1g.10gb", "3g.40gb+me")
	for i := range reading.Devices {
		d := &reading.Devices[i]
		d.Serial, d.Architecture, d.Brand, d.ECC, d.NVLinks = "1650924", "Hopper", "NVIDIA", gpu.Enabled, 18
	}
	var checks []health.Observation
	for n := range 8 {
		checks = append(checks, health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Checked, Sample: health.Sample{RecoveryAction: health.RecoveryNone, Events: health.Yes}})
	}
	s := core.NewState(cfg).WithHost(cfg, time.Now(), inventory.Host{
		MPS: []string{"small"},
		Claims: []inventory.Claim{
			{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(4))}, {Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(7)), Older: true},
		},
	}).Read(cfg, time.Now(), reading, checks...)
	return s.Observe(cfg, time.Now(), health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 95}), cfg
}

// A device is one row however many units it has.
func TestSharedHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, cfg := shared()
		r := report.DescribeState(s, cfg)
		var table, text bytes.Buffer
		if err := r.WriteTable(&table); err != nil {
			t.Fatal(err)
		}
		if err := r.WriteJSON(&text); err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/shared.txt", table.Bytes())
		golden(t, "testdata/shared.json", text.Bytes())
	})
}

// While a change of the policy takes effect a device may be listed with its old and its new units.
func TestSharesThatChange(t *testing.T) {
	s, cfg := shared()
	cfg.Policy.Rules[4].Sharing = &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}
	s = s.Observe(cfg, time.Now())
	var rows []report.Device
	for _, d := range report.DescribeState(s, cfg).Devices {
		if d.Index == 4 {
			rows = append(rows, d)
		}
	}
	if len(rows) != 2 || rows[0].Replicas != 2 || !rows[0].Schedulable || rows[1].Replicas != 2 || rows[1].Cause != "WITHDRAWN" {
		t.Errorf("%+v", rows)
	}
}

// An empty list is [] in JSON, not null.
func TestEmptyLists(t *testing.T) {
	var text bytes.Buffer
	if err := report.DescribeState(core.State{}, core.DefaultConfig()).WriteJSON(&text); err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(text.Bytes(), &keys); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"devices", "excluded", "conditions", "counts", "policyWarnings", "bindings", "overlaps"} {
		if list, ok := keys[key].([]any); !ok || len(list) > 0 {
			t.Errorf("%s is %v", key, keys[key])
		}
	}
}
