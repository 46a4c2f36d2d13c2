package sandbox

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Plenty is for anything that is waited for.
const Plenty = 60 * time.Second

// Node is a simulated machine, with the test that has it. Its methods end the test on an error.
type Node struct {
	*testing.T
	Root string // of the machine
}

// NewNode installs a simulated machine in a folder; no agent runs.
func NewNode(t *testing.T, root, machine string) Node {
	t.Helper()
	n := Node{t, root}
	n.Sim("install", root, machine)
	return n
}

// Must ends the test if there is an error.
func (n Node) Must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// Sim runs simctl.
func (n Node) Sim(args ...string) string {
	n.Helper()
	cmd := exec.Command(Program("simctl"), args...)
	cmd.Env = append(os.Environ(), "SIMDRIVER_MACHINE="+n.Root)
	cmd.Dir = project // where go-nvml's nvml.h is found
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// UUIDs are those of the machine's GPUs, by slot.
func (n Node) UUIDs() (ids []string) {
	n.Helper()
	for line := range strings.Lines(n.Sim("show")) {
		if id, ok := strings.CutPrefix(strings.TrimSpace(line), "uuid = "); ok {
			ids = append(ids, strings.TrimSpace(id))
		}
	}
	return ids
}

// Read returns the content of a file.
func (n Node) Read(path string) string {
	n.Helper()
	text, err := os.ReadFile(path)
	n.Must(err)
	return string(text)
}

// Agent is a running k8s-gpu.
type Agent struct {
	Cmd    *exec.Cmd
	Exited chan struct{}
	Log    string // path
}

// Flags are those of an agent on the machine, with others, which replace those of the same name.
func (n Node) Flags(others ...string) []string {
	flags := []string{
		"--driver-root=" + n.Root, "--sysfs-root=" + n.Root + "/sys", "--procfs-root=" + n.Root + "/proc",
		"--http-address=", "--rescan=1s", "--kernel-log=off", "--log-format=text",
	}
	return Merge(flags, others)
}

// Merge returns flags, each of which is replaced by that of the same name in others.
func Merge(flags, others []string) []string {
	name := func(flag string) string { before, _, _ := strings.Cut(flag, "="); return before }
	kept := slices.DeleteFunc(slices.Clone(flags), func(f string) bool {
		return slices.ContainsFunc(others, func(o string) bool { return name(o) == name(f) })
	})
	return append(kept, others...)
}

// Start starts an agent. It is killed when the test ends.
func (n Node) Start(flags ...string) *Agent {
	n.Helper()
	log, err := os.CreateTemp(n.TempDir(), "log")
	n.Must(err)
	a := &Agent{Exited: make(chan struct{}), Log: log.Name()}
	a.Cmd = exec.Command(Program("k8s-gpu"), n.Flags(flags...)...)
	a.Cmd.Stderr, a.Cmd.Stdout = log, log
	n.Must(a.Cmd.Start())
	go func() {
		_ = a.Cmd.Wait()
		close(a.Exited)
	}()
	n.Cleanup(func() {
		_ = a.Cmd.Process.Kill()
		<-a.Exited
		_ = log.Close()
		if text := n.Read(a.Log); n.Failed() && text != "" {
			n.Log("agent:\n" + LastLines(text, 40))
		}
	})
	return a
}

// LastLines returns the end of a text.
func LastLines(text string, count int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-count):], "\n")
}

// End stops an agent with a signal and returns its exit code.
func (n Node) End(a *Agent, sig syscall.Signal) int {
	n.Helper()
	if err := a.Cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		n.Fatal(err)
	}
	select {
	case <-a.Exited:
	case <-time.After(Plenty):
		n.Fatalf("still running after %v", sig)
	}
	return a.Cmd.ProcessState.ExitCode()
}

// Await polls what has no notification.
func (n Node) Await(what string, ok func() bool) {
	n.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(Plenty); !ok(); {
		select {
		case <-tick.C:
		case <-late:
			n.Fatalf("%s: not in time", what)
		}
	}
}

// AwaitLog waits until an agent has logged a text.
func (n Node) AwaitLog(a *Agent, text string) {
	n.Helper()
	n.Await("log of the agent with "+text, func() bool { return strings.Contains(n.Read(a.Log), text) })
}
