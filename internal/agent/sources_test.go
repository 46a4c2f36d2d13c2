package agent

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

var now = time.Now()

func options(v config.Health, cfg core.Config) Options {
	return Options{Name: "agent", Core: cfg, Health: v, Log: slog.New(slog.DiscardHandler)}
}

// A kernel log that is not configured by name may be missing; one that is may not. Either way the agent goes on.
func TestKernelLogUnavailable(t *testing.T) {
	for optional, want := range map[bool]string{true: "level=INFO", false: "level=WARN"} {
		var text strings.Builder
		v := config.Health{KernelLog: "/nowhere/kmsg", KernelLogOptional: optional}
		o := options(v, core.DefaultConfig())
		o.Log = slog.New(slog.NewTextHandler(&text, nil))
		from := newSources(o)
		if lines := from.warnings(); len(lines) != 0 || !from.up()["kernel_log"] {
			t.Errorf("before the first read: %v, %v", lines, from.up())
		}
		m := &fakeMonitor{}
		from.follow(t.Context(), m)
		if log := text.String(); !strings.Contains(log, want) || strings.Count(log, "\n") != 1 || !strings.Contains(log, "CAP_SYSLOG") {
			t.Errorf("optional %v: %s", optional, log)
		}
		if lines := from.warnings(); len(lines) != 1 || !strings.Contains(lines[0], "/nowhere/kmsg") || from.up()["kernel_log"] {
			t.Errorf("warnings: %v, %v", lines, from.up())
		}
		m.reported(t, "{ - 0}") // it is not read
	}
}

func TestSourcesSwitchedOff(t *testing.T) {
	from := newSources(options(config.Health{}, core.DefaultConfig()))
	m := &fakeMonitor{}
	from.follow(t.Context(), m) // returns at once
	m.reported(t, "{ - 0}")
	if from.store() != nil || len(from.up()) != 0 || len(from.warnings()) != 0 {
		t.Errorf("%v, %v, %v", from.store(), from.up(), from.warnings())
	}
}

// Without a running agent, a report has the history that the next one starts from.
func TestReadOnceHasTheHistory(t *testing.T) {
	dir, at := t.TempDir(), gpu.WholeGPU(coretest.GPU(1))
	m := coretest.NewMachine(coretest.GPUs(2))
	cfg := core.DefaultConfig()
	history := checkpoint.Open(dir, "agent", "", slog.New(slog.DiscardHandler))
	record, boot := history.Load()
	state := core.Restore(cfg, record, boot).Read(cfg, now, coretest.GPUs(2)).
		Observe(cfg, now, health.Observation{At: at, Kind: health.XID, Code: 46})
	if err := history.Save(state.Checkpoint(boot)); err != nil {
		t.Fatal(err)
	}

	for stateDir, want := range map[string]string{dir: "XID_46", "": "", filepath.Join(dir, "other"): ""} {
		o := options(config.Health{StateDir: stateDir}, cfg)
		o.Open = m.Open
		r := ReadOnce(t.Context(), o)
		if len(r.Devices) != 2 || r.Devices[1].Cause != want {
			t.Errorf("state directory %q: %+v, want cause %q", stateDir, r.Devices, want)
		}
	}
}

// Without a running agent, a report has the claims of other agents, and making it changes no file.
func TestReadOnceHasTheHost(t *testing.T) {
	dir := t.TempDir()
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapRefuse
	m := coretest.NewMachine(coretest.GPUs(2))
	claims := filepath.Join(dir, "claims")
	if err := os.Mkdir(claims, 0o700); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"version": 1, "agent": "other", "claims": [{"gpu": %q, "turn": 1}]}`, coretest.GPU(1))
	if err := os.WriteFile(filepath.Join(claims, "other.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	o := options(config.Health{StateDir: dir}, cfg)
	o.Open = m.Open
	r := ReadOnce(t.Context(), o)
	if len(r.Overlaps) != 1 || r.Overlaps[0].Agent != "other" || r.Devices[0].Cause != "" || r.Devices[1].Cause != "CLAIMED" {
		t.Errorf("%+v", r)
	}
	if files, err := os.ReadDir(claims); err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}
