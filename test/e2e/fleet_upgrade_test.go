//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	goruntime "runtime" // the package has a type runtime
	"strings"
	"syscall"
	"testing"
	"time"
)

// nextPlugin is nomad-gpu as a later version, which "make next-image" has left beside the image.
func nextPlugin(t *testing.T) string {
	t.Helper()
	archive, version := nextImage(t)
	path := filepath.Join(filepath.Dir(archive), "linux-"+goruntime.GOARCH, "nomad-gpu")
	if got := versionOf(path); got != version {
		t.Fatalf("%s is version %q, want %q", path, got, version)
	}
	return path
}

// heldJobs are jobs that run undisturbed.
type heldJobs struct {
	*fleet
	identities map[string]string // by allocation
	processes  map[string]int    // of their tasks, likewise
}

func (f *fleet) hold(t *testing.T) *heldJobs {
	t.Helper()
	identities, err := f.identities()
	if err != nil {
		t.Fatal(err)
	}
	h := &heldJobs{fleet: f, identities: identities, processes: tasksOf()}
	if len(h.identities) != 8 || len(h.processes) != 8 {
		t.Fatalf("jobs %v, processes %v, want eight", h.identities, h.processes)
	}
	return h
}

func (f *fleet) identities() (map[string]string, error) {
	all, err := f.running()
	identities := map[string]string{}
	for _, alloc := range all {
		identities[alloc.ID] = alloc.JobID + " " + alloc.identity()
	}
	return identities, err
}

// tasksOf are the processes of tasks by allocation.
func tasksOf() map[string]int {
	processes := map[string]int{}
	for _, w := range sleepers() {
		processes[w.env["NOMAD_ALLOC_ID"]] = w.pid
	}
	return processes
}

// check fails unless all jobs run as they did, in the same processes with the same devices.
func (h *heldJobs) check(t *testing.T) {
	t.Helper()
	await(t, "all jobs to be as they were", 30*time.Second, func() error {
		identities, err := h.fleet.identities()
		if err == nil && !maps.Equal(identities, h.identities) {
			err = fmt.Errorf("they were %q, they are %q", h.identities, identities)
		}
		return err
	})
	if processes := tasksOf(); !maps.Equal(processes, h.processes) {
		t.Errorf("the tasks were processes %v, they are %v", h.processes, processes)
	}
}

// pluginStep is one thing that happens to the plugin of a client.
type pluginStep struct {
	name string
	run  func(*testing.T)
}

// replaced are what operators do with the plugin of the client h100, which ends as it began. Each is watched for as long as the
// client takes at most to send a changed node.
func (f *fleet) replaced(next string) []pluginStep {
	a, old := f.h100, binary("nomad-gpu")
	oldVersion, newVersion := versionOf(old), versionOf(next)
	return []pluginStep{
		{"upgrade by install, client restarted", func(t *testing.T) {
			installPlugin(t, pluginOf(a.member), next)
			a.restart(t)
			a.awaitVersion(t, newVersion)
		}},
		{"rollback by rename, plugin killed", func(t *testing.T) {
			renamePlugin(t, pluginOf(a.member), old, 0o755)
			a.endPlugin(t, syscall.SIGKILL)
			a.awaitVersion(t, oldVersion)
		}},
		{"upgrade by rename, plugin stopped", func(t *testing.T) {
			renamePlugin(t, pluginOf(a.member), next, 0o755)
			a.endPlugin(t, syscall.SIGTERM)
			a.awaitVersion(t, newVersion)
		}},
		{"rollback by install, client restarted", func(t *testing.T) {
			installPlugin(t, pluginOf(a.member), old)
			a.restart(t)
			a.awaitVersion(t, oldVersion)
		}},
	}
}

// broken are mistakes of an operator.
func (f *fleet) broken() []pluginStep {
	return []pluginStep{
		{"broken: exits at once, client restarted", f.recovered(f.restartedBroken)},
		{"broken: not executable, client restarted", f.recovered(f.notExecutable)},
	}
}

// recovered has something happen to a broken plugin, then puts the former file back and starts the client with it.
func (f *fleet) recovered(happen func(*testing.T)) func(*testing.T) {
	a := f.h100
	return func(t *testing.T) {
		happen(t)
		f.checkTasks(t)
		renamePlugin(t, pluginOf(a.member), binary("nomad-gpu"), 0o755)
		if a.process.alive() == nil {
			a.process.stop(t, syscall.SIGINT)
		}
		began := time.Now()
		a.start()
		a.awaitVersion(t, versionOf(binary("nomad-gpu")))
		a.awaitGPUs(t, 8, 8)
		t.Logf("recovered %v after the client was started with the former file", time.Since(began).Round(10*time.Millisecond))
	}
}

