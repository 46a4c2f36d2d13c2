package live

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The driver is installed, unloaded and loaded while both agents run: their processes and streams stay.
func TestDriverLifecycle(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "h100x8", prepare: (*simdriver.Machine).Hide})
	a.awaitUnits("no library: an empty list", time.Now(), nil)
	if n := len(a.kubelet.Registrations()); n != 0 {
		t.Errorf("%d resources registered without a driver", n)
	}
	a.change(change{what: "the library is installed", do: a.Unhide})
	all := a.units()
	if err := a.TryUnload(); !errors.As(err, new(*simdriver.InUseError)) {
		t.Errorf("rmmod while the agents run: %v", err)
	}
	for range 2 {
		a.change(change{what: "the module is unloaded", do: a.Unload, unhealthy: all})
		a.eventually("the reason is that the module is not loaded", func() bool { // the first one is the call that failed
			return strings.Contains(a.nomad.last().device(t, all[0]).HealthDesc, "not loaded")
		})
		a.change(change{what: "and loaded", do: a.Load})
	}
	inits := a.calls("nvmlInit_v2")
	a.change(change{what: "unloaded and loaded at once", do: func() error {
		err := errors.Join(a.Unload(), a.Load())
		a.eventually("both have a session of the new driver", func() bool { return a.calls("nvmlInit_v2") >= inits+2 })
		a.eventually("work can start", func() bool { // the streams may not have shown that it could not
			_, nomadErr := a.nomad.reserve(all...)
			_, kubeletErr := a.kubelet.Allocate(t.Context(), gpuResource, all...)
			return nomadErr == nil && kubeletErr == nil
		})
		return err
	}})
	a.checkNotRestarted()
}

// openNodes are the device nodes of the machine that the agents have open.
func (a *agents) openNodes() (nodes []string) {
	a.t.Helper()
	for _, name := range bothAgents {
		pids := a.pids(name)
		open, err := a.HeldBy(pids[len(pids)-1])
		must(a.t, err)
		nodes = append(nodes, open...)
	}
	return nodes
}

// checkMaintenance checks that the agents have released the driver, and that both orchestrators get the reason why no work can
// start.
func (a *agents) checkMaintenance(what string, devices []string) {
	a.t.Helper()
	if nodes := a.openNodes(); len(nodes) > 0 {
		a.t.Errorf("%s: the agents have open: %v", what, nodes)
	}
	resource, _ := a.resources()
	for _, id := range devices {
		if d := a.nomad.last().device(a.t, id); !strings.Contains(d.HealthDesc, "maintenance") {
			a.t.Errorf("%s: %s: %q", what, id, d.HealthDesc)
		}
		if _, err := a.nomad.reserve(id); err == nil || !strings.Contains(err.Error(), "maintenance") {
			a.t.Errorf("%s: Reserve(%s): %v", what, id, err)
		}
		if _, err := a.kubelet.Allocate(a.t.Context(), resource[id], id); err == nil || !strings.Contains(err.Error(), "maintenance") {
			a.t.Errorf("%s: Allocate(%s): %v", what, id, err)
		}
	}
}

// quiesce runs the command of both agents and waits for its effect.
func (a *agents) quiesce(units []string) time.Duration {
	a.t.Helper()
	began := time.Now()
	a.commands("quiesce")
	if nodes := a.openNodes(); len(nodes) > 0 {
		a.t.Errorf("the command has ended, and the agents have open: %v", nodes)
	}
	return a.awaitUnits("quiesced", began, units, units...)
}

// resume runs the command of both agents and waits for its effect.
func (a *agents) resume(what string) {
	a.t.Helper()
	a.change(change{what: what, do: func() error { a.commands("resume"); return nil }})
}

