package nomadadapter

import (
	"context"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// fakeSource is a source that records the calls of the plugin.
type fakeSource struct {
	*coretest.Source
	usage func(context.Context) ([]gpu.Usage, error)          // nil = as set by SetUsage
	apply func(ctx context.Context, c core.Config) error      // nil = immediately
	check func([]inventory.Unit) ([]inventory.Finding, error) // nil = nothing is found

	mu       sync.Mutex
	applied  []core.Config
	reserved [][]gpu.Device
}

func (f *fakeSource) Usage(ctx context.Context) ([]gpu.Usage, error) {
	if f.usage != nil {
		return f.usage(ctx)
	}
	return f.Source.Usage(ctx)
}

func (f *fakeSource) ApplyPolicy(ctx context.Context, c core.Config) error {
	f.mu.Lock()
	f.applied = append(f.applied, c)
	f.mu.Unlock()
	if f.apply != nil {
		return f.apply(ctx, c)
	}
	return nil
}

func (f *fakeSource) CheckReservation(units []inventory.Unit) ([]inventory.Finding, error) {
	if f.check != nil {
		return f.check(units)
	}
	return f.Source.CheckReservation(units)
}

func (f *fakeSource) Reserved(devices []gpu.Device) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reserved = append(f.reserved, devices)
}
