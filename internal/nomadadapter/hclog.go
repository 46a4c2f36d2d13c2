package nomadadapter

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/hashicorp/go-hclog"
)

// hclogHandler is a slog.Handler that writes to hclog. Nomad logs hclog's JSON lines with their level and fields.
type hclogHandler struct {
	log    hclog.Logger
	prefix string // of keys: the open slog groups, "a.b."
	args   []any  // of WithAttrs
}

var _ slog.Handler = hclogHandler{}

func level(l slog.Level) hclog.Level {
	switch {
	case l < slog.LevelDebug:
		return hclog.Trace
	case l < slog.LevelInfo:
		return hclog.Debug
	case l < slog.LevelWarn:
		return hclog.Info
	case l < slog.LevelError:
		return hclog.Warn
	}
	return hclog.Error
}

func (h hclogHandler) Enabled(_ context.Context, l slog.Level) bool {
	return level(l) >= h.log.GetLevel()
}

func (h hclogHandler) Handle(_ context.Context, r slog.Record) error {
	args := slices.Clip(h.args)
	r.Attrs(func(a slog.Attr) bool {
		args = flatten(args, h.prefix, a)
		return true
	})
	h.log.Log(level(r.Level), r.Message, args...)
	return nil
}

func (h hclogHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.args = slices.Clip(h.args)
	for _, a := range attrs {
		h.args = flatten(h.args, h.prefix, a)
	}
	return h
}

func (h hclogHandler) WithGroup(name string) slog.Handler {
	if name != "" {
		h.prefix += name + "."
	}
	return h
}

// flatten appends a to args as hclog's key and value. Absent values are left out.
//
// A key such as "@level" would replace hclog's own, and a value of it that is not a string panics the Nomad agent
// (go-plugin log_entry.go), so a leading @ is removed.
func flatten(args []any, prefix string, a slog.Attr) []any {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, b := range v.Group() {
			args = flatten(args, prefix, b)
		}
		return args
	}
	value := v.Any()
	if value == nil || value == "" {
		return args
	}
	switch x := value.(type) {
	case error:
		value = x.Error()
	case fmt.Stringer:
		value = x.String()
	}
	return append(args, strings.TrimLeft(prefix+a.Key, "@"), value)
}
