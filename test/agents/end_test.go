package agents

import (
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func (p *process) exited() bool {
	if p.client != nil {
		return p.client.Exited()
	}
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// awaitExit waits until the process has ended by itself.
func (a *agent) awaitExit() *os.ProcessState {
	a.Helper()
	a.await("the end of the process", a.exited)
	if a.client != nil {
		a.client.Kill() // waits for what remains
	}
	return a.cmd.ProcessState
}

func (a *agent) signal(signals ...syscall.Signal) {
	a.Helper()
	for _, s := range signals {
		a.must(a.cmd.Process.Signal(s))
	}
}

// ends are the ways in which an agent ends.
var ends = map[string]func(*agent){"stopped": (*agent).stop, "killed": (*agent).kill}

func (a *agent) kill() {
	a.Helper()
	a.signal(syscall.SIGKILL)
	a.awaitExit()
}

// stop stops the agent as its orchestrator does. Nomad kills what has not ended two seconds later.
func (a *agent) stop() {
	a.Helper()
	if a.program == nomadGPU {
		a.stopBy(a.client.Kill)
	} else {
		a.terminate(syscall.SIGTERM)
	}
}

// terminate stops the agent by a signal.
func (a *agent) terminate(s syscall.Signal) {
	a.Helper()
	a.stopBy(func() { a.signal(s) })
}

// stopBy checks that the agent ends in time and by itself, sends the kubelet no further list, and leaves only its files in the
// state directory.
func (a *agent) stopBy(stop func()) {
	a.Helper()
	began, lists := time.Now(), 0
	if a.kubelet != nil {
		lists = len(a.kubelet.Lists(resource))
	}
	stop()
	state := a.awaitExit()
	took := time.Since(began)
	a.Logf("the end took %v", took.Round(time.Millisecond))
	if !state.Success() || took > stopLimit || a.times("not everything stopped within") > 0 {
		a.Errorf("ended with %v after %v", state, took)
	}
	if a.kubelet != nil && len(a.kubelet.Lists(resource)) != lists {
		a.Errorf("%d lists at the end", len(a.kubelet.Lists(resource))-lists)
	}
	if left := append(a.kubeletSockets(), entries(a.T, a.tmp())...); len(left) > 0 {
		a.Errorf("left: %v", left)
	}
	own := []string{".json", ".lock", ".groups.json", ".policy.yaml", ".allocated.json", ".config.json", ".pause.json", ".hand-over.json"}
	claims := filepath.Join(a.state, "dra", "claims")
	_ = filepath.WalkDir(a.state, func(path string, d fs.DirEntry, err error) error {
		suffix, ok := strings.CutPrefix(filepath.Base(path), a.program)
		ok = ok && slices.Contains(own, suffix) || filepath.Base(path) == ownership.FileName ||
			filepath.Dir(path) == claims && filepath.Ext(path) == ".removed" // which tells another process that the claim was unprepared
		if err == nil && path != a.state && !d.IsDir() && !ok {
			a.Errorf("left: %s", path)
		}
		return nil
	})
}

// kubeletSockets are the agent's sockets in the kubelet's folder.
func (a *agent) kubeletSockets() []string {
	a.Helper()
	paths, err := filepath.Glob(filepath.Join(a.dir, "kubelet", "tandem-*"))
	a.must(err)
	return paths
}

func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	check.NoError(t, err)
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// states are what an agent can be doing when it is stopped. Each function starts it and brings it there.
var states = map[string]struct {
	only  string // the program; "" = both
	reach func(*agent)
}{
	"healthy":        {"", (*agent).startHealthy},
	"the disk hangs": {"", func(a *agent) { a.hangDisk(); a.start(); a.awaitSocket() }},
	"nvmlInit hangs": {"", func(a *agent) { a.startHanging("nvmlInit", "nvmlInit"); a.shows("/readyz", "nvmlInit") }},
	"one GPU hangs": {"", func(a *agent) {
		a.startHealthy()
		a.hang(simdriver.GPU(3), "*")
		a.healthy(8, 7)
		a.allocates(0)
		a.alive()
	}},
	"everything hangs":  {"", func(a *agent) { a.startHealthy(); a.hang(simdriver.All, "*"); a.healthy(8, 0) }},
	"a call just hangs": {"", func(a *agent) { a.startHealthy(); a.hang(simdriver.All, "*") }},
	"no driver": {"", func(a *agent) {
		a.must(a.driver.Hide())
		a.start()
		a.awaitSocket()
		a.ready(http.StatusOK, "no driver: libnvidia-ml.so.1 is not in")
	}},

	"not configured": {nomadGPU, (*agent).launch},
	"configured":     {nomadGPU, func(a *agent) { a.launch(); a.configure() }},
	"a reservation waits": {nomadGPU, func(a *agent) {
		a.startHanging("nvmlInit", "nvmlInit")
		go func() { _, _ = a.allocate(a.driver.UUID(0)) }() // returns at the end
	}},
	"the first reading hangs": {nomadGPU, func(a *agent) { a.startHanging("nvmlDeviceGetName", "nvmlDeviceGetName") }},
	"the event wait hangs":    {nomadGPU, func(a *agent) { a.startHanging("nvmlEventSetWait", "nvmlEventSetWait") }},
	"nvmlShutdown hangs":      {nomadGPU, func(a *agent) { a.startHanging("nvmlShutdown", "nvmlEventSetWait") }},
	"a statistics call hangs": {nomadGPU, func(a *agent) { a.startHealthy(); a.hang(simdriver.GPU(3), "nvmlDeviceGetUtilizationRates") }},

	"no kubelet": {k8sGPU, func(a *agent) {
		a.kubelet.Stop()
		a.start()
		a.logs("INFO", "waiting for the kubelet")
		a.ready(http.StatusServiceUnavailable, "waiting for the kubelet")
	}},
	"registering": {k8sGPU, func(a *agent) {
		a.kubelet.Behave(kubelettest.Behaviour{Delay: time.Minute})
		a.start()
		a.ready(http.StatusServiceUnavailable, "registering")
	}},
	"registered, without a stream": {k8sGPU, func(a *agent) {
		a.kubelet.Behave(kubelettest.Behaviour{NoStream: true})
		a.start()
		a.logs("INFO", "msg=registered")
	}},
}

// Whatever it is doing, an agent that is stopped ends soon, and leaves nothing but its history.
func TestEndsInEveryState(t *testing.T) {
	t.Parallel()
	ways := map[string]map[string]func(*agent){
		nomadGPU: {"by Nomad": (*agent).stop, "SIGTERM": by(syscall.SIGTERM)},
		k8sGPU:   {"SIGTERM": by(syscall.SIGTERM), "SIGINT": by(syscall.SIGINT), "SIGQUIT": by(syscall.SIGQUIT)},
	}
	turn := 0
	for name, s := range states {
		for _, program := range programs {
			for how, end := range ways[program] {
				if turn++; s.only != "" && s.only != program || program == k8sGPU && name != "healthy" && turn%3 != 0 {
					continue // k8s-gpu gets every signal in one state, and one of them in the others
				}
				t.Run(program+"/"+name+"/"+how, func(t *testing.T) {
					t.Parallel()
					a := newAgent(t, program, "h100x8", map[string]any{"health_period": "200ms", "call_deadline": "500ms"})
					s.reach(a)
					end(a)
					if program == k8sGPU && name != "the disk hangs" {
						a.awaitFile(a.history(), `"Version"`)
					}
				})
			}
		}
	}
}

func by(s syscall.Signal) func(*agent) { return func(a *agent) { a.terminate(s) } }

func (a *agent) startHealthy() {
	a.Helper()
	a.start()
	a.healthy(8, 8)
	a.awaitSocket()
}

// startHanging starts the agent on a driver where a call will hang, and waits until another has been made.
func (a *agent) startHanging(call, made string) {
	a.Helper()
	a.must(a.driver.Hang(simdriver.All, call))
	a.start()
	a.awaitSocket()
	a.await(made, func() bool { return a.calls(made) > 0 })
}

func (a *agent) awaitSocket() {
	a.Helper()
	a.await("the control socket", func() bool { _, err := os.Stat(a.socket()); return err == nil })
}

// hangDisk makes the history a FIFO: opening it for reading waits for a writer (fifo(7)).
func (a *agent) hangDisk() {
	a.Helper()
	a.must(os.MkdirAll(a.state, 0o700), syscall.Mkfifo(a.history(), 0o600))
}

// A second signal kills an agent that has not ended, because it waits for the disk or for a driver call.
func TestSecondSignalKills(t *testing.T) {
	t.Parallel()
	for _, second := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(second.String(), func(t *testing.T) {
			both(t, "h100x8", nil, func(a *agent) {
				states[map[string]string{nomadGPU: "the disk hangs", k8sGPU: "a call just hangs"}[a.program]].reach(a)
				a.signal(syscall.SIGTERM)
				a.await("the end", func() bool {
					_ = a.cmd.Process.Signal(second) // the first ones may count as one with that before; the process may have ended
					return a.exited()
				})
				state := a.awaitExit()
				if status, ok := state.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != second {
					a.Errorf("ended with %v, want killed by %v", state, second)
				}
			})
		})
	}
}

// Without the driver's own library on disk only a new process helps: the agent ends with a failure, in time, and logs why.
func TestReplacedDriverEndsTheProcess(t *testing.T) {
	both(t, "t4", map[string]any{"health_period": "1s"}, func(a *agent) {
		a.start()
		a.healthy(1, 1)
		const version = "590.44.01"
		a.must(a.driver.Unload(), a.driver.ReplaceLibrary(version), a.driver.SetModule(version), a.driver.Load())
		if state := a.awaitExit(); state.ExitCode() != command.ExitFailed {
			a.Errorf("ended with %v, want exit code %d", state, command.ExitFailed)
		}
		a.logs("", gpu.ErrDriverStale.Error(), "a new process is needed")
	})
}
