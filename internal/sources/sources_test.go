package sources_test

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
	"github.com/tandem-gpu/tandem/internal/sources"
)

var now = time.Now()

// A kernel log that nobody asked for may be missing; one that was named may not. Either way the agent goes on.
func TestKernelLogThatCannotBeRead(t *testing.T) {
	for optional, want := range map[bool]string{true: "level=INFO", false: "level=WARN"} {
		var text strings.Builder
		v := config.Health{KernelLog: "/nowhere/kmsg", KernelLogOptional: optional}
		from := sources.Open(v, core.DefaultConfig(), "", "agent", slog.New(slog.NewTextHandler(&text, nil)))
		if notes := from.Warnings(); len(notes) != 0 || !from.Up()["kernel_log"] {
			t.Errorf("before it was tried: %v, %v", notes, from.Up())
		}
		m := &machine{}
		from.Follow(t.Context(), m)
		if log := text.String(); !strings.Contains(log, want) || strings.Count(log, "\n") != 1 || !strings.Contains(log, "CAP_SYSLOG") {
			t.Errorf("optional %v: %s", optional, log)
		}
		if notes := from.Warnings(); len(notes) != 1 || !strings.Contains(notes[0], "/nowhere/kmsg") || from.Up()["kernel_log"] {
			t.Errorf("notes: %v, %v", notes, from.Up())
		}
		m.told(t, "{ - 0}") // it is not read
	}
}

func TestSwitchedOff(t *testing.T) {
	from := sources.Open(config.Health{}, core.DefaultConfig(), "", "agent", slog.New(slog.DiscardHandler))
	m := &machine{}
	from.Follow(t.Context(), m) // returns at once
	m.told(t, "{ - 0}")
	if from.Store() != nil || len(from.Up()) != 0 || len(from.Warnings()) != 0 {
		t.Errorf("%v, %v, %v", from.Store(), from.Up(), from.Warnings())
	}
}

// Who asks without a running agent sees what the next one starts from.
func TestReadingKnowsTheHistory(t *testing.T) {
	dir, gpu := t.TempDir(), core.WholeGPU(coretest.GPU(1))
	m := coretest.NewMachine(coretest.GPUs(2))
	cfg := core.DefaultConfig()
	history := checkpoint.Open(dir, "agent", "", slog.New(slog.DiscardHandler))
	record, boot := history.Load()
	state := core.Restore(cfg, record, boot).Read(cfg, now, coretest.GPUs(2)).
		Observe(cfg, now, core.Observation{At: gpu, Kind: core.XID, Code: 46})
	if err := history.Save(state.Checkpoint(boot)); err != nil {
		t.Fatal(err)
	}

	for stateDir, want := range map[string]string{dir: "XID_46", "": "", filepath.Join(dir, "other"): ""} {
		report := sources.Reading(t.Context(), m.Open, cfg, "", stateDir, "agent")
		if len(report.Devices) != 2 || report.Devices[1].Cause != want {
			t.Errorf("state directory %q: %+v, want cause %q", stateDir, report.Devices, want)
		}
	}
}

// Who asks without a running agent sees what another agent claims, and changes nothing.
func TestReadingKnowsTheHost(t *testing.T) {
	dir := t.TempDir()
	cfg := core.DefaultConfig()
	cfg.Overlap = core.OverlapRefuse
	m := coretest.NewMachine(coretest.GPUs(2))
	claims := filepath.Join(dir, "claims")
	if err := os.Mkdir(claims, 0o700); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"version": 1, "agent": "other", "claims": [{"gpu": %q, "turn": 1}]}`, coretest.GPU(1))
	if err := os.WriteFile(filepath.Join(claims, "other.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	report := sources.Reading(t.Context(), m.Open, cfg, "", dir, "agent")
	if len(report.Overlaps) != 1 || report.Overlaps[0].Agent != "other" || report.Devices[0].Cause != "" || report.Devices[1].Cause != "CLAIMED" {
		t.Errorf("%+v", report)
	}
	if files, err := os.ReadDir(claims); err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}
