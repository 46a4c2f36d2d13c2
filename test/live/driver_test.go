package live

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The driver comes late, is taken away and brought back while both agents run, and nobody restarts anything:
// the processes stay, and so do Nomad's stream and the kubelet's.
func TestDriverComesAndGoes(t *testing.T) {
	t.Parallel()
	a := launch(t, "h100x8", (*simdriver.Machine).Hide)
	began := time.Now()
	a.settles("no library: an empty list", began, nil)
	if n := len(a.kubelet.Registrations()); n != 0 {
		t.Errorf("%d resources registered without a driver", n)
	}

	began = time.Now()
	must(t, a.Unhide())
	all := a.units()
	a.settles("the library is installed", began, all)
	a.granted("installed", all...)
	processes := a.processes()

	if err := a.TryUnload(); !errors.As(err, new(*simdriver.InUseError)) {
		t.Errorf("rmmod under the agents: %v", err)
	}
	for _, how := range []string{"unloaded", "unloaded again"} {
		began = time.Now()
		must(t, a.Unload())
		a.settles("the module is "+how, began, all, all...)
		if why := a.nomad.last().device(t, all[0]).HealthDesc; !strings.Contains(why, "not loaded") {
			t.Errorf("%s: %q", how, why)
		}
		began = time.Now()
		must(t, a.Load())
		a.settles("and loaded", began, all)
		a.granted("loaded", all...)
	}
	inits := a.calls("nvmlInit_v2")
	began = time.Now()
	must(t, a.Unload(), a.Load())
	a.until("both have a session of the new driver", func() bool { return a.calls("nvmlInit_v2") >= inits+2 })
	a.until("work can start", func() bool { // the streams may not have said that it could not
		_, nomad := a.nomad.reserve(all...)
		_, kubelet := a.kubelet.Allocate(t.Context(), gpuResource, all...)
		return nomad == nil && kubelet == nil
	})
	a.settles("reloaded at once", began, all)

	a.sameProcesses("life of the driver", processes)
	for resource, n := range a.registered() {
		if n != 1 {
			t.Errorf("%s was registered %d times", resource, n)
		}
	}
	if n := a.nomad.last().stream; n != 1 {
		t.Errorf("Nomad's stream is number %d", n)
	}
}

// calls counts how often both agents have made a driver call.
func (a *agents) calls(name string) uint64 {
	a.t.Helper()
	calls, err := a.Calls()
	must(a.t, err)
	return calls[name]
}

// The whole driver is replaced by another version. A process can't have two libraries, so both agents end and
// are started again, as Nomad and the DaemonSet do. What follows from the version follows; who the GPUs are
// and what their groups are called does not.
func TestDriverIsUpgraded(t *testing.T) {
	t.Parallel()
	a := launch(t, "h100x8")
	all := a.units()
	a.settles("start", time.Now(), all)
	names := a.nomad.last().names()
	const version = "590.48.01"
	began := time.Now()
	must(t, a.SetDriver(version))
	a.await("upgraded: nothing is given away", began, func(health map[string]bool) bool {
		for _, healthy := range health {
			if healthy {
				return false
			}
		}
		return true
	})
	a.until("each is another process", func() bool { return len(a.pids(nomadGPU)) == 2 && len(a.pids(k8sGPU)) >= 2 })
	a.settles("upgraded", began, all)
	a.granted("upgraded", all...)
	a.isVersion(version, names)
}

// A package upgrade replaces the library under a driver that works: running agents don't mind.
func TestLibraryIsReplacedUnderTheAgents(t *testing.T) {
	t.Parallel()
	a := launch(t, "t4")
	all := a.units()
	a.settles("start", time.Now(), all)
	processes, since := a.processes(), a.mark()
	must(t, a.ReplaceLibrary("590.48.01"))
	const look = "nvmlDeviceGetUUID"
	enough := a.calls(look) + 20
	a.until("twenty more looks", func() bool { return a.calls(look) >= enough })
	a.undisturbed("another library on disk", since, all)
	a.granted("another library on disk", all...)
	a.sameProcesses("another library on disk", processes)
}
