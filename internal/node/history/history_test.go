package history_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestBoot(t *testing.T) {
	d := newDisk(t)
	d.save(d.open(), core.Checkpoint{BootID: "earlier"})
	if r, boot := d.open().Load(); r.BootID != "earlier" || boot != "b00t" {
		t.Errorf("a reboot is not seen: %q, %q", r.BootID, boot)
	}
	for _, unknown := range []string{"", "\n"} {
		d.boot(unknown)
		f := d.open()
		if r, boot := f.Load(); r.BootID != "earlier" || boot != "earlier" {
			t.Errorf("taken for a reboot: %q, %q", r.BootID, boot)
		}
		d.save(f, full())
		if p := f.Problem(); !strings.Contains(p, "reboot") || !strings.Contains(p, "boot_id") || d.logged("saved again") > 0 {
			t.Errorf("problem %q, log %s", p, d.log.String())
		}
		d.save(f, core.Checkpoint{BootID: "earlier"})
		d.boot("b00t")
	}
	// Saved by an agent that could not read the boot ID, loaded by one that can.
	d.save(d.open(), core.Checkpoint{})
	if r, boot := d.open().Load(); r.BootID != "b00t" || boot != "b00t" {
		t.Errorf("taken for a reboot: %q, %q", r.BootID, boot)
	}
}

// In a container of LXC /proc/uptime is the age of the container (lxcfs mounts a file there), and the boot ID that of the host: the boot time is that of
// the host, so that another container with the same history is no jump of the wall clock.
func TestBootTimeInAContainerOfLXC(t *testing.T) {
	if os.Getenv("UPTIME_OF_LXCFS") != "" { // in a mount namespace of its own
		text, err := os.ReadFile("/proc/uptime")
		boot, bootErr := history.ReadBoot("")
		check.NoError(t, errors.Join(err, bootErr))
		fmt.Printf("%s %d\n", strings.Fields(string(text))[0], boot.Time.UnixMilli())
		return
	}
	boot, err := history.ReadBoot("")
	check.NoError(t, err)
	file := filepath.Join(t.TempDir(), "uptime")
	check.NoError(t, os.WriteFile(file, []byte("3.21 1.00\n"), 0o600))
	cmd := exec.Command("unshare", "--mount", "sh", "-c", `mount --bind "$1" /proc/uptime && exec "$2" -test.run=TestBootTimeInAContainerOfLXC`, "sh", file, os.Args[0])
	cmd.Env = append(os.Environ(), "UPTIME_OF_LXCFS=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Skipf("SKIPPED: no mount namespace: %v: %s", err, out)
	}
	var uptime float64
	var milli int64
	if _, err := fmt.Sscan(string(out), &uptime, &milli); err != nil || uptime != 3.21 {
		t.Fatalf("%v: %s", err, out)
	}
	if d := time.UnixMilli(milli).Sub(boot.Time); d.Abs() > health.ClockTolerance {
		t.Errorf("the container booted %v after the host", d)
	}
}

// The wall clock is set while no agent runs. Times in the history keep their distance from now, which follows from the uptime.
func TestHistoryFollowsTheWallClock(t *testing.T) {
	d := newDisk(t)
	uptime := func(since time.Duration) {
		text := fmt.Sprintf("%.2f 12345.67\n", since.Seconds())
		check.NoError(t, os.WriteFile(filepath.Join(d.proc, "uptime"), []byte(text), 0o600))
	}
	uptime(2 * time.Hour)
	r, boot := d.open().Load()
	r.BootID, r.Driver = boot, "580"
	lost := time.Now().Add(-100 * time.Minute)
	r.Conditions = []health.Condition{{At: gpu.WholeGPU("GPU-a"), Reason: health.ReasonLost, State: health.GPULost, Since: lost, Last: lost, Count: 1}}
	d.save(d.open(), r)
	for _, since := range []time.Duration{2 * time.Hour, 26 * time.Hour, time.Hour} { // the clock is right, 24 h behind, 1 h ahead
		uptime(since)
		r, _ := d.open().Load()
		want := lost.Add(2*time.Hour - since)
		if got := r.Conditions[0].Last; got.Sub(want).Abs() > 2*time.Second {
			t.Errorf("up %v: lost at %v, want %v", since, got, want)
		}
	}
	check.NoError(t, os.Remove(filepath.Join(d.proc, "uptime")))
	if r, _ := d.open().Load(); !r.Conditions[0].Last.Equal(lost) {
		t.Errorf("without an uptime: lost at %v, was %v", r.Conditions[0].Last, lost)
	}
	uptime(2 * time.Hour)
	f := d.open()
	f.SetWallClock(func() time.Time { return time.Now().Add(-26 * time.Hour) })
	if r, _ := f.Load(); r.Conditions[0].Last.Sub(lost.Add(-26*time.Hour)).Abs() > 2*time.Second {
		t.Errorf("with the clock 26 h behind: lost at %v, was %v", r.Conditions[0].Last, lost)
	}
}

// run runs a monitor with the history for a minute, then calls during and stops it.
func (d *disk) run(m *coretest.Machine, during func(*monitor.Monitor)) {
	d.Helper()
	ctx, stop := context.WithCancel(d.Context())
	agent := monitor.New(m.Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), d.open())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	time.Sleep(time.Minute)
	synctest.Wait()
	during(agent)
	stop()
	if err := <-done; err != nil {
		d.Error(err)
	}
}

// A restarted agent has the history of a GPU with a fault and of one that is lost.
func TestHistoryOutlivesTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		machine := coretest.NewMachine(coretest.GPUs(3))
		healthOf := func(m *monitor.Monitor, n int) health.Health {
			u, _ := m.Current().Unit(inventory.UnitID(coretest.GPU(n)))
			return u.Health
		}
		var before health.Health
		d.run(machine, func(m *monitor.Monitor) {
			machine.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 79})
			machine.FailGPU(coretest.GPU(2), health.Lost)
			time.Sleep(time.Minute)
			synctest.Wait()
			before = healthOf(m, 1)
		})
		d.run(machine, func(m *monitor.Monitor) {
			if got := healthOf(m, 1); got.Cause() != "XID_79" || got.State < health.Unhealthy || !got.Since.Equal(before.Since) {
				t.Errorf("GPU 1 was %s and is %s", before, got)
			}
			if got := healthOf(m, 2); got.State != health.GPULost {
				t.Errorf("GPU 2 is %s", got)
			}
			if got := healthOf(m, 0); got.State != health.Healthy {
				t.Errorf("GPU 0 is %s", got)
			}
			if h, _ := m.State().Ledger.History(coretest.GPU(1)); len(h.FaultCounts) != 1 || h.FaultCounts[0].Count != 1 {
				t.Errorf("counted: %+v", h.FaultCounts)
			}
		})
		d.boot("another")
		d.run(machine, func(m *monitor.Monitor) {
			if got := healthOf(m, 1); got.State != health.Healthy {
				t.Errorf("GPU 1 after a reboot: %s", got)
			}
		})
	})
}
