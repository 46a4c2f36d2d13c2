package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// size is what of a process grows if it leaks.
func size(t *testing.T, pid int, list string) int {
	t.Helper()
	return len(entries(t, fmt.Sprintf("/proc/%d/%s", pid, list)))
}

// Nomad may set a configuration as often as it likes, the same or another. The streams stay, what is offered
// follows, and nothing of the former configurations stays.
func TestManyConfigurations(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), nil)
	a.healthy(8, 8)
	other := keys(m, a.dir)
	other["ignored_gpu_ids"] = []string{m.UUID(3)}
	pid := a.cmd.Process.Pid
	swap := func() {
		configure(t, a, other)
		configure(t, a, other) // the same again is nothing
		a.healthy(7, 7)
		configure(t, a, keys(m, a.dir))
		a.healthy(8, 8)
	}
	swap()
	threads, fds := size(t, pid, "task"), size(t, pid, "fd")
	for range 4 {
		swap()
	}
	const slack = 4 // threads are the runtime's to make; a descriptor may be a history that is just written
	await(t, "the size of before", patience, func() bool {
		return size(t, pid, "fd") <= fds+slack && size(t, pid, "task") <= threads+slack
	})
	a.client.Kill()
	if !a.cmd.ProcessState.Success() {
		t.Errorf("ended with %s", a.cmd.ProcessState)
	}
}

// A disk that hangs keeps the history and so the devices, and nobody else: the agent starts, and when the
// disk is back so are the devices.
func TestDiskHangs(t *testing.T) {
	t.Parallel()
	m, dir := simdriver.StartParallel(t, "h100x8"), shortDir(t)
	history := filepath.Join(dir, "nomad-gpu.json")
	if err := syscall.Mkfifo(history, 0o600); err != nil { // who opens a pipe waits for who writes to it
		t.Fatal(err)
	}
	begin := time.Now()
	a := run(t, m, dir, nil)
	await(t, "the first list", patience, func() bool { return a.devices() != nil })
	t.Logf("the first list came after %s", time.Since(begin))
	a.healthy(0, 0)
	if _, err := a.Reserve([]string{m.UUID(0)}); err == nil || !strings.Contains(err.Error(), "does the disk hang?") {
		t.Errorf("Reserve: %v, want a word about the disk", err)
	}
	w, err := os.OpenFile(history, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	a.healthy(8, 8)
}

// A new process is what helps when the library on disk is not the one that this process has: it ends in time
// for the next, with a word about it, and one that is young waits a moment.
func TestStaleDriverEndsTheProcess(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), nil)
	a.healthy(8, 8)
	began := time.Now()
	if err := m.Unload(); err != nil {
		t.Fatal(err)
	}
	if err := m.ReplaceLibrary("590.44.01"); err != nil {
		t.Fatal(err)
	}
	if err := m.SetModule("590.44.01"); err != nil {
		t.Fatal(err)
	}
	if err := m.Load(); err != nil {
		t.Fatal(err)
	}
	await(t, "the end", patience, a.client.Exited)
	t.Logf("ended after %s", time.Since(began))
	a.said("[ERROR]", "a new process is needed", gpu.ErrDriverStale.Error())
	a.client.Kill() // waits for the process
	if code := a.cmd.ProcessState.ExitCode(); code != cli.ExitFailed {
		t.Errorf("ended with %s, want %d", a.cmd.ProcessState, cli.ExitFailed)
	}
}

// None of our code that is linked starts a process: a child would inherit what Nomad sees a death by.
func TestStartsNoProcess(t *testing.T) {
	const ours = "github.com/tandem-gpu/tandem/"
	list := exec.Command("go", "list", "-deps", "-f", `{{.ImportPath}}:{{range .Imports}} {{.}} {{end}}`, ".")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, ours) {
			continue
		}
		n++
		if name, imports, _ := strings.Cut(line, ":"); strings.Contains(imports, " os/exec ") {
			t.Errorf("%s imports os/exec", name)
		}
	}
	if n < 10 {
		t.Errorf("only %d packages are ours", n)
	}
}