// The agents release the driver on command, so that the module can be unloaded, and use it again. Their processes, streams
// and devices stay.
func TestQuiesceAndResume(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "h100x8"})
	all := a.units()
	a.awaitUnits("start", time.Now(), all)
	if len(a.openNodes()) == 0 {
		t.Error("no device node is open while the driver is in use")
	}
	must(t, a.Set(2, "recovery_action", "1"), a.XID(2, 95)) // recovery action: GPU reset
	a.awaitUnits("XID 95", time.Now(), all, all[2])

	checkTime(t, "quiesce", a.quiesce(all), 2*time.Second) // Nomad gets at most one fingerprint a second
	rest := without(all, all[2])
	a.checkMaintenance("quiesced", rest)
	a.commands("quiesce")
	a.checkMaintenance("quiesced twice", rest)
	must(t, a.TryUnload())
	a.checkMaintenance("the module is unloaded", rest)
	must(t, a.Reset(2), a.Load())
	a.checkMaintenance("a GPU was reset, and the module is loaded", rest)

	began := time.Now()
	a.commands("resume")
	healthy := a.await("resumed: the healthy ones", began, func(health map[string]bool) bool {
		for _, id := range rest {
			if !health[id] {
				return false
			}
		}
		return true
	})
	checkTime(t, "resume", healthy, 2*time.Second)
	a.awaitUnits("resumed: the one that was reset", began, all)
	a.checkAllocatable("resumed", all...)
	for _, name := range bothAgents {
		if out, err := a.command(name, "resume"); err == nil || !strings.Contains(err.Error(), "nothing to resume") {
			t.Errorf("%s resume again: %s, %v", name, out, err)
		}
	}
	a.checkNotRestarted()
}

// The same by signals. The layout changes meanwhile: removed instances stay listed until the driver is used again.
func TestQuiesceBySignal(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "a100-mig"})
	before := a.units()
	a.awaitUnits("start", time.Now(), before)
	a.change(change{what: "SIGUSR1", units: before, unhealthy: before, do: func() error {
		a.signal(syscall.SIGUSR1)
		a.eventually("no device node is open", func() bool { return len(a.openNodes()) == 0 })
		return nil
	}})
	a.checkMaintenance("SIGUSR1", before)
	must(t, a.SetMIG(sevenths, three("2g.20gb")...))
	a.checkMaintenance("another layout", before)
	a.change(change{what: "SIGUSR2", do: func() error { a.signal(syscall.SIGUSR2); return nil }})
	a.checkNotRestarted()
}

// An agent that is killed in maintenance does not use the driver when it is started again, and the driver can be replaced
// by another version. The GPUs and the names of their groups stay.
func TestMaintenanceOutlivesTheAgents(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "h100x8"})
	all := a.units()
	a.awaitUnits("start", time.Now(), all)
	names := a.nomad.last().names()
	before := a.processCounts()
	a.commands("quiesce")
	for _, name := range bothAgents {
		// On disk when the command has ended.
		if text, err := os.ReadFile(filepath.Join(a.stateDir, name+".json")); err != nil || !strings.Contains(string(text), `"Maintenance"`) {
			t.Errorf("%s: no maintenance on disk (%v)", name, err)
		}
	}
	a.signal(syscall.SIGKILL)
	a.awaitRestart(before)
	a.eventually("both orchestrators have the new processes", func() bool {
		_, connected := a.kubelet.Devices(gpuResource)
		return a.nomad.last().stream == 2 && connected && a.registrations()[gpuResource] == 2
	})
	a.awaitUnits("killed in maintenance, and started again", time.Now(), all, all...)
	a.checkMaintenance("started again", all)
	a.replaceDriver(all)
	a.resume("resumed with another driver")
	a.checkDriverVersion(names)
}

const laterVersion = "590.48.01"

// replaceDriver replaces the driver by another version during maintenance.
func (a *agents) replaceDriver(all []string) {
	a.t.Helper()
	must(a.t, a.TryUnload(), a.SetDriver(laterVersion), a.Load())
	a.checkMaintenance("another driver", all)
}

// checkDriverVersion checks that Nomad has the version of the other driver, and the same groups.
func (a *agents) checkDriverVersion(names map[string]string) {
	a.t.Helper()
	f := a.nomad.last()
	for id, name := range names {
		if got := f.names()[id]; got != name {
			a.t.Errorf("%s was in group %q and is in %q", id, name, got)
		}
		if got := f.group(a.t, id).Attributes["driver_version"].GoString(); got != laterVersion {
			a.t.Errorf("%s: driver_version %s, want %s", id, got, laterVersion)
		}
	}
}

// Agents that live while the driver is replaced have its old library: they end when they use the driver again, and are started
// again.
func TestDriverIsUpgradedInMaintenance(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "t4"})
	all := a.units()
	a.awaitUnits("start", time.Now(), all)
	names, before := a.nomad.last().names(), a.processCounts()
	a.quiesce(all)
	a.replaceDriver(all)
	a.change(change{what: "resumed with another driver", do: func() error { a.commands("resume"); a.awaitRestart(before); return nil }})
	a.checkDriverVersion(names)
}
