package core_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A unit that takes no new work is reserved for work that tolerates each of its conditions, but never a lost GPU, one in maintenance, one
// of another agent or one without a CDI definition.
func TestReserveTolerated(t *testing.T) {
	at := gpu.WholeGPU(coretest.GPU(0))
	observe := func(all ...health.Observation) health.Ledger {
		for i := range all {
			all[i].At = at
		}
		return health.Ledger{}.Apply(health.DefaultPolicy(), testStart, all...)
	}
	xid := health.Observation{Kind: health.XID, Code: 95}
	other := health.Observation{Kind: health.XID, Code: 64}
	lost := health.Observation{Kind: health.Lost}
	conf := core.DefaultConfig()
	conf.Injection = inventory.Injection{CDI: inventory.CDIRequired}
	defined := &inventory.CDI{Kind: "k/gpu", Defined: []gpu.DeviceID{coretest.GPU(0)}}
	tolerate := func(causes ...string) func(inventory.Unit, health.Health) bool {
		return func(_ inventory.Unit, h health.Health) bool { return slices.Contains(causes, h.Cause()) }
	}
	for name, c := range map[string]struct {
		ledger    health.Ledger
		host      inventory.Host
		tolerates func(inventory.Unit, health.Health) bool
		want      string // in the error; "" = a plan
	}{
		"healthy":                  {host: inventory.Host{CDI: defined}, tolerates: tolerate()},
		"not tolerated":            {observe(xid), inventory.Host{CDI: defined}, tolerate(), "XID 95"},
		"tolerated":                {observe(xid), inventory.Host{CDI: defined}, tolerate("XID_95"), ""},
		"one of two conditions":    {observe(xid, other), inventory.Host{CDI: defined}, tolerate("XID_95"), "XID 64"},
		"both":                     {observe(xid, other), inventory.Host{CDI: defined}, tolerate("XID_95", "XID_64"), ""},
		"lost":                     {observe(lost), inventory.Host{CDI: defined}, tolerate("LOST"), "GPU is lost"},
		"lost, hidden or not":      {observe(xid, lost), inventory.Host{CDI: defined}, tolerate("XID_95", "LOST"), "GPU is lost"},
		"no CDI definition":        {observe(xid), inventory.Host{CDI: &inventory.CDI{Kind: "k/gpu", Problem: "disk full"}}, tolerate("XID_95"), "disk full"},
		"no CDI definition, alone": {host: inventory.Host{CDI: &inventory.CDI{Kind: "k/gpu", Problem: "disk full"}}, tolerates: tolerate("CDI_UNDEFINED"), want: "disk full"},
		"another agent's": {host: inventory.Host{CDI: defined, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: at, Earlier: true}}},
			tolerates: tolerate("OVERLAP"), want: "offered by another agent (nomad-gpu)"},
		"another agent's, with a fault": {observe(xid), inventory.Host{CDI: defined, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: at, Earlier: true}}},
			tolerate("XID_95", "OVERLAP"), "offered by another agent (nomad-gpu)"},
		"not claimed, with a fault": {observe(xid), inventory.Host{CDI: defined, Recorded: inventory.Recorded{Reason: "perhaps"}},
			tolerate("XID_95", "OVERLAP"), "offered by another agent (perhaps)"},
		"on another side, with a fault": {observe(xid), inventory.Host{CDI: defined, Ownership: inventory.Ownership{
			GPUs: []inventory.GPUOwner{{GPU: at.GPU, API: inventory.DRA, Local: true, Pending: "to nomad"}}}}, tolerate("XID_95", "MOVING"), "moves (to nomad)"},
		"still on this side, with a fault": {observe(xid), inventory.Host{CDI: defined, Ownership: inventory.Ownership{
			GPUs: []inventory.GPUOwner{{GPU: at.GPU, API: inventory.DRA, Local: true, Pending: "to nomad", Draining: true}}}}, tolerate("XID_95"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			inv := core.Build(coretest.GPUs(1), c.ledger, conf).WithHost(c.host, inventory.OverlapRefuse)
			plan, err := inv.ReserveTolerated(c.tolerates, inventory.UnitID(coretest.GPU(0)))
			if c.want != "" {
				if _, ok := errors.AsType[*inventory.UnhealthyUnitsError](err); !ok || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"k/gpu=" + string(coretest.GPU(0))}, plan.CDI); diff != "" {
				t.Error(diff)
			}
		})
	}
}
