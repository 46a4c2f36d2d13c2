package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/tandem-gpu/tandem/internal/cli"
)

// logFormat is the format of the log of this process, by the latest settings. It is safe for concurrent use.
type logFormat struct {
	terminal bool // the log is written to one
	json     atomic.Bool
}

// set applies the setting --log-format.
func (f *logFormat) set(name string) { f.json.Store(name == "json" || name != "text" && !f.terminal) }

// handler returns a handler that writes lines of the present format.
func (f *logFormat) handler(w io.Writer, level slog.Level) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if !f.json.Load() {
		return slog.NewTextHandler(w, o)
	}
	o.ReplaceAttr = readable
	return slog.NewJSONHandler(w, o)
}

// readable replaces values of which JSON has only numbers or fields by their text, as in the other format: durations and types
// with a String method.
func readable(_ []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case json.Marshaler, error: // time and level among them
	case fmt.Stringer:
		a.Value = slog.StringValue(value.String())
	}
	return a
}

// lostLines is a line of the log about the lines that are missing from it.
func (f *logFormat) lostLines(lines int64) []byte {
	var line bytes.Buffer
	slog.New(f.handler(&line, slog.LevelInfo)).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}

// writeError writes why the process ends: as lines of the log if it is JSON.
func (f *logFormat) writeError(w io.Writer, err error) {
	if !f.json.Load() {
		cli.WriteError(w, agentName, err)
		return
	}
	log := slog.New(f.handler(w, slog.LevelInfo))
	for line := range strings.Lines(err.Error()) {
		log.Error("the agent ends", "error", strings.TrimSuffix(line, "\n"))
	}
}
