package live

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// order gives an agent an order with its own command, as an operator does.
func (a *agents) order(name, verb string, args ...string) (said string, err error) {
	out, err := exec.CommandContext(a.t.Context(), a.binary(name), append([]string{verb, "--state-dir=" + a.state}, args...)...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, verb, err, out)
	}
	return string(out), err
}

// orderBoth gives both agents an order at once; it fails the test unless both obey.
func (a *agents) orderBoth(verb string) (longest time.Duration) {
	a.t.Helper()
	var orders sync.WaitGroup
	took, errs := [2]time.Duration{}, [2]error{}
	for i, name := range []string{nomadGPU, k8sGPU} {
		orders.Go(func() {
			began := time.Now()
			_, errs[i] = a.order(name, verb)
			took[i] = time.Since(began)
		})
	}
	orders.Wait()
	must(a.t, errs[:]...)
	a.t.Logf("%-55s nomad-gpu %5.3f s   k8s-gpu %5.3f s", "the command "+verb, took[0].Seconds(), took[1].Seconds())
	return max(took[0], took[1])
}

// holding are the device nodes of the machine that the agents have open.
func (a *agents) holding() (nodes []string) {
	a.t.Helper()
	for _, pids := range a.processes() {
		if len(pids) > 0 {
			held, err := a.HeldBy(pids[len(pids)-1])
			must(a.t, err)
			nodes = append(nodes, held...)
		}
	}
	return nodes
}

// released checks that nobody holds the driver and that the scheduler is told why nothing can be had.
func (a *agents) released(what string, devices []string) {
	a.t.Helper()
	if held := a.holding(); len(held) > 0 {
		a.t.Errorf("%s: the agents hold %v", what, held)
	}
	for _, id := range devices {
		if why := a.nomad.last().device(a.t, id).HealthDesc; !strings.Contains(why, "maintenance") {
			a.t.Errorf("%s: Nomad says of %s: %q", what, id, why)
		}
		if _, err := a.nomad.reserve(id); err == nil || !strings.Contains(err.Error(), "maintenance") {
			a.t.Errorf("%s: Reserve(%s): %v", what, id, err)
		}
		resource, _ := a.resources()
		if _, err := a.kubelet.Allocate(a.t.Context(), resource[id], id); err == nil || !strings.Contains(err.Error(), "maintenance") {
			a.t.Errorf("%s: Allocate(%s): %v", what, id, err)
		}
	}
}

// The driver is left alone on request, so completely that the module can be unloaded, and taken up again.
// Nothing else changes: the processes, the streams and the devices stay.
func TestQuiesceAndResume(t *testing.T) {
	t.Parallel()
	a := launch(t, "h100x8")
	all := a.units()
	a.settles("start", time.Now(), all)
	processes := a.processes()
	if len(a.holding()) == 0 {
		t.Error("the agents hold nothing of a driver that they use: this test shows nothing")
	}
	must(t, a.Set(2, "recovery_action", "1"), a.XID(2, 95)) // recovery action: GPU reset
	a.settles("XID 95 on one", time.Now(), all, all[2])

	began := time.Now()
	a.orderBoth("quiesce")
	if held := a.holding(); len(held) > 0 {
		t.Errorf("the command is done, and the agents hold %v", held)
	}
	well := without(all, all[2])
	d := a.settles("quiesced", began, all, all...)
	promised(t, "quiesced", d.most(), 2*time.Second) // Nomad is told at most once a second
	a.released("quiesced", well)
	a.orderBoth("quiesce")
	a.released("quiesced twice", well)

	must(t, a.TryUnload())
	a.released("the module is unloaded", well)
	must(t, a.Reset(2), a.Load())
	a.released("a GPU was reset, and the module is loaded", well)

	began = time.Now()
	a.orderBoth("resume")
	d = a.offers("resumed: those that were well", began, well)
	promised(t, "resumed", d.most(), 2*time.Second)
	a.settles("resumed: the one that was reset", began, all)
	a.granted("resumed", all...)
	for _, name := range []string{nomadGPU, k8sGPU} {
		if said, err := a.order(name, "resume"); err == nil || !strings.Contains(err.Error(), "nothing to resume") {
			t.Errorf("%s resume again: %s, %v", name, said, err)
		}
	}
	a.sameProcesses("maintenance", processes)
	for resource, n := range a.registered() {
		if n != 1 {
			t.Errorf("%s was registered %d times", resource, n)
		}
	}
}

// The same by signals, for who has no socket at hand.
func TestQuiesceBySignal(t *testing.T) {
	t.Parallel()
	a := launch(t, "t4")
	all := a.units()
	a.settles("start", time.Now(), all)
	processes := a.processes()
	signal := func(s syscall.Signal) {
		for _, name := range []string{nomadGPU, k8sGPU} {
			must(t, syscall.Kill(processes[name][0], s))
		}
	}
	began := time.Now()
	signal(syscall.SIGUSR1)
	a.settles("SIGUSR1", began, all, all...)
	a.until("nothing is held", func() bool { return len(a.holding()) == 0 })
	a.released("SIGUSR1", all)
	began = time.Now()
	signal(syscall.SIGUSR2)
	a.settles("SIGUSR2", began, all)
	a.granted("SIGUSR2", all...)
	a.sameProcesses("signals", processes)
}

