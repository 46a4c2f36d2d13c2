package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent/kube"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/util/asynclog"
)

// processLog is what this process writes to stderr: why a command fails or an agent does not start, directly; the log of an agent that runs,
// in the format of the latest settings, without ever blocking it. It is safe for concurrent use.
type processLog struct {
	out      io.Writer
	terminal bool // out is one
	json     atomic.Bool
	lines    atomic.Pointer[asynclog.Writer] // to out; nil = no agent runs so far
}

// set applies the setting --log-format.
func (l *processLog) set(name string) { l.json.Store(name == "json" || name != "text" && !l.terminal) }

// logger returns one for a run of the agent, in the present format. Call it for one run at a time.
func (l *processLog) logger(level slog.Level) *slog.Logger {
	if l.lines.Load() == nil {
		l.lines.Store(asynclog.New(l.out, l.lost))
	}
	return slog.New(l.handler(l.lines.Load(), level))
}

// handler returns a handler that writes lines of the present format.
func (l *processLog) handler(w io.Writer, level slog.Level) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if !l.json.Load() {
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

// lost is a line of the log about the lines that are missing from it.
func (l *processLog) lost(lines int64) []byte {
	var line bytes.Buffer
	slog.New(l.handler(&line, slog.LevelInfo)).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}

// end writes why the process ends; nil = as requested. It returns when that is written; if an agent has run, which must end although nobody
// reads its log, after at most this time.
func (l *processLog) end(err error, atMost time.Duration) {
	lines := l.lines.Load()
	if lines == nil {
		l.writeError(l.out, err)
		return
	}
	l.writeError(lines, err)
	lines.Flush(atMost)
}

// writeError writes an error: as lines of the log if it is that of an agent with JSON.
func (l *processLog) writeError(w io.Writer, err error) {
	if err == nil || !l.json.Load() {
		command.WriteError(w, kube.Name, err)
		return
	}
	log := slog.New(l.handler(w, slog.LevelInfo))
	for line := range strings.Lines(err.Error()) {
		log.Error("the agent ends", "error", strings.TrimSuffix(line, "\n"))
	}
}
