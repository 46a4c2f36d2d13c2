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
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// shortWaits are the settings that make an agent decide in moments, by their names in Nomad's block.
var shortWaits = map[string]string{
	"health_period": "200ms", "health_settle": "200ms", "recovery_dwell": "200ms", "recovery_limit": "100",
}

// agents are the built agents of a scene, beside each other on one machine. One that ends is started again, as
// Nomad and the DaemonSet do.
type agents struct {
	*scene
	state  string // folder of both
	log    string // file of both
	policy string // file of both; "" = none

	settings map[string]string // of both, by their names in Nomad's block

	ctx context.Context
	end context.CancelFunc

	mu    sync.Mutex
	lives map[string][]int // the processes so far, by agent
}

const (
	nomadGPU = "nomad-gpu"
	k8sGPU   = "k8s-gpu"
)

// launch lays out a machine, scripted by prepare, and starts both agents.
func launch(t *testing.T, machine string, prepare ...func(*simdriver.Machine) error) *agents {
	t.Helper()
	return launchUnder(t, "", machine, prepare...)
}

// launchUnder starts them with a policy; "" is none, and no file for one.
func launchUnder(t *testing.T, policy, machine string, prepare ...func(*simdriver.Machine) error) *agents {
	t.Helper()
	return launchWith(t, nil, policy, machine, prepare...)
}

// launchWith starts them with settings beside shortWaits.
func launchWith(t *testing.T, settings map[string]string, policy, machine string, prepare ...func(*simdriver.Machine) error) *agents {
	t.Helper()
	_, err := binaries.Dir()
	must(t, err)
	dir, err := os.MkdirTemp("", "live") // t.TempDir's names are too long for a socket
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	m, err := simdriver.Install(t.Context(), filepath.Join(dir, "m"), machine)
	must(t, err)
	for _, script := range prepare {
		must(t, script(m))
	}
	a := &agents{
		scene: &scene{Machine: m, t: t, nomad: newNomad()},
		state: filepath.Join(dir, "s"), log: filepath.Join(dir, "log"), lives: map[string][]int{}, settings: maps.Clone(shortWaits),
	}
	maps.Copy(a.settings, settings)
	if policy != "" {
		a.policy = filepath.Join(dir, "policy.yaml")
		must(t, os.WriteFile(a.policy, []byte(policy), 0o600))
	}
	a.startKubelet()
	a.ctx, a.end = context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		a.end()
		running.Wait()
		if log, err := os.ReadFile(a.log); t.Failed() && err == nil {
			t.Logf("log of the agents:\n%s", log)
		}
	})
	running.Go(func() { a.supervise(nomadGPU, a.liveNomad) })
	running.Go(func() { a.supervise(k8sGPU, a.liveKubelet) })
	t.Cleanup(func() {
		a.nomadKeepsItsWord()
		violations, err := m.Violations()
		must(t, err)
		for _, v := range violations {
			t.Error("NVML misused:", v)
		}
	})
	return a
}

// supervise runs one life after another, up to a number that says that something is wrong.
func (a *agents) supervise(name string, live func(log *os.File) error) {
	for lives := 0; a.ctx.Err() == nil; lives++ {
		if lives == 20 {
			a.t.Errorf("%s has ended %d times", name, lives)
			return
		}
		log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err == nil {
			err = live(log)
			fmt.Fprintf(log, "%s: a life of %s ends: %v\n", time.Now().Format(time.StampMilli), name, err)
			_ = log.Close()
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-a.ctx.Done():
		}
	}
}

// liveKubelet is a life of k8s-gpu, from its start to its end.
func (a *agents) liveKubelet(log *os.File) error {
	args := []string{
		"--kubelet-socket", a.kubelet.Socket(), "--pod-resources-socket", a.pods, "--driver-root", a.Root, "--dev-root", a.Root,
		"--sysfs-root", a.Root + "/sys", "--procfs-root", a.Root + "/proc", "--mig-strategy", "mixed",
		"--pass-device-specs", "--http-address=", "--state-dir", a.state, "--kernel-log=off",
	}
	if a.policy != "" {
		args = append(args, "--config-file", a.policy)
	}
	for _, key := range slices.Sorted(maps.Keys(a.settings)) {
		args = append(args, "--"+strings.ReplaceAll(key, "_", "-")+"="+a.settings[key])
	}
	cmd := exec.CommandContext(a.ctx, a.binary(k8sGPU), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	a.born(k8sGPU, cmd.Process.Pid)
	return cmd.Wait()
}

// liveNomad is a life of nomad-gpu, from its launch until its process is gone.
func (a *agents) liveNomad(log *os.File) error {
	cmd := exec.Command(a.binary(nomadGPU))
	client := nomadtest.NewClient(cmd, hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Info, Output: log}))
	defer client.Kill()
	p, err := nomadtest.Dispense(client)
	if err != nil {
		return err
	}
	block := map[string]any{
		"driver_root": a.Root, "dev_root": a.Root, "sysfs_root": a.Root + "/sys", "procfs_root": a.Root + "/proc",
		"state_dir": a.state, "fingerprint_period": "1s", "kernel_log": "off", "policy_file": a.policy,
	}
	for key, value := range a.settings {
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
	a.born(nomadGPU, cmd.Process.Pid)
	for next := time.NewTicker(10 * tick); !client.Exited(); {
		select {
		case <-next.C:
		case <-a.ctx.Done():
			return nil
		}
	}
	return nil
}

func (a *agents) binary(name string) string {
	dir, _ := binaries.Dir()
	return filepath.Join(dir, name)
}

func (a *agents) born(name string, pid int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lives[name] = append(a.lives[name], pid)
}

// pids are the processes of an agent so far, the one that lives last.
func (a *agents) pids(name string) []int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.lives[name])
}

// sameProcesses checks that no agent was started again since.
func (a *agents) sameProcesses(what string, since map[string][]int) {
	a.t.Helper()
	for _, name := range []string{nomadGPU, k8sGPU} {
		if now := a.pids(name); !slices.Equal(now, since[name]) {
			a.t.Errorf("%s: the processes of %s were %v and are %v", what, name, since[name], now)
		}
	}
}

func (a *agents) processes() map[string][]int {
	return map[string][]int{nomadGPU: a.pids(nomadGPU), k8sGPU: a.pids(k8sGPU)}
}
