package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/kmsg"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// fakeMonitor records what is reported to it.
type fakeMonitor struct {
	state core.State
	busy  int // number of reports to refuse

	mu  sync.Mutex
	obs []health.Observation
}

func (m *fakeMonitor) Restored(ctx context.Context) bool { return ctx.Err() == nil }

func (m *fakeMonitor) State() core.State { return m.state }

func (m *fakeMonitor) Report(obs ...health.Observation) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.busy > 0 {
		m.busy--
		return false
	}
	m.obs = append(m.obs, obs...)
	return true
}

// reported compares what was reported: "{PCI XID next}", with "past" for lines from before the start.
func (m *fakeMonitor) reported(t *testing.T, want string) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	var got []string
	for _, o := range m.obs {
		what := "-"
		if o.Kind != health.KernelLogRead {
			what = fmt.Sprint(o.Code)
		}
		if o.Kind == health.KernelLogReplaced {
			what = "replaced"
		}
		if o.Backlog {
			what = "past " + what
		}
		got = append(got, fmt.Sprintf("{%s %s %d}", o.PCI, what, o.NextSequence))
	}
	if s := strings.Join(got, " "); s != want {
		t.Errorf("reported %s, want %s", s, want)
	}
}

func TestKernelLogPosition(t *testing.T) {
	cfg := core.DefaultConfig()
	history := func(next uint64) core.Checkpoint { return core.Checkpoint{BootID: "this", KernelLog: next} }
	for _, c := range []struct {
		name  string
		state core.State
		want  string
	}{
		{"the first start", core.NewState(cfg), "{0000:01:00.0 past 79 11} {0000:02:00.0 past 119 12} { - 12}"},
		{"a history without a position", core.Restore(cfg, history(0), "this"), "{0000:01:00.0 past 79 11} {0000:02:00.0 past 119 12} { - 12}"},
		{"the same boot", core.Restore(cfg, history(10), "this"), "{0000:02:00.0 past 119 12} { - 12}"},
		{"a reboot", core.Restore(cfg, history(500), "next"), "{0000:01:00.0 past 79 11} {0000:02:00.0 past 119 12} { - 12}"},
		{"an undetected reboot", core.Restore(cfg, history(500), "this"), "{0000:01:00.0 past 79 11} {0000:02:00.0 past 119 12} { - 12}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "kmsg")
				write := func(text string) {
					f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
					check.NoError(t, err)
					defer func() { _ = f.Close() }()
					if _, err := f.WriteString(text); err != nil {
						t.Fatal(err)
					}
				}
				write("4,9,1000,-;NVRM: Xid (PCI:0000:01:00): 79, x\n4,11,5000000,-;NVRM: Xid (PCI:0000:02:00): 119, x\n")
				from := newSources(options(config.Health{KernelLog: path}, cfg))
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				m, done := &fakeMonitor{state: c.state, busy: 3}, make(chan struct{})
				go func() { defer close(done); from.follow(ctx, m) }()
				time.Sleep(time.Second)
				synctest.Wait()
				m.reported(t, c.want)
				write("4,12,9000000,-;NVRM: Xid (PCI:0000:03:00): 48, x\n")
				time.Sleep(5 * time.Second)
				synctest.Wait()
				m.reported(t, c.want+" {0000:03:00.0 48 13}")
				cancel()
				<-done
			})
		})
	}
}

// A position of syslog(2) means nothing in /dev/kmsg: it is forgotten, and the agent reads the log from its beginning.
func TestPositionOfTheOtherSource(t *testing.T) {
	cfg := core.DefaultConfig()
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := os.WriteFile(path, []byte("4,11,5000000,-;NVRM: Xid (PCI:0000:02:00): 119, x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		m, done := &fakeMonitor{state: core.Restore(cfg, core.Checkpoint{BootID: "this", KernelLog: 1 << 63}, "this")}, make(chan struct{})
		go func() {
			defer close(done)
			newSources(options(config.Health{KernelLog: path}, cfg)).follow(ctx, m)
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		m.reported(t, "{ replaced 0} {0000:02:00.0 past 119 12} { - 12}")
		cancel()
		<-done
	})
}

// A run that does not read the log leaves no position, so that a later run reads the log from its beginning.
func TestUnreadLogLeavesNoPosition(t *testing.T) {
	cfg := core.DefaultConfig()
	s := core.Restore(cfg, core.Checkpoint{BootID: "this", KernelLog: 10}, "this").Read(cfg, now, coretest.GPUs(1))
	m := &fakeMonitor{state: s}
	newSources(options(config.Health{}, cfg)).follow(t.Context(), m)
	s = s.Observe(cfg, now, m.obs...)
	if next := s.Checkpoint("this").KernelLog; next != 0 {
		t.Errorf("the record has position %d", next)
	}
}

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
		from.open = kmsg.Open // without syslog(2), which may be allowed here
		if lines := problem.Lines(from.problems()); len(lines) != 0 || !from.up()["kernel_log"] {
			t.Errorf("before the first read: %v, %v", lines, from.up())
		}
		m := &fakeMonitor{}
		from.follow(t.Context(), m)
		if log := text.String(); !strings.Contains(log, want) || strings.Count(log, "\n") != 1 || !strings.Contains(log, "CAP_SYSLOG") {
			t.Errorf("optional %v: %s", optional, log)
		}
		lines, up := problem.Lines(from.problems()), from.up()
		if _, reported := up["kernel_log"]; len(lines) != 1 || !strings.Contains(lines[0], "/nowhere/kmsg") || up["kernel_log"] || reported == optional {
			t.Errorf("optional %v: warnings: %v, %v", optional, lines, up)
		}
		m.reported(t, "{ - 0}") // it is not read
	}
}

