package agents

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A driver that is slow after a start, as after a reset of a large machine, has no device leave its orchestrator: Nomad
// gets the devices of the history, unhealthy, and the kubelet keeps those that it has.
func TestNoDeviceLeavesWhileTheDriverIsSlow(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		a.startHealthy()
		a.awaitFile(a.history(), a.driver.UUID(7))
		a.kill()
		a.must(a.driver.Hang(simdriver.All, "nvmlInit"))
		a.start()
		if a.program == nomadGPU {
			a.healthy(8, 0)
			for _, v := range a.devices() {
				if !strings.Contains(v.Reason, "it has not answered since the agent started") {
					a.Errorf("%s: %q", v.ID, v.Reason)
				}
			}
		} else {
			a.awaitSocket()
			a.shows("/inventory", a.driver.UUID(0))
			if n := len(a.kubelet.Lists(resource)); n != a.lists {
				a.Errorf("the kubelet got %d lists before the driver had answered", n-a.lists)
			}
		}
		a.must(a.driver.Heal(simdriver.All))
		a.healthy(8, 8)
		if a.program != nomadGPU {
			return
		}
		for i, f := range a.nomad.Fingerprints() {
			n := 0
			for _, g := range f.Groups {
				n += len(g.Devices)
			}
			if n != 8 {
				a.Errorf("fingerprint %d has %d devices", i, n)
			}
		}
	})
}

// A GPU with odd bytes in its name stays, and one whose UUID is none leaves alone: its neighbours, the streams and the
// files are not affected.
func TestOddBytesOfTheDriver(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		a.startHealthy()
		a.kill()
		a.must(a.driver.Set(1, "name", "NVIDIA H100\xff 80GB"), a.driver.Set(2, "uuid", "GPU-\xff,all"))
		a.start()
		a.await("seven healthy devices", func() bool {
			n := 0
			for _, d := range a.devices() {
				if d.Healthy {
					n++
				}
			}
			return n == 7
		})
		a.allocates(1)
	})
}

// The files of a state directory that is emptied while the agent runs are there again soon, although nothing changes.
func TestRemovedFilesOfTheStateDirectory(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		a.startHealthy()
		a.awaitFile(a.history(), a.driver.UUID(7))
		files := []string{a.history()}
		if a.program == nomadGPU {
			files = append(files, filepath.Join(a.state, "nomad-gpu.groups.json"))
		}
		for _, path := range files {
			a.awaitFile(path, "{")
			a.must(os.Remove(path))
		}
		for _, path := range files {
			check.Within(a.T, 2*timeout, path, func() bool { _, err := os.Stat(path); return err == nil })
		}
	})
}
