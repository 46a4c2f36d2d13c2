package control

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/node/assignment"
)

// Assignments returns what the agent at path has to say about the assignments of its GPUs. Its errors are those of Report.
func Assignments(ctx context.Context, path string) (assignment.Facts, error) {
	return call[assignment.Facts](ctx, path, assignmentsURL, nil)
}
