//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestNomadPluginEnds ends nomad-gpu 20 times at random moments under a running job. The node never shows that a GPU is missing.
func TestNomadPluginEnds(t *testing.T) {
	random := seeded(t)
	m := install(t, "h100x8")
	nomad := launchNomad(t, "nomad", onMachine(m, "nomad-history", ""))
	nomad.awaitReady(t)
	offered := nomad.awaitGPUs(t, 8, 8)
	work := hold(t, nomad)
	node, began := followNomad(t, nomad), time.Now()
	for i := range 20 {
		signal := syscall.SIGKILL
		if i%4 == 3 {
			signal = syscall.SIGTERM
		}
		// Nomad dismisses a plugin that ends before its stream is open ("fingerprinting failed").
		nomad.awaitDrivers(t, 1+i)
		pause(random, time.Second)
		nomad.endPlugin(t, signal)
		work.check(t)
	}
	ids, _ := nomad.runJob(t, "next", "complete")
	checkIDs(t, offered, ids, 2)
	if slices.Contains(ids, work.ids[0]) {
		t.Errorf("job holder has %q, job next got %q", work.ids, ids)
	}
	work.check(t)
	node.await(t, began, "^8 of 8$")
	if shown := node.since(began); len(shown) != 1 {
		t.Errorf("meanwhile the node showed %q", shown)
	}
	nomad.checkContent(t)
}

// TestNomadClientEnds ends a client under a running job, and starts it anew.
func TestNomadClientEnds(t *testing.T) {
	m := install(t, "h100x8")
	nomad := launchClient(t, "nomad", onMachine(m, "nomad-history", ""))
	nomad.awaitReady(t)
	offered := nomad.awaitGPUs(t, 8, 8)
	work := hold(t, nomad)
	for i, c := range []struct {
		what   string
		signal syscall.Signal
		linger bool // the next agent starts when the plugin is gone
	}{
		{"killed, and started at once", syscall.SIGKILL, false},
		{"stopped", syscall.SIGTERM, false},
		{"killed, and started later", syscall.SIGKILL, true},
	} {
		step(t, c.what, func(t *testing.T) {
			old, began := nomad.plugin(), time.Now()
			nomad.process.stop(t, c.signal)
			if c.linger {
				await(t, "the end of the plugin without an agent", 30*time.Second, func() error {
					return onlyPlugin(0)
				})
				t.Logf("the plugin ended %v after the agent", time.Since(began).Round(time.Millisecond))
			}
			nomad.start()
			await(t, "a plugin of the new agent, and no other", 30*time.Second, func() error {
				pid := nomad.plugin()
				if pid == 0 || pid == old {
					return fmt.Errorf("its process is %d, it was %d", pid, old)
				}
				return onlyPlugin(pid)
			})
			nomad.awaitDrivers(t, i+2)
			nomad.awaitReady(t)
			nomad.awaitGPUs(t, 8, 8)
			ids, _ := nomad.runJob(t, fmt.Sprintf("next-%d", i), "complete")
			checkIDs(t, offered, ids, 2)
			work.check(t)
		})
	}
	nomad.checkContent(t)
}

// onlyPlugin is nil when this process is the only nomad-gpu; 0 is none.
func onlyPlugin(pid int) error {
	all := running("nomad-gpu")
	delete(all, pid)
	if len(all) > 0 {
		return fmt.Errorf("there are %v (process: parent) beside %d", all, pid)
	}
	return nil
}

// holder is a running job with one GPU.
type holder struct {
	*agent
	identity string
	ids      []string
	pid      int // of its task
}

// hold starts the job.
func hold(t *testing.T, a *agent) *holder {
	t.Helper()
	ids, _ := a.runJob(t, "holder", "running", "count=1", "then=echo pid $$; exec sleep 1000000")
	alloc, err := a.allocation("holder")
	if err != nil {
		t.Fatal(err)
	}
	_, number, _ := strings.Cut(awaitOutput(t, alloc, "gpus", "pid "), "pid ")
	pid, err := strconv.Atoi(strings.TrimSpace(number))
	if err != nil {
		t.Fatal(err)
	}
	return &holder{agent: a, identity: alloc.identity(), ids: ids, pid: pid}
}

// check fails unless the job runs as it did, on the same GPU. An agent that has just started shows it after a while.
func (h *holder) check(t *testing.T) {
	t.Helper()
	await(t, "job holder to be as it was", 30*time.Second, func() error {
		alloc, err := h.allocation("holder")
		if err == nil && alloc.identity() != h.identity {
			err = fmt.Errorf("it was %s, it is %s", h.identity, alloc.identity())
		}
		return err
	})
	if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(h.pid))); err != nil {
		t.Errorf("the task of job holder is gone: %v", err)
	}
}

// awaitDrivers waits until so many plugins have found the driver; they do after Nomad has asked for their devices.
func (a *agent) awaitDrivers(t *testing.T, count int) (found int) {
	t.Helper()
	await(t, "the driver to be found", 30*time.Second, func() error {
		if found = strings.Count(readLog(t, a.name), "driver ready"); found < count {
			return fmt.Errorf("it was found %d times, want %d", found, count)
		}
		return a.process.alive()
	})
	return found
}

// dismissals are what Nomad logs when it starts a plugin no more, until it is restarted itself, or removes its devices
// (client/devicemanager/instance.go).
var dismissals = []string{
	"dispensing initial plugin failed", "dispensing plugin failed",
	"fingerprinting failed", "fingerprinting returned an error", "returned devices failed fingerprinting",
	"exiting since fingerprinting gracefully shutdown", "exiting since stats gracefully shutdown",
	"stats collection failed", "stats returned an error",
}

// checkContent fails if Nomad logged a dismissal of the plugin.
func (a *agent) checkContent(t *testing.T) {
	t.Helper()
	for line := range strings.Lines(readLog(t, a.name)) {
		for _, dismissal := range dismissals {
			if strings.Contains(line, "device_mgr") && strings.Contains(line, dismissal) {
				t.Error(line)
			}
		}
	}
}

// plugin returns the process id of the agent's running device plugin, or 0.
func (a *agent) plugin() int {
	for pid, parent := range running("nomad-gpu") {
		if parent == a.process.cmd.Process.Pid {
			return pid
		}
	}
	return 0
}

// killPlugin kills the plugin and waits until the agent has started another.
func (a *agent) killPlugin(t *testing.T) {
	t.Helper()
	a.endPlugin(t, syscall.SIGKILL)
}

// endPlugin ends the plugin by a signal and waits until the agent has started another.
func (a *agent) endPlugin(t *testing.T, signal syscall.Signal) {
	t.Helper()
	old := a.plugin()
	if old == 0 {
		t.Fatal("the agent runs no nomad-gpu")
	}
	if err := syscall.Kill(old, signal); err != nil {
		t.Fatal(err)
	}
	await(t, "another nomad-gpu", 30*time.Second, func() error {
		if pid := a.plugin(); pid == 0 || pid == old {
			return fmt.Errorf("its process is %d, it was %d", pid, old)
		}
		return a.process.alive()
	})
}
