package monitor_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// sharedByMPS offers every GPU twice by MPS, as pool "gpu.mps".
func sharedByMPS(c *core.Config) {
	c.Policy.Rules = []core.Rule{{Sharing: &core.Sharing{Mode: core.MPS, Replicas: 2, OnePerRequest: true}}}
}

// well counts the units of an inventory that take work.
func well(inv *core.Inventory) (n int) {
	for u := range inv.Units() {
		if u.Health.Schedulable() {
			n++
		}
	}
	return n
}

// What is told before Run is known when the first GPU is read: no unit is published as sick for want of a daemon
// that was asked already.
func TestHostToldBeforeRunCountsFromTheFirstReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := core.DefaultConfig()
		sharedByMPS(&cfg)
		m := monitor.New(coretest.NewMachine(coretest.GPUs(2)).Open, cfg, slog.New(slog.DiscardHandler), nil)
		m.SetHost(core.Host{})
		m.SetHost(core.Host{MPS: []string{"gpu.mps"}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		for inv := range m.Watch(ctx) {
			if inv.Len() == 0 {
				continue
			}
			if inv.Len() != 4 || well(inv) != 4 {
				t.Errorf("the first of %d units: %d take work", inv.Len(), well(inv))
			}
			break
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestHostIsFoldedAndPublishedOnlyIfItMatters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, sharedByMPS)
		if n := well(r.Current()); n != 0 {
			t.Errorf("%d units take work though nobody has found a daemon", n)
		}
		r.SetHost(core.Host{MPS: []string{"gpu.mps"}})
		synctest.Wait()
		if n := well(r.Current()); n != 4 {
			t.Errorf("%d units take work", n)
		}
		published := len(r.seen)
		r.SetHost(core.Host{MPS: []string{"gpu.mps", "other.mps"}})
		r.after(time.Minute)
		if len(r.seen) != published || len(r.State().Host.MPS) != 2 {
			t.Errorf("%d needless publications; host %v", len(r.seen)-published, r.State().Host)
		}

		machine.FailOpen(core.ErrNoDriver) // it is taken in without a session, too
		machine.FailSession(core.ErrDriverLost)
		r.after(time.Minute)
		r.SetHost(core.Host{})
		synctest.Wait()
		if len(r.State().Host.MPS) != 0 {
			t.Errorf("host %v", r.State().Host)
		}
	})
}

// A storm of calls by one who waits for nobody: the last one counts, and Run or not, none blocks.
func TestHostNeverBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(t, coretest.NewMachine(coretest.GPUs(1)))
		for n := range 10_000 {
			r.SetHost(core.Host{MPS: []string{fmt.Sprint(n)}})
		}
		synctest.Wait()
		if got := r.State().Host.MPS; len(got) != 1 || got[0] != "9999" {
			t.Errorf("host: %v", got)
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
		r.SetHost(core.Host{})
		r.SetHost(core.Host{})
	})
}

// Findings and contests are logged when they appear and when they go, whatever the driver does in between.
func TestFindingsAndContestsAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		cfg := core.DefaultConfig()
		cfg.Policy.Rules = []core.Rule{{Select: core.Selector{At: "policy.yaml:7: rules[0].select", Models: []string{"NVIDIA B200"}}}}
		machine := coretest.NewMachine(coretest.GPUs(2))
		m := monitor.New(machine.Open, cfg, slog.New(slog.NewTextHandler(&log, nil)), nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		contested := core.Host{Claims: []core.Claim{{Agent: "nomad-gpu", At: core.WholeGPU(coretest.GPU(1))}}}
		for range 3 {
			m.SetHost(contested)
			time.Sleep(5 * time.Minute) // rescans
			machine.Silence(coretest.GPU(0), core.ProbeFailed)
			time.Sleep(5 * time.Minute)
			machine.Restore(coretest.GPU(0))
			machine.FailSession(core.ErrDriverLost)
			time.Sleep(5 * time.Minute)
			machine.FailSession(nil)
			time.Sleep(5 * time.Minute)
		}
		other := coretest.GPUs(2)
		other.Devices[0].Model = "NVIDIA B200"
		machine.Set(other)
		m.SetHost(core.Host{})
		time.Sleep(5 * time.Minute)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for what, level := range map[string]string{
			"the policy does not fit": "level=ERROR", "the policy fits": "level=INFO",
			"is offered by another agent": "level=WARN", "no longer offered by another": "level=INFO",
		} {
			var lines []string
			for line := range strings.Lines(log.String()) {
				if strings.Contains(line, what) {
					lines = append(lines, line)
				}
			}
			if len(lines) != 1 || !strings.Contains(lines[0], level) {
				t.Errorf("%q, want one %s: %q", what, level, lines)
			}
		}
	})
}
