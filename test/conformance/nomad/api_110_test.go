//go:build before1.11

package nomad

import (
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/nomad/state"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/scheduler"
)

type (
	evalContext   = scheduler.EvalContext
	selectOptions = scheduler.SelectOptions
)

var (
	newDeviceChecker = scheduler.NewDeviceChecker
	newGenericStack  = scheduler.NewGenericStack
)

func newEvalContext(t testing.TB) *evalContext {
	plan := &structs.Plan{
		EvalID:          t.Name(),
		NodeUpdate:      map[string][]*structs.Allocation{},
		NodeAllocation:  map[string][]*structs.Allocation{},
		NodePreemptions: map[string][]*structs.Allocation{},
	}
	return scheduler.NewEvalContext(nil, state.TestStateStore(t), plan, hclog.NewNullLogger())
}
