// Package processlog is the log of a process on its stderr.
package processlog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/util/asynclog"
)

// Log is what a process writes to stderr: why a command fails or the program does not start, directly; the log of a program that runs, in the
// format of the latest settings, without ever blocking it. It is safe for concurrent use.
type Log struct {
	Out      io.Writer
	Terminal bool   // Out is one
	Name     string // of the program
	Ends     string // message of the line that has the reason for which the program ends

	json  atomic.Bool
	lines atomic.Pointer[asynclog.Writer] // to Out; nil = the program has not run so far
}

// Set applies the setting --log-format.
func (l *Log) Set(name string) { l.json.Store(name == "json" || name != "text" && !l.Terminal) }

// Logger returns one for a run of the program, in the present format. Call it for one run at a time.
func (l *Log) Logger(level slog.Level) *slog.Logger {
	if l.lines.Load() == nil {
		l.lines.Store(asynclog.New(l.Out, l.lost))
	}
	return slog.New(l.handler(l.lines.Load(), level))
}

// handler returns a handler that writes lines of the present format.
func (l *Log) handler(w io.Writer, level slog.Level) slog.Handler {
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
func (l *Log) lost(lines int64) []byte {
	var line bytes.Buffer
	slog.New(l.handler(&line, slog.LevelInfo)).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}

// End writes why the process ends; nil = as requested. It returns when that is written; if the program has run, which must end although
// no process reads its log, after at most this time.
func (l *Log) End(err error, atMost time.Duration) {
	lines := l.lines.Load()
	if lines == nil {
		l.writeError(l.Out, err)
		return
	}
	l.writeError(lines, err)
	lines.Flush(atMost)
}

// writeError writes an error: as lines of the log if it is one in JSON.
func (l *Log) writeError(w io.Writer, err error) {
	if err == nil || !l.json.Load() {
		command.WriteError(w, l.Name, err)
		return
	}
	log := slog.New(l.handler(w, slog.LevelInfo))
	for line := range strings.Lines(err.Error()) {
		log.Error(l.Ends, "error", strings.TrimSuffix(line, "\n"))
	}
}
