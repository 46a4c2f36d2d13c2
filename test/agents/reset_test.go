package agents

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/test/check"
)

// Case 22 of the contract of rescue, of an agent beside the one that resets a GPU: it has no device node open, lists its GPUs, and gives none out. When the
// reset has ended, or the other agent was killed, it gives them out within a second or two, and nothing is known that was not before.
func TestReleaseForAResetByAnotherAgent(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		a.start()
		slots, err := a.driver.Slots()
		a.must(err)
		all := len(slots)
		a.healthy(all, all)
		other := map[string]string{k8sGPU: nomadGPU, nomadGPU: k8sGPU}[a.program]
		lock, err := filelock.Take(filepath.Join(a.state, ownership.FolderName, other+".lock"))
		a.must(err)
		mark := func(all map[gpu.DeviceID]ownership.Mark) {
			a.Helper()
			a.must(ownership.Change(a.Context(), a.state, func(f ownership.File) (ownership.File, error) {
				f.Taken = all
				return f, nil
			}))
		}
		const reset = gpu.DeviceID("GPU-5f54341b-13e6-501e-98b5-e04f579201b7") // that this agent does not offer
		released := map[gpu.DeviceID]ownership.Mark{reset: {Agent: other, Purpose: inventory.Reset, DriverReleased: true}}
		expectReleased := func() {
			a.Helper()
			// A second or two; without an event the agent would look after 30 s. The machine may be busy.
			check.Within(a.T, 15*time.Second, "no device node is open", func() bool {
				held, err := a.driver.HeldBy(a.cmd.Process.Pid)
				return err == nil && len(held) == 0
			})
			a.healthy(all, 0)
			for id, v := range a.devices() {
				if _, err := a.allocate(id); err == nil || !strings.Contains(err.Error(), "the reset of a GPU") || !strings.Contains(v.Reason, "the reset of a GPU") {
					a.Errorf("%s is %q, allocated: %v", id, v.Reason, err)
				}
			}
			a.prints("released for the reset of "+string(reset), "inspect")
		}
		expectBack := func() {
			a.Helper()
			began := time.Now()
			a.healthy(all, all)
			if took := time.Since(began); took > 15*time.Second { // likewise; a lock that is not released counts for 5 min
				a.Errorf("back after %v", took)
			}
			for _, d := range a.report().Devices {
				if !d.Schedulable {
					a.Errorf("%s: %s", d.ID, d.Health)
				}
			}
		}
		mark(released)
		expectReleased()
		mark(nil)
		expectBack()
		mark(released)
		expectReleased()
		a.must(lock.Close()) // as if it were killed
		expectBack()
		a.must(os.Remove(filepath.Join(a.state, ownership.FileName)))
	})
}
