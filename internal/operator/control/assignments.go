package control

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// Assignments returns what the agent at path has to say about the assignments of its GPUs. Its errors are those of Report.
func Assignments(ctx context.Context, path string) (ownership.Facts, error) {
	return call[ownership.Facts](ctx, path, assignmentsURL, nil)
}
