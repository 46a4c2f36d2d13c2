package nomadadapter

import (
	"encoding/json"
	"errors"
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Lines are hclog's JSON with the three texts that go-plugin requires.
func TestLog(t *testing.T) {
	out := &logBuffer{}
	base := slog.New(hclogHandler{log: hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: out, JSONFormat: true})})
	log := base.With("node", 1).WithGroup("gpu").With("id", inventory.UnitID("GPU-1"))
	log.Warn("lost", "at", gpu.WholeGPU("GPU-1"), "error", errors.New("gone"), "pci", "", "none", nil,
		slog.Group("x", slog.Int("xid", 79)))
	base.Debug("quiet", "@level", 3, "@message", true)
	base.Error("bad")
	base.Info("good")
	base.Log(t.Context(), slog.LevelDebug-4, "detail")

	want := []map[string]any{
		{"@level": "warn", "@message": "lost", "node": 1.0, "gpu.id": "GPU-1", "gpu.at": "GPU-1", "gpu.error": "gone", "gpu.x.xid": 79.0},
		{"@level": "debug", "@message": "quiet", "level": 3.0, "message": true},
		{"@level": "error", "@message": "bad"},
		{"@level": "info", "@message": "good"},
		{"@level": "trace", "@message": "detail"},
	}
	var got []map[string]any
	for _, line := range out.Lines() {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if _, ok := fields["@timestamp"].(string); !ok {
			t.Errorf("%q has no timestamp", line)
		}
		delete(fields, "@timestamp")
		got = append(got, fields)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLogLevel(t *testing.T) {
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: &logBuffer{}})
	h := hclogHandler{log: log}
	if h.Enabled(t.Context(), slog.LevelDebug) || !h.Enabled(t.Context(), slog.LevelInfo) {
		t.Error("the level of the hclog logger is ignored")
	}
}
