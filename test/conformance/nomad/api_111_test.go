//go:build !before1.11

package nomad

import (
	"testing"

	"github.com/hashicorp/nomad/scheduler/feasible"
)

// The tests call the scheduler as version 1.11 has it. The file api_110_test.go gives the version before the same names: make
// matrix runs the tests with the module of another version, and with a tag before1.N for each version N that is newer.

type (
	evalContext   = feasible.EvalContext
	selectOptions = feasible.SelectOptions
)

var (
	newDeviceChecker = feasible.NewDeviceChecker
	newGenericStack  = feasible.NewGenericStack
)

func newEvalContext(t testing.TB) *evalContext {
	_, ctx := feasible.MockContext(t)
	return ctx
}
