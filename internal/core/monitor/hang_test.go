package monitor_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A hung call: that GPU is unhealthy, the others are not, reservations and shutdown go on.
func TestHungCall(t *testing.T) {
	onGPUs(t, 4, func(t *testing.T, m *coretest.Machine, r *running) {
		release := m.Hang("Probe", gpu.WholeGPU(coretest.GPU(2)))
		r.after(71*time.Second).expect("hung", map[int]health.State{2: health.Unhealthy})
		if h := r.healthOf(2); h.Reason != health.ReasonUnresponsive || h.Detail != "nvmlProbe" {
			t.Errorf("health: %v", h)
		}
		if _, err := r.Current().Reserve(inventory.UnitID(coretest.GPU(0))); err != nil {
			t.Errorf("neighbour: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := r.Usage(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Usage: %v", err)
		}
		m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 79})
		synctest.Wait()
		r.expect("events arrive all the same", map[int]health.State{0: health.GPULost, 2: health.Unhealthy})
		release()
		r.after(2*time.Minute).expect("released", map[int]health.State{0: health.Unhealthy})
	})
}

func TestStopsInTimeWhateverHangs(t *testing.T) {
	for _, method := range []string{"Open", "Snapshot", "Probe", "Wait", "Close"} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(2))
				release := m.Hang(method, gpu.Node)
				r := run(t, m)
				r.after(time.Minute)
				start := time.Now()
				if err := r.stop(); err != nil {
					t.Errorf("Run returned %v", err)
				}
				if d := time.Since(start); d >= 2*time.Second {
					t.Errorf("stopped after %v", d)
				}
				release()
				r.after(2 * time.Second) // the abandoned goroutines end
			})
		})
	}
}

// A session that opens after the monitor was stopped is closed: NVML counts its users.
func TestLateSessionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		release := m.Hang("Open", gpu.Node)
		r := run(t, m)
		go func() {
			time.Sleep(time.Second)
			release()
		}()
		start := time.Now()
		must(t, r.stop())
		if d := time.Since(start); d != time.Second || m.Sessions() != 0 || m.Calls()["Close"] != 1 {
			t.Errorf("%d sessions open after %v, calls %v", m.Sessions(), d, m.Calls())
		}
	})
}

// hashicorp/nomad-device-nvidia and NVIDIA's plugin spin when the event wait fails.
func TestFailingEventWaitDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(8))
		m.FailWait(errors.New("GPU is lost"))
		r := run(t, m)
		r.after(time.Minute).expect("no GPU is unhealthy", nil)
		calls := m.Calls()
		if calls["Wait"] > 61 || calls["Probe"] > 90 {
			t.Errorf("calls in a minute: %v", calls)
		}
		m.FailWait(nil)
		m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 48})
		r.after(time.Second).expect("events again", map[int]health.State{1: health.Unhealthy})
	})
}
