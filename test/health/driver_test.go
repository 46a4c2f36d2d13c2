package health

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// all is every GPU of the eight-GPU machine in one state, but for some.
func all(state health.State, but map[int]health.State) map[int]health.State {
	states := sick(state, 0, 1, 2, 3, 4, 5, 6, 7)
	maps.Copy(states, but)
	return states
}

// Without its driver a GPU is neither well nor ill. Its devices stay listed, and no stream ends.
func TestCase23DriverReload(t *testing.T) {
	t.Run("the same version", func(t *testing.T) {
		m := well(t, "h100x8")
		must(t, m.Unload())
		m.step(10 * time.Minute)
		m.expect("unloaded", all(health.Unknown, nil))
		must(t, m.Load())
		m.step(20 * time.Second)
		m.expect("loaded", nil)
	})
	t.Run("another version", func(t *testing.T) {
		if machine, ok := inChild(t); ok { // only a new process can load another library
			m := rigOn(t, machine)
			m.restore()
			m.look()
			m.step(20 * time.Second)
			m.expect("another process, the same history", sick(health.Degraded, 5))
			return
		}
		m := well(t, "h100x8")
		m.xid(5, 157) // which only an operator clears
		must(t, m.SetDriver("575.57.08"))
		m.step(10 * time.Second)
		m.expect("replaced under this process", all(health.Unknown, nil))
		if _, err := nvidia.Open(nvidia.Options{Roots: m.cfg.Roots}); !errors.Is(err, gpu.ErrDriverStale) {
			t.Errorf("another session in this process: %v", err)
		}
		m.end()
		child(t, m.Root)
	})
	t.Run("Nomad's stream goes on", func(t *testing.T) {
		f := follow(t, simdriver.Start(t, "h100x8"), hasty)
		stream := f.fingerprint()
		await(t, stream, "eight healthy devices", 8)
		must(t, f.Unload())
		await(t, stream, "eight devices that take no work", 0)
		must(t, f.Load())
		await(t, stream, "eight healthy devices again", 8)
	})
}

// The kernel driver was unbound from one GPU and bound again: whatever a reset mends is mended, once the
// recovery action is None again.
func TestCase29UnbindAndBind(t *testing.T) {
	t.Run("the driver was reloaded", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(2, 46)
		m.set(3, "recovery_action = 1")
		m.xid(3, 46)
		m.step(time.Hour)
		m.expect("nothing happened", sick(health.Unhealthy, 2, 3))
		must(t, m.Unload())
		m.step(time.Minute)
		m.expect("released", all(health.Unknown, sick(health.Unhealthy, 2, 3)))
		if closed := m.calls("nvmlShutdown"); closed != 1 || m.session != nil {
			t.Errorf("%d sessions closed", closed)
		}
		must(t, m.Load())
		m.step(10 * time.Minute)
		m.expect("the driver still asks for a reset of GPU 3", sick(health.Unhealthy, 3))
	})
	t.Run("the driver was only not to be asked", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(2, 46)
		m.step(time.Minute)
		must(t, m.Fail(simdriver.All, "nvmlInit", "UNKNOWN", 3))
		m.restart()
		m.step(time.Hour)
		m.expect("nothing was reloaded", sick(health.Unhealthy, 2))
	})
	t.Run("only the library was missing", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(2, 119) // which is not cleared without a recovery action
		m.step(time.Minute)
		must(t, m.Hide()) // as a driver root that is mounted anew
		m.restart()
		m.step(time.Minute)
		m.expect("no library", all(health.Unknown, sick(health.Unhealthy, 2)))
		if d := m.state.Inventory.Driver(); d.State != gpu.DriverAbsent {
			t.Errorf("the driver is %s", d.State)
		}
		must(t, m.Unhide())
		m.step(time.Hour)
		m.expect("nothing was reloaded", sick(health.Unhealthy, 2))
	})
	t.Run("the library was missing, and the module was unloaded", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(2, 119)
		must(t, m.Hide(), m.Unload())
		m.step(time.Minute)
		m.expect("no library and no module", all(health.Unknown, sick(health.Unhealthy, 2)))
		must(t, m.Load())
		m.step(time.Minute)
		must(t, m.Unhide())
		m.step(10 * time.Minute)
		m.expect("loaded anew", nil)
	})
	t.Run("one GPU was rebound", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(2, 46)
		m.xid(3, 46)
		m.step(time.Hour)
		must(t, m.Unbind(2), m.Bind(2))
		m.step(3 * time.Minute)
		m.expect("rebound", sick(health.Unhealthy, 3))
		must(t, m.Bind(3))
		m.step(3 * time.Minute)
		m.expect("bound, which it may always have been", sick(health.Unhealthy, 3))
	})
	t.Run("slowly", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(2, 46)
		must(t, m.Unbind(2))
		m.step(time.Hour)
		m.expect("unbound", sick(health.GPULost, 2))
		must(t, m.Bind(2))
		m.step(3 * time.Minute)
		m.expect("bound", nil)
	})
}

// fingerprint is what Nomad is told.
func (f *live) fingerprint() <-chan *device.FingerprintResponse {
	f.t.Helper()
	log := hclog.New(&hclog.LoggerOptions{Output: io.Discard})
	p := nomadadapter.New(f.t.Context(), "2.0.0", func(context.Context, nomadadapter.Settings, *slog.Logger) nomadadapter.Source { return f }, log)
	stream, err := p.Fingerprint(f.t.Context())
	must(f.t, err)
	return stream
}

// await reads the stream until so many of eight devices are healthy. It must neither end nor bring an error:
// Nomad would drop all devices then, and never ask again.
func await(t *testing.T, stream <-chan *device.FingerprintResponse, what string, healthy int) {
	t.Helper()
	for deadline := time.After(20 * time.Second); ; {
		select {
		case r, ok := <-stream:
			if !ok || r.Error != nil {
				t.Fatalf("%s: the stream ended (%t) or failed: %v", what, !ok, r)
			}
			devices, well := 0, 0
			for _, g := range r.Devices {
				for _, d := range g.Devices {
					devices++
					if d.Healthy {
						well++
					}
				}
			}
			if devices != 8 {
				t.Errorf("%s: %d devices are listed", what, devices)
			}
			if well == healthy {
				return
			}
		case <-deadline:
			t.Fatal("never: ", what)
		}
	}
}