// killedBroken kills the plugin when its file is one that exits at once. Nomad gives it up, and goes on to list its devices.
func (f *fleet) killedBroken(t *testing.T) {
	logged := len(readLog(t, f.h100.name))
	renamePlugin(t, pluginOf(f.h100.member), write(t, "broken", []byte("#!/bin/sh\nexit 1\n")), 0o755)
	if err := syscall.Kill(f.h100.plugin(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	f.awaitLogged(t, logged, "dispensing plugin failed")
	time.Sleep(2 * time.Second)
	f.h100.awaitGPUs(t, 8, 8)
}

// abandoned has a job arrive while Nomad has given the plugin up, then a fault happen when the former file is back.
func (f *fleet) abandoned(t *testing.T) {
	logged := len(readLog(t, f.h100.name))
	f.purge(t, "work-0")
	f.awaitLoad(t, map[string]int{"h100": 7})
	f.killedBroken(t)
	late := func(name string) { fleetJob{name: name, device: where("attr.memory", ">=", "60 GiB")}.submit(t) }
	late("too-early")
	f.h100.awaitRefused(t, "too-early", "failed to start plugin")
	f.purge(t, "too-early")
	renamePlugin(t, pluginOf(f.h100.member), binary("nomad-gpu"), 0o755)
	late("late")
	f.awaitOn(t, "late", map[string]int{"h100": 1})
	if err := f.machine.Lose(3); err != nil {
		t.Fatal(err)
	}
	time.Sleep(nodeUpdate)
	f.h100.awaitGPUs(t, 8, 8) // Nomad does not read what the plugin publishes
	f.awaitLogged(t, logged, "does not read the devices")
	f.h100.restart(t)
	checkReason(t, f.h100.awaitGPUs(t, 8, 7), f.machine.UUID(3), "lost")
	f.awaitOn(t, "late", map[string]int{"h100": 1})
}

// restartedBroken restarts the client when the plugin's file is one that exits at once: the client ends.
func (f *fleet) restartedBroken(t *testing.T) {
	logged := len(readLog(t, f.h100.name))
	renamePlugin(t, pluginOf(f.h100.member), write(t, "broken", []byte("#!/bin/sh\nexit 1\n")), 0o755)
	f.h100.restart(t)
	f.h100.process.awaitEnd(t)
	if state := f.h100.process.cmd.ProcessState; state.Success() {
		t.Errorf("the client ended with %v", state)
	}
	f.awaitLogged(t, logged, "failed to fingerprint plugin")
}

// notExecutable restarts the client when the plugin's file can't be executed: the client starts without it.
func (f *fleet) notExecutable(t *testing.T) {
	logged := len(readLog(t, f.h100.name))
	renamePlugin(t, pluginOf(f.h100.member), binary("nomad-gpu"), 0o644)
	f.h100.restart(t)
	f.awaitLogged(t, logged, "skipping un-executable file in plugin folder")
	f.h100.awaitGPUs(t, 0, 0)
}

// awaitLogged waits until the client has logged the text after what it had logged before.
func (f *fleet) awaitLogged(t *testing.T, before int, text string) {
	t.Helper()
	await(t, "the client to log "+text, 30*time.Second, func() error {
		line, found := lineWith(readLog(t, f.h100.name)[before:], text)
		if !found {
			return errors.New("it has not")
		}
		t.Log(line)
		return nil
	})
}

// renamePlugin puts a file in a plugin's place at once, as a package manager does.
func renamePlugin(t *testing.T, target, source string, mode os.FileMode) {
	t.Helper()
	must(t, "install", "-m", fmt.Sprintf("%o", mode), source, target+"-new")
	if err := os.Rename(target+"-new", target); err != nil {
		t.Fatal(err)
	}
}

// versionOf is what a plugin's file prints as its version.
func versionOf(file string) string {
	text, err := command(file, "version")
	if err != nil {
		return err.Error()
	}
	_, version, _ := strings.Cut(text, " ")
	return version
}

// awaitVersion waits until the agent's plugin is of the version, and has found the driver.
func (a *agent) awaitVersion(t *testing.T, version string) {
	t.Helper()
	began := time.Now()
	await(t, "a plugin of version "+version, 30*time.Second, func() error {
		pid := a.plugin()
		if pid == 0 {
			return errors.Join(errors.New("there is no plugin"), a.process.alive())
		}
		if got := versionOf(fmt.Sprintf("/proc/%d/exe", pid)); got != version {
			return fmt.Errorf("it is %q", got)
		}
		return a.process.alive()
	})
	t.Logf("version %s runs after %v", version, time.Since(began).Round(10*time.Millisecond))
}
