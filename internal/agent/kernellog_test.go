package agent

import (
	"context"
	"fmt"
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
	"github.com/tandem-gpu/tandem/internal/core/health"
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
		{"the first start", core.NewState(cfg), "{ - 12}"},
		{"a history without a position", core.Restore(cfg, history(0), "this"), "{ - 12}"},
		{"the same boot", core.Restore(cfg, history(10), "this"), "{0000:02:00.0 past 119 12} { - 12}"},
		{"a reboot", core.Restore(cfg, history(500), "next"), "{0000:01:00.0 past 79 11} {0000:02:00.0 past 119 12} { - 12}"},
		{"an undetected reboot", core.Restore(cfg, history(500), "this"), "{0000:01:00.0 past 79 11} {0000:02:00.0 past 119 12} { - 12}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "kmsg")
				write := func(text string) {
					f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
					if err != nil {
						t.Fatal(err)
					}
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

// A run that does not read the log leaves no position, so that a later run reads the log from its end.
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
