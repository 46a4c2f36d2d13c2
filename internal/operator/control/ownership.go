package control

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// Ownership returns what the agent at path reads of the ownership of its GPUs. Its errors are those of Report.
func Ownership(ctx context.Context, path string) (ownership.Facts, error) {
	return call[ownership.Facts](ctx, path, ownershipURL, nil)
}
