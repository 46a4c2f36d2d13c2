package explain_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/test/check"
)

// An orchestrator that takes what is listed first gets the first devices that fit: one share of each device, not those that claims hold, not
// those of another API.
func TestListedFirst(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.API = inventory.DRA
	cfg.Policy.Shares = []inventory.Share{{Pool: inventory.DefaultPool, Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}}}
	claim := holders.Holder{Work: holders.Work{Namespace: "team", Name: "train", Claim: "c"}}
	in := explain.Input{State: core.NewState(cfg).Read(cfg, time.Unix(1, 0), coretest.GPUs(4)), Use: use.Table{HoldersKnown: true, Devices: []use.Device{
		{ID: coretest.GPU(0), Holders: []holders.Holder{claim, claim}}, {ID: coretest.GPU(1), Holders: []holders.Holder{claim}},
	}}}
	in.Adapter = adapter
	in.Adapter.API, in.Adapter.Listed = inventory.DRA, true
	e, err := explain.Explain(in, explain.Args{Count: 2})
	check.NoError(t, err)
	r := e.Requests[0]
	if diff := cmp.Diff([]inventory.UnitID{inventory.UnitID(coretest.GPU(1)) + "::1", inventory.UnitID(coretest.GPU(2)) + "::0"}, r.Units); diff != "" {
		t.Error(diff)
	}
	if r.Available != 5 || r.Refused != "" || len(r.Pairs) != 1 || len(r.NotChosen) != 3 {
		t.Errorf("%+v", r)
	}
	if last := r.NotChosen[len(r.NotChosen)-1]; last.ID != coretest.GPU(3) || last.Why != "listed after those that are enough" {
		t.Errorf("%+v", last)
	}
	if e, err := explain.Explain(in, explain.Args{Count: 4}); err != nil || e.Requests[0].Refused == "" {
		t.Errorf("two shares of one device for one request: %+v, %v", e.Requests, err)
	}
	in.Adapter.API = inventory.DevicePlugin
	if e, err := explain.Explain(in, explain.Args{Count: 1}); err != nil || e.Requests[0].Available != 0 || e.Requests[0].NotChosen[3].Why != "it is offered through dra" {
		t.Errorf("%+v, %v", e.Requests, err)
	}
}
