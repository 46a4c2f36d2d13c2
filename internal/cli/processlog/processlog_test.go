package processlog

import (
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// Values that are no text have the same form in both formats; the end of the process and lost lines are lines of the log, too.
func TestLogFormat(t *testing.T) {
	for _, tc := range []struct {
		setting        string
		terminal, json bool
	}{{"auto", true, false}, {"auto", false, true}, {"", false, true}, {"text", false, false}, {"json", true, true}} {
		f, out := &Log{Terminal: tc.terminal, Name: "k8s-gpu", Ends: "the agent ends"}, strings.Builder{}
		f.Set(tc.setting)
		slog.New(f.handler(&out, slog.LevelInfo)).Info("wall clock", "by", 90*time.Second, "error", errors.New("a b"))
		f.writeError(&out, errors.New("one\ntwo"))
		out.Write(f.lost(3))
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 4 {
			t.Fatalf("%+v: %q", tc, lines)
		}
		if !tc.json {
			if !strings.Contains(lines[0], `msg="wall clock" by=1m30s error="a b"`) || lines[1] != "k8s-gpu: one" || !strings.Contains(lines[3], "lines=3") {
				t.Errorf("%+v: %q", tc, lines)
			}
			continue
		}
		for i, want := range []map[string]any{
			{"level": "INFO", "msg": "wall clock", "by": "1m30s", "error": "a b"},
			{"level": "ERROR", "msg": "the agent ends", "error": "one"},
			{"level": "ERROR", "msg": "the agent ends", "error": "two"},
			{"level": "WARN", "msg": "log lines lost: the reader is too slow", "lines": 3.0},
		} {
			var got map[string]any
			if err := json.Unmarshal([]byte(lines[i]), &got); err != nil || got["time"] == nil {
				t.Errorf("%s: %v", lines[i], err)
			}
			for key, value := range want {
				if got[key] != value {
					t.Errorf("%s: %s is %v, want %v", lines[i], key, got[key], value)
				}
			}
		}
	}
}
