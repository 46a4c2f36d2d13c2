package health

import (
	"context"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A call that does not come back makes its GPU unhealthy after the deadline, costs one thread, and keeps
// nobody: not the other GPUs, not who asks the agent, not its end.
func TestCase13Hang(t *testing.T) {
	t.Run("only GPU 0", func(t *testing.T) {
		f := follow(t, simdriver.Start(t, "h100x8"), hasty, func(c *core.Config) { c.Health.CallDeadline = time.Second })
		f.until("eight healthy GPUs", f.all(health.Healthy, 8))
		hung := time.Now()
		must(t, f.Hang(simdriver.GPU(0), "*"))
		f.until("GPU 0 does not answer", f.only(0, health.Unhealthy, "NOT_ANSWERING"))
		if took := time.Since(hung); took < time.Second || took > 5*time.Second {
			t.Errorf("unhealthy after %v", took)
		}
		busy := slices.DeleteFunc(f.session.Load().Busy(), func(c gpu.Call) bool { return c.Index != 0 })
		if len(busy) != 1 {
			t.Errorf("in the driver: %+v", busy)
		}
		must(t, f.XID(0, 119), f.XID(3, 13), f.Set(4, "recovery_action", "1"))
		f.until("GPU 4 is still looked at", func(inv *inventory.Inventory) bool {
			u, _ := inv.Unit(inventory.UnitID(f.UUID(4)))
			return u.Health.Cause() == "RECOVERY_ACTION_GPU_RESET"
		})
		began := time.Now()
		if usage, err := f.Usage(t.Context()); err != nil || len(usage) != 8 || time.Since(began) > time.Second {
			t.Errorf("numbers: %d devices, %v, after %v", len(usage), err, time.Since(began))
		}
		kubelet := f.kubelet()
		until(t, "the kubelet knows eight devices", func() bool { d, _ := kubelet.Devices(resource); return len(d) == 8 })
		began = time.Now()
		if _, err := kubelet.Allocate(t.Context(), resource, f.UUID(1)); err != nil || time.Since(began) > time.Second {
			t.Errorf("GPU 1 is given away: %v, after %v", err, time.Since(began))
		}
		began = time.Now()
		if _, err := kubelet.Allocate(t.Context(), resource, f.UUID(0)); err == nil || time.Since(began) > time.Second {
			t.Errorf("GPU 0 is given away: %v, after %v", err, time.Since(began))
		}
		if n := about(f.since(hung), gpu.DeviceID(f.UUID(0))); n != 1 {
			t.Errorf("%d publications about GPU 0", n)
		}
	})
	t.Run("the driver as a whole", func(t *testing.T) {
		f := follow(t, simdriver.Start(t, "h100x8"), hasty)
		f.until("eight healthy GPUs", f.all(health.Healthy, 8))
		must(t, f.Hang(simdriver.All, "nvmlDeviceGetCount"))
		f.until("nobody knows", f.all(health.Unknown, 8))
		must(t, f.Heal())
		f.until("eight healthy GPUs again", f.all(health.Healthy, 8))
	})
	t.Run("the default deadline", func(t *testing.T) {
		if d := health.DefaultPolicy().CallDeadline; d != time.Minute {
			t.Error(d)
		}
	})
	t.Run("the agent can end", func(t *testing.T) {
		if m, ok := inChild(t); ok {
			f := follow(t, m, hasty)
			f.until("eight healthy GPUs", f.all(health.Healthy, 8))
			must(t, m.Hang(simdriver.GPU(0), "*"))
			f.until("GPU 0 does not answer", f.only(0, health.Unhealthy, "NOT_ANSWERING"))
			began := time.Now()
			err := f.stop()
			if took := time.Since(began); err != nil || took > 2*time.Second {
				t.Errorf("ended after %v: %v", took, err)
			}
			return
		}
		child(t, simdriver.Start(t, "h100x8").Root)
	})
}

const resource = "nvidia.com/gpu"

// kubelet serves the machine to a kubelet, over its sockets.
func (f *live) kubelet() *kubelettest.Kubelet {
	f.t.Helper()
	dir, err := os.MkdirTemp("", "health") // t.TempDir's names are too long for a socket
	must(f.t, err)
	k := kubelettest.New(dir)
	must(f.t, k.Start())
	ctx, cancel := context.WithCancel(f.t.Context())
	var serving sync.WaitGroup
	serving.Go(func() { _ = kubeadapter.New(f, kubeadapter.Options{KubeletSocket: k.Socket()}).Run(ctx) })
	f.t.Cleanup(func() { cancel(); serving.Wait(); k.Stop(); _ = os.RemoveAll(dir) })
	return k
}

// The end of a hang is no recovery from what caused it.
func TestCase14HangEnds(t *testing.T) {
	m := newRig(t, "h100x8")
	m.patience = 50 * time.Millisecond
	m.look()
	m.expect("at the start", nil)
	m.xid(0, 119)
	must(t, m.Hang(simdriver.GPU(0), "*"))
	m.step(2 * time.Minute)
	m.expect("hanging", sick(health.Unhealthy, 0))
	m.heal()
	m.set(0, "recovery_action = 1")
	m.step(10 * time.Second)
	if h := m.health(0); h.Cause() != "XID_119" || h.RecoveryAction != health.RecoveryReset {
		t.Errorf("the GPU was not asked anew: %s", h)
	}
	m.step(time.Hour)
	m.expect("it answers, and was not reset", sick(health.Unhealthy, 0))
	m.reset(0)
	m.step(3 * time.Minute)
	m.expect("reset", nil)
}