func TestSourcesSwitchedOff(t *testing.T) {
	from := newSources(options(config.Health{}, core.DefaultConfig()))
	m := &fakeMonitor{}
	from.follow(t.Context(), m) // returns at once
	m.reported(t, "{ - 0}")
	if from.store() != nil || len(from.up()) != 0 || len(problem.Lines(from.problems())) != 0 {
		t.Errorf("%v, %v, %v", from.store(), from.up(), problem.Lines(from.problems()))
	}
}

// Without a running agent, a report has the history that the next one starts from.
func TestReadOnceHasTheHistory(t *testing.T) {
	dir, at := t.TempDir(), gpu.WholeGPU(coretest.GPU(1))
	m := coretest.NewMachine(coretest.GPUs(2))
	cfg := core.DefaultConfig()
	history := history.Open(dir, "agent", "", slog.New(slog.DiscardHandler))
	record, boot := history.Load()
	state := core.Restore(cfg, record, boot).Read(cfg, now, coretest.GPUs(2)).
		Observe(cfg, now, health.Observation{At: at, Kind: health.XID, Code: 46})
	check.NoError(t, history.Save(state.Checkpoint(boot)))

	for stateDir, want := range map[string]string{dir: "XID_46", "": "", filepath.Join(dir, "other"): ""} {
		o := options(config.Health{StateDir: stateDir}, cfg)
		o.Open = m.Open
		r := ReadOnce(t.Context(), o)
		if len(r.Devices) != 2 || r.Devices[1].Cause != want {
			t.Errorf("state directory %q: %+v, want cause %q", stateDir, r.Devices, want)
		}
	}
}

// Without a running agent nothing tries whether memory can be limited: shares are shown with their limits, and not as withheld for that; also beside another plugin.
func TestReadOnceOfLimits(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Policy.Limits = inventory.LimitPolicy{On: true, Reserve: inventory.DefaultReserve}
	cfg.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2, Memory: 20 << 30, Limit: inventory.LimitRequired}}}
	for what, read := range map[string]func(Options) core.State{
		"once": func(o Options) core.State { return ReadStateOnce(t.Context(), o) },
		"shadow": func(o Options) (last core.State) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			check.NoError(t, Shadow(ctx, o, func(s core.State) { last = s; cancel() }))
			return last
		},
	} {
		o := options(config.Health{}, cfg)
		o.Open = coretest.NewMachine(coretest.GPUs(1)).Open
		n := 0
		for u := range read(o).Allocatable.Units() {
			if n++; u.Memory != 20<<30 || !u.Health.Schedulable() {
				t.Errorf("%s: %d MiB, %s", what, u.Memory>>20, u.Health)
			}
		}
		if n != 2 {
			t.Errorf("%s: %d units", what, n)
		}
	}
}

// Without a running agent, a report has the devices of other agents, and making it changes no file.
func TestReadOnceHasTheHost(t *testing.T) {
	dir := t.TempDir()
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapRefuse
	m := coretest.NewMachine(coretest.GPUs(2))
	folder := filepath.Join(dir, "agents")
	check.NoError(t, os.Mkdir(folder, 0o700))
	text := fmt.Sprintf(`{"version": 2, "agent": "other", "devices": [{"gpu": %q, "order": 1}]}`, coretest.GPU(1))
	check.NoError(t, os.WriteFile(filepath.Join(folder, "other.json"), []byte(text), 0o600))
	o := options(config.Health{StateDir: dir}, cfg)
	o.Open = m.Open
	r := ReadOnce(t.Context(), o)
	if len(r.Overlaps) != 1 || r.Overlaps[0].Agent != "other" || r.Devices[0].Cause != "" || r.Devices[1].Cause != "OVERLAP" {
		t.Errorf("%+v", r)
	}
	if files, err := os.ReadDir(folder); err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}