// An agent that is killed during maintenance must not take the driver when it is started again. And while
// nobody has it, the whole driver can be replaced: what follows from its version follows, without a wait for
// processes to end; who the GPUs are and what their groups are called stays.
func TestQuiesceOutlastsTheAgents(t *testing.T) {
	t.Parallel()
	a := launch(t, "h100x8")
	all := a.units()
	a.settles("start", time.Now(), all)
	names := a.nomad.last().names()
	a.orderBoth("quiesce")
	a.until("the order is on disk", func() bool {
		return a.noted(nomadGPU) && a.noted(k8sGPU)
	})
	for _, name := range []string{nomadGPU, k8sGPU} {
		must(t, syscall.Kill(a.pids(name)[0], syscall.SIGKILL))
	}
	took := a.until("both are started again", func() bool { return len(a.pids(nomadGPU)) == 2 && len(a.pids(k8sGPU)) == 2 })
	t.Logf("both agents are started again after %v", took)
	a.until("both orchestrators hear the new ones", func() bool {
		_, connected := a.kubelet.Devices(gpuResource)
		return a.nomad.last().stream == 2 && connected && a.registered()[gpuResource] == 2
	})
	a.settles("killed in maintenance, and started again", time.Now(), all, all...)
	a.released("started again", all)

	const version = "590.48.01"
	must(t, a.TryUnload(), a.SetDriver(version), a.Load())
	a.released("another driver", all)
	began := time.Now()
	a.orderBoth("resume")
	a.settles("resumed with another driver", began, all)
	a.granted("another driver", all...)
	a.isVersion(version, names)
}

// isVersion checks that Nomad knows of another driver, and that this is all that changed.
func (a *agents) isVersion(version string, names map[string]string) {
	a.t.Helper()
	f := a.nomad.last()
	for id, name := range names {
		if got := f.names()[id]; got != name {
			a.t.Errorf("%s was in group %q and is in %q", id, name, got)
		}
		if got := f.group(a.t, id).Attributes["driver_version"].GoString(); got != version {
			a.t.Errorf("%s: driver_version %s, want %s", id, got, version)
		}
	}
}

// The usual way to upgrade: agents that live on have the old library, so they end when they take the new driver
// up, and others are started.
func TestDriverIsUpgradedInMaintenance(t *testing.T) {
	t.Parallel()
	a := launch(t, "t4")
	all := a.units()
	a.settles("start", time.Now(), all)
	names := a.nomad.last().names()
	a.orderBoth("quiesce")
	const version = "590.48.01"
	must(t, a.TryUnload(), a.SetDriver(version), a.Load())
	a.released("another driver", all)
	began := time.Now()
	a.orderBoth("resume")
	a.until("each is another process", func() bool { return len(a.pids(nomadGPU)) == 2 && len(a.pids(k8sGPU)) == 2 })
	a.settles("resumed with another driver", began, all)
	a.granted("another driver", all...)
	a.isVersion(version, names)
}

// noted reports whether the state file of an agent has a maintenance.
func (a *agents) noted(name string) bool {
	text, err := os.ReadFile(filepath.Join(a.state, name+".json"))
	return err == nil && strings.Contains(string(text), `"Away"`)
}

// An order that was answered is kept, even if the agent is killed at once.
func TestQuiesceIsKeptOnceAnswered(t *testing.T) {
	t.Parallel()
	a := launch(t, "t4")
	all := a.units()
	a.settles("start", time.Now(), all)
	a.orderBoth("quiesce")
	if !a.noted(nomadGPU) || !a.noted(k8sGPU) {
		t.Error("answered, and not on disk")
	}
}

// A GPU is cut up anew while the agents leave the driver alone. The old instances are withdrawn only then.
func TestLayoutInMaintenance(t *testing.T) {
	t.Parallel()
	a := launch(t, "a100-mig")
	before := a.units()
	a.settles("start", time.Now(), before)
	a.orderBoth("quiesce")
	a.settles("quiesced", time.Now(), before, before...)
	must(t, a.SetMIG(sevenths, three("2g.20gb")...))
	a.released("cut anew", before)
	began := time.Now()
	a.orderBoth("resume")
	a.settles("resumed with another layout", began, a.units())
	a.granted("another layout", a.unitsOf(sevenths)...)
}

// A call that hangs can't be taken back: the order is carried out as far as it goes, and says what is in the way.
func TestQuiesceWhileACallHangs(t *testing.T) {
	t.Parallel()
	a := launch(t, "h100x8")
	all := a.units()
	a.settles("start", time.Now(), all)
	const call = "nvmlDeviceGetFieldValues"
	must(t, a.Hang(simdriver.GPU(3), call))
	enough := a.calls(call) + 40 // eight GPUs, two agents: each has asked number 3 by then
	a.until("the calls hang", func() bool { return a.calls(call) >= enough })

	began := time.Now()
	var orders sync.WaitGroup
	for _, name := range []string{nomadGPU, k8sGPU} {
		orders.Go(func() {
			if said, err := a.order(name, "quiesce"); err == nil || !strings.Contains(err.Error(), call) {
				t.Errorf("%s quiesce: %s, %v", name, said, err)
			}
		})
	}
	a.settles("quiesced while a call hangs", began, all, all...)
	orders.Wait()
	t.Logf("both orders answered after %v", time.Since(began))
	if err := a.TryUnload(); err == nil {
		t.Error("rmmod under a call that hangs")
	}
	must(t, a.Heal())
	a.until("the call came back, and nothing is held", func() bool { return len(a.holding()) == 0 })
	a.released("the call came back", all)
	began = time.Now()
	a.orderBoth("resume")
	a.settles("resumed", began, all)
	a.granted("resumed", all...)
}
