package explain_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// adapter responds with what it is given.
var adapter = explain.Adapter{
	Name: func(u inventory.Unit) string { return "example.com/" + u.Pool },
	Respond: func(p inventory.Plan) explain.Response {
		r := explain.Response{Env: map[string]string{"DEVICES": p.VisibleDevices()}, CDIDevices: p.CDI}
		for _, n := range p.Nodes {
			r.DeviceNodes = append(r.DeviceNodes, explain.Node{HostPath: "/host" + n.Path, ContainerPath: n.Path, Permissions: n.Permissions})
		}
		return r
	},
	Notes: func(_ *inventory.Allocatable, units []inventory.Unit, n int) []string {
		return []string{fmt.Sprint("note on ", len(units), " ", n)}
	},
}

// input is a node with devices that are offered, excluded, hidden, unhealthy, claimed, held and not readable.
func input() explain.Input {
	index := func(at string, numbers ...int) inventory.Selector {
		s := inventory.Selector{At: at}
		for _, n := range numbers {
			s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: n, Instance: -1})
		}
		return s
	}
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Exclude, cfg.Overlap = inventory.MIGMixed, []gpu.DeviceID{coretest.GPU(7)}, inventory.OverlapRefuse
	cfg.Injection = inventory.Injection{Name: "auto", Runtime: true, CDI: inventory.CDIAuto}
	cfg.Policy.Rules = []inventory.Rule{
		{Select: index("p.yaml:3: rules[0].select", 0), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}},
		{Select: index("p.yaml:4: rules[1].select", 6), NotOffered: "reserved by p.yaml:4"},
		{Select: index("p.yaml:5: rules[2].select", 0, 6), Pool: "late"},
		{Select: index("p.yaml:6: rules[3].select", 5), Injection: &inventory.Injection{Name: "devices", Nodes: true}},
	}
	s := coretest.WithMIG(coretest.GPUs(8), 1, "1g.10gb", "1g.10gb")
	s.Excluded = []gpu.Exclusion{{Index: 9, PCI: "0000:ff:00.0", Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: Unknown Error"}}
	at := time.Unix(1_700_000_000, 0).UTC()
	state := core.NewState(cfg).Read(cfg, at, s)
	state = state.Observe(cfg, at, health.Observation{At: gpu.WholeGPU(coretest.GPU(2)), Kind: health.XID, Code: 95})
	state = state.WithHost(cfg, at, inventory.Host{
		Peers: []inventory.PeerDevice{{Agent: "other-agent", At: gpu.WholeGPU(coretest.GPU(3)), Earlier: true}},
		CDI:   &inventory.CDI{Incarnation: state.Incarnation, Kind: "x/gpu", Reason: "hooks are not found"},
	})
	return explain.Input{State: state, Adapter: adapter, Use: use.Table{HoldersKnown: true, Devices: []use.Device{{
		ID: coretest.GPU(4), Holders: []holders.Holder{{Work: holders.Work{Namespace: "default", Name: "train-0", Container: "main"}, Unit: inventory.UnitID(coretest.GPU(4)), Device: coretest.GPU(4)}},
	}}}}
}

func TestExplain(t *testing.T) {
	var all bytes.Buffer
	for _, args := range []explain.Args{
		{}, {Devices: []string{"5"}}, {Devices: []string{"0", "2"}}, {Devices: []string{"1"}}, {Devices: []string{"1:1", "6", "9"}}, {Devices: []string{string(coretest.GPU(0)) + "::1"}},
		{Count: 1}, {Count: 2, Devices: []string{"5"}}, {Count: 2, Devices: []string{"4"}}, {Count: 1, Pool: "x/gpu.shared"}, {Pool: "mig-1g.10gb"}, {Count: 9},
		{Devices: []string{"10", "gpu-00", "0000:ff:00.0", "nothing"}, Pool: "gpu.share"}, {Devices: []string{"0"}, Pool: "gpu", Count: 1},
	} {
		fmt.Fprintf(&all, "=== %v pool %q count %d\n", args.Devices, args.Pool, args.Count)
		e, err := explain.Explain(input(), args)
		if err != nil {
			fmt.Fprintln(&all, err)
			continue
		}
		check.NoError(t, e.Write(&all))
	}
	goldenfile.Compare(t, "testdata/explain.txt", all.String())
	e, err := explain.Explain(input(), explain.Args{Count: 2})
	var text strings.Builder
	if err == nil {
		err = report.WriteJSON(&text, e)
	}
	check.NoError(t, err)
	goldenfile.Compare(t, "testdata/explain.json", text.String())
}

// Without a driver there is nothing to explain, and no error.
func TestExplainNothing(t *testing.T) {
	in := explain.Input{State: core.NewState(core.DefaultConfig()), Adapter: adapter}
	if e, err := explain.Explain(in, explain.Args{}); err != nil || len(e.Devices) != 0 {
		t.Errorf("%+v, %v", e, err)
	}
	for _, args := range []explain.Args{{Count: 1}, {Devices: []string{"0"}}} {
		if _, err := explain.Explain(in, args); err == nil {
			t.Errorf("%+v: no error", args)
		}
	}
}

// When GPUs are proved, and reset, is part of what the configuration makes of all devices.
func TestExplainProveAndReset(t *testing.T) {
	for prove, reset := range map[string]string{"": "", "prove: /usr/bin/check, at boot": "reset: no GPU is reset"} {
		in := input()
		in.Adapter.Prove, in.Adapter.Reset = prove, reset
		e, err := explain.Explain(in, explain.Args{})
		var text strings.Builder
		if err != nil || e.Write(&text) != nil || e.Prove != prove || e.Reset != reset ||
			strings.HasSuffix(text.String(), "\n\nprove: /usr/bin/check, at boot\n\nreset: no GPU is reset\n") != (prove != "") {
			t.Errorf("%q: %v, %q, %q\n%s", prove, err, e.Prove, e.Reset, &text)
		}
		if e, err := explain.Explain(in, explain.Args{Count: 1}); err != nil || e.Prove != "" || e.Reset != "" {
			t.Errorf("of a request: %v, %q, %q", err, e.Prove, e.Reset)
		}
	}
}
