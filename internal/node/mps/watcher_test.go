package mps

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// agent is a monitor and a watcher on a node with eight GPUs, in a synctest bubble.
type agent struct {
	*monitor.Monitor
	log *logbuffer.Buffer
}

func start(t *testing.T, root string, cfg core.Config) *agent {
	t.Helper()
	a := &agent{log: &logbuffer.Buffer{}}
	log := slog.New(slog.NewTextHandler(a.log, nil))
	a.Monitor = monitor.New(coretest.NewMachine(coretest.GPUs(8)).Open, cfg, log, nil)
	w := NewWatcher(Of(cfg.Policy, root, ""), log)
	ctx, cancel := context.WithCancel(t.Context())
	var parts sync.WaitGroup
	parts.Go(func() {
		w.Run(ctx, a, func(pools []string) { a.UpdateHost(func(h *inventory.Host) { h.MPS = pools }) })
	})
	parts.Go(func() {
		<-w.First()
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); parts.Wait() })
	return a
}

// schedulable counts the units that take new work.
func (a *agent) schedulable() (n int) {
	for u := range a.Current().Units() {
		if u.Health.Schedulable() {
			n++
		}
	}
	return n
}

// pass lets fake time pass.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestDaemonsComeAndGo(t *testing.T) {
	for name, pool := range map[string]string{"named by the policy": "few", "named by default": ""} {
		t.Run(name, func(t *testing.T) {
			cfg := core.DefaultConfig()
			cfg.Policy.Rules = []inventory.Rule{{Pool: pool, Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true}}}
			folder := pool
			if folder == "" {
				folder = "gpu.mps"
			}
			root := coretest.ShortDir(t)
			synctest.Test(t, func(t *testing.T) {
				daemon := coretest.MPSDaemon(t, Pipe(root, folder))
				a := start(t, root, cfg)
				pass(time.Second)
				if n := a.schedulable(); n != 16 || strings.Contains(a.log.String(), "MPS_DAEMON_DOWN") {
					t.Errorf("%d units, want 16 from the start:\n%s", n, a.log)
				}
				for range 3 {
					daemon.SetUnlinkOnClose(false) // as if killed
					_ = daemon.Close()
					pass(2 * time.Second)
					if n := a.schedulable(); n != 0 {
						t.Errorf("%d units without a daemon", n)
					}
					_ = os.Remove(filepath.Join(Pipe(root, folder), "control"))
					pass(2 * time.Second)
					daemon = coretest.MPSDaemon(t, Pipe(root, folder))
					pass(2 * time.Second)
					if n := a.schedulable(); n != 16 {
						t.Errorf("%d units with a daemon", n)
					}
				}
				if n := strings.Count(a.log.String(), `msg="MPS control daemon answers"`); n != 4 {
					t.Errorf("%d times", n)
				}
			})
		})
	}
}

// Without MPS no daemon is checked, and the loop sleeps.
func TestNoDaemonToCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, "/nowhere", core.DefaultConfig())
		pass(time.Hour)
		for _, l := range a.Watchdog().Tasks() {
			if l.Name == "MPS daemons" && l.Beats > 10 {
				t.Errorf("%d heartbeats", l.Beats)
			}
		}
	})
}
