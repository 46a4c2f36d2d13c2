package main

import (
	"context"
	"io"

	"github.com/tandem-gpu/tandem/internal/inspect"
)

// inspectMachine reads the machine once, as the agent would, and prints what it would offer. A node without a
// driver is an answer, not a failure; a driver that does not answer is given up on in time.
func inspectMachine(ctx context.Context, s settings, out io.Writer, asJSON bool) error {
	report := inspect.Describe(inspect.Read(ctx, opener(s), s.core))
	if asJSON {
		return report.WriteJSON(out)
	}
	return report.WriteTable(out)
}
