package main

import (
	"bytes"
	"context"
	"io"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/nomad"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/util/asynclog"
)

// serve serves Nomad, and returns the exit code.
func serve(stderr io.Writer) int {
	ctx, end := context.WithCancelCause(context.Background())
	defer end(nil)
	lines := asynclog.New(stderr, lostLines)
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: lines, JSONFormat: true})
	a := nomad.New(nomad.Options{Version: version, Log: log, End: end})
	newHandlers(end, a.Hangup, a.Forward).handle(ctx)
	agent.LimitRuntime()
	if err := a.Run(ctx); err != nil {
		lines.Flush(agent.ReaderTimeout)
		return command.ExitFailed
	}
	lines.Flush(agent.FlushTimeout)
	return command.ExitOK
}

// lostLines is a line of the log, in the format that Nomad reads, about the lines that are missing from it.
func lostLines(lines int64) []byte {
	var line bytes.Buffer
	hclog.New(&hclog.LoggerOptions{Output: &line, JSONFormat: true}).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}
