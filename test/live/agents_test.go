package live

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// shortSettings are short intervals, by their names in Nomad's block. Each agent offers what the other does, too, unless a test refuses that.
var shortSettings = map[string]string{
	"overlap": "warn", "health_period": "200ms", "health_settle": "200ms", "recovery_dwell": "200ms", "recovery_limit": "100",
}

// agents are the built agents, both on one machine. One that ends is started again, as Nomad and the DaemonSet do.
type agents struct {
	*scene
	options
	stateDir, log, policyFile string // of both

	ctx context.Context

	mu        sync.Mutex
	processes map[string][]int // so far, by agent
}

// options are those of both agents and of their machine.
type options struct {
	machine  string
	prepare  func(*simdriver.Machine) error // before the agents start; nil = nothing
	policy   string                         // content of the policy file; "" = none
	settings map[string]string              // beside shortSettings
}

const (
	nomadGPU = "nomad-gpu"
	k8sGPU   = "k8s-gpu"
)

var bothAgents = []string{nomadGPU, k8sGPU}

// startAgents starts both agents on a machine.
func startAgents(t *testing.T, o options) *agents {
	t.Helper()
	_ = binaries.Path(t, k8sGPU)         // builds both, which may take longer than the tests wait for the agents
	dir, err := os.MkdirTemp("", "live") // t.TempDir's names are too long for a socket
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	m, err := simdriver.Install(t.Context(), filepath.Join(dir, "m"), o.machine)
	must(t, err)
	if o.prepare != nil {
		must(t, o.prepare(m))
	}
	a := &agents{
		scene: &scene{Machine: m, t: t, nomad: newNomad()}, options: o,
		stateDir: filepath.Join(dir, "s"), log: filepath.Join(dir, "log"), processes: map[string][]int{},
	}
	if o.policy != "" {
		a.policyFile = filepath.Join(dir, "policy.yaml")
		must(t, os.WriteFile(a.policyFile, []byte(o.policy), 0o600))
	}
	a.startKubelet()
	var end context.CancelFunc
	a.ctx, end = context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		end()
		running.Wait()
		if log, err := os.ReadFile(a.log); t.Failed() && err == nil {
			t.Logf("log of the agents:\n%s", log)
		}
	})
	running.Go(func() { a.supervise(nomadGPU, a.runNomadGPU) })
	running.Go(func() { a.supervise(k8sGPU, a.runK8sGPU) })
	t.Cleanup(func() {
		a.checkNomadInvariants()
		violations, err := m.Violations()
		must(t, err)
		for _, v := range violations {
			t.Error("NVML was misused:", v)
		}
	})
	return a
}

// supervise runs one process after another, at most 20.
func (a *agents) supervise(name string, run func(log *os.File) error) {
	for n := 0; a.ctx.Err() == nil; n++ {
		if n == 20 {
			a.t.Errorf("%s has ended %d times", name, n)
			return
		}
		log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err == nil {
			err = run(log)
			fmt.Fprintf(log, "%s: a process of %s has ended: %v\n", time.Now().Format(time.StampMilli), name, err)
			_ = log.Close()
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-a.ctx.Done():
		}
	}
}

// more are the settings of both agents beside their paths.
func (o options) more() map[string]string {
	all := maps.Clone(shortSettings)
	maps.Copy(all, o.settings)
	return all
}

// runK8sGPU runs a process of k8s-gpu until it ends.
func (a *agents) runK8sGPU(log *os.File) error {
	args := []string{
		"--kubelet-socket", a.kubelet.Socket(), "--pod-resources-socket", a.pods, "--driver-root", a.Root, "--dev-root", a.Root,
		"--sysfs-root", a.Root + "/sys", "--procfs-root", a.Root + "/proc", "--mig-strategy", "mixed",
		"--pass-device-specs", "--http-address=", "--state-dir", a.stateDir, "--kernel-log=off",
	}
	if a.policyFile != "" {
		args = append(args, "--config-file", a.policyFile)
	}
	for key, value := range a.more() {
		args = append(args, "--"+strings.ReplaceAll(key, "_", "-")+"="+value)
	}
	cmd := exec.CommandContext(a.ctx, binaries.Path(a.t, k8sGPU), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	a.started(k8sGPU, cmd.Process.Pid)
	return cmd.Wait()
}

// runNomadGPU runs a process of nomad-gpu until it ends.
func (a *agents) runNomadGPU(log *os.File) error {
	cmd := exec.Command(binaries.Path(a.t, nomadGPU))
	client := nomadtest.NewClient(cmd, hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Info, Output: log}))
	defer client.Kill()
	p, err := nomadtest.Dispense(client)
	if err != nil {
		return err
	}
	block := map[string]any{
		"driver_root": a.Root, "dev_root": a.Root, "sysfs_root": a.Root + "/sys", "procfs_root": a.Root + "/proc",
		"state_dir": a.stateDir, "fingerprint_period": "1s", "kernel_log": "off", "policy_file": a.policyFile,
	}
	for key, value := range a.more() {
		block[key] = value
	}
	if err := nomadtest.SetConfig(p, block); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(a.ctx)
	defer cancel()
	if err := a.nomad.follow(ctx, p); err != nil {
		return err
	}
	a.started(nomadGPU, cmd.Process.Pid)
	for next := time.NewTicker(10 * interval); !client.Exited(); {
		select {
		case <-next.C:
		case <-a.ctx.Done():
			return nil
		}
	}
	return nil
}

func (a *agents) started(name string, pid int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.processes[name] = append(a.processes[name], pid)
}

// pids are the processes of an agent so far, the current one last.
func (a *agents) pids(name string) []int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.processes[name])
}

// signal sends a signal to both agents.
func (a *agents) signal(s syscall.Signal) {
	a.t.Helper()
	for _, name := range bothAgents {
		pids := a.pids(name)
		must(a.t, syscall.Kill(pids[len(pids)-1], s))
	}
}

// awaitRestart waits until each agent has another process than before.
func (a *agents) awaitRestart(before map[string]int) {
	a.t.Helper()
	a.eventually("both agents have another process", func() bool {
		now := a.processCounts()
		return now[nomadGPU] > before[nomadGPU] && now[k8sGPU] > before[k8sGPU]
	})
}

// processCounts are the numbers of processes so far, by agent.
func (a *agents) processCounts() map[string]int {
	return map[string]int{nomadGPU: len(a.pids(nomadGPU)), k8sGPU: len(a.pids(k8sGPU))}
}

// checkNotRestarted checks that both agents are in their first processes, with their first streams.
func (a *agents) checkNotRestarted() {
	a.t.Helper()
	if n := a.processCounts(); n[nomadGPU] != 1 || n[k8sGPU] != 1 {
		a.t.Errorf("processes: %v", n)
	}
	a.checkRegisteredOnce()
}

// command runs a command of an agent, as an operator does.
func (a *agents) command(name string, args ...string) (output string, err error) {
	args = append([]string{args[0], "--state-dir=" + a.stateDir}, args[1:]...)
	out, err := exec.CommandContext(a.t.Context(), binaries.Path(a.t, name), args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, args[0], err, out)
	}
	return string(out), err
}

// commands runs a command of both agents at once.
func (a *agents) commands(verb string) {
	a.t.Helper()
	var running sync.WaitGroup
	var errs [2]error
	began := time.Now()
	for i, name := range bothAgents {
		running.Go(func() { _, errs[i] = a.command(name, verb) })
	}
	running.Wait()
	must(a.t, errs[:]...)
	a.t.Logf("%-55s %5.3f s", "both commands "+verb, time.Since(began).Seconds())
}
