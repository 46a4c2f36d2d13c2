package dra

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const plenty = 60 * time.Second // for anything that is waited for

// node is a machine with an API server, kubelets, one after another, and agents.
type node struct {
	*testing.T
	root       string // of the simulated machine
	kubeletDir string // the kubelet's --root-dir
	cdiDir     string
	stateDir   string // the agent's
	logger     klog.Logger
	api        *apiServer
	kubelet    *kubelet // the last one

	mu   sync.Mutex
	pods []*v1.Pod
}

// newNode installs a simulated machine and starts an API server; neither kubelet nor agent runs.
func newNode(t *testing.T, machine string) *node {
	t.Helper()
	short, err := os.MkdirTemp("", "dra") // sockets have at most 107 bytes; t.TempDir is longer
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	n := &node{
		T: t, root: filepath.Join(short, "m"), kubeletDir: filepath.Join(short, "k"), cdiDir: filepath.Join(short, "cdi"),
		stateDir: filepath.Join(short, "s"), logger: klog.LoggerWithName(klog.NewKlogr(), "kubelet"), api: newAPIServer(t),
	}
	n.must(os.MkdirAll(n.kubeletDir, 0o750))
	n.sim("install", n.root, machine)
	n.recordAPI(inventory.DRA)
	return n
}

// recordAPI makes the node one whose GPUs an API has had before. On a new one, GPUs come to DRA only when the kubelet's record of the
// device plugin shows no holder for a while.
func (n *node) recordAPI(api inventory.API) {
	n.Helper()
	had := map[gpu.DeviceID]inventory.API{}
	for _, id := range n.uuids() {
		had[gpu.DeviceID(id)] = api
	}
	n.must(os.MkdirAll(n.stateDir, 0o755))
	n.must(assignment.Write(n.stateDir, assignment.File{Inner: map[string]map[gpu.DeviceID]inventory.API{"k8s-gpu": had}}))
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// sim runs simctl.
func (n *node) sim(args ...string) string {
	n.Helper()
	cmd := exec.Command(program("simctl"), args...)
	cmd.Env = append(os.Environ(), "SIMDRIVER_MACHINE="+n.root)
	cmd.Dir = project // where go-nvml's nvml.h is found
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// uuids are those of the simulated machine, by slot.
func (n *node) uuids() (ids []string) {
	for line := range strings.Lines(n.sim("show")) {
		if id, ok := strings.CutPrefix(strings.TrimSpace(line), "uuid = "); ok {
			ids = append(ids, strings.TrimSpace(id))
		}
	}
	return ids
}

func (n *node) activePods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

func (n *node) addPod(p *v1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, p)
}

func (n *node) removePod(p *v1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = slices.DeleteFunc(n.pods, func(o *v1.Pod) bool { return o.UID == p.UID })
}

// agent is a running k8s-gpu.
type agent struct {
	cmd    *exec.Cmd
	exited chan struct{}
	log    string // path
}

// flags are the agent's on this node.
func (n *node) flags() []string {
	return []string{
		"--api=dra", "--node-name=" + nodeName, "--kube-api=" + n.api.url(), "--kube-token-file=" + n.api.file("token"),
		"--kube-ca-file=" + n.api.file("ca.crt"), "--kubelet-dir=" + n.kubeletDir,
		"--kubelet-socket=" + filepath.Join(n.kubeletDir, "device-plugins", "kubelet.sock"), "--pod-resources-socket=",
		"--cdi-dir=" + n.cdiDir, "--cri-socket=", "--state-dir=" + n.stateDir,
		"--driver-root=" + n.root, "--sysfs-root=" + n.root + "/sys", "--procfs-root=" + n.root + "/proc",
		"--http-address=", "--rescan=1s", "--kernel-log=off", "--log-format=text",
	}
}

// startAgent starts the agent; of a flag that is given twice the last counts.
func (n *node) startAgent(args ...string) *agent {
	n.Helper()
	log, err := os.CreateTemp(n.TempDir(), "log")
	n.must(err)
	a := &agent{exited: make(chan struct{}), log: log.Name()}
	a.cmd = exec.Command(program("k8s-gpu"), merged(n.flags(), args)...)
	a.cmd.Stderr, a.cmd.Stdout = log, log
	n.must(a.cmd.Start())
	go func() {
		_ = a.cmd.Wait()
		close(a.exited)
	}()
	n.Cleanup(func() {
		_ = a.cmd.Process.Kill()
		<-a.exited
		_ = log.Close()
		if text := n.read(a.log); n.Failed() && text != "" {
			n.Log("agent:\n" + lastLines(text, 40))
		}
	})
	return a
}

// merged are flags, each of which is replaced by that of the same name in others.
func merged(flags, others []string) []string {
	name := func(flag string) string { before, _, _ := strings.Cut(flag, "="); return before }
	flags = slices.DeleteFunc(flags, func(f string) bool {
		return slices.ContainsFunc(others, func(o string) bool { return name(o) == name(f) })
	})
	return append(flags, others...)
}

func lastLines(text string, count int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-count):], "\n")
}

func (n *node) read(path string) string {
	n.Helper()
	text, err := os.ReadFile(path)
	n.must(err)
	return string(text)
}

// end stops an agent with a signal and returns its exit code.
func (n *node) end(a *agent, sig syscall.Signal) int {
	n.Helper()
	if err := a.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		n.Fatal(err)
	}
	select {
	case <-a.exited:
	case <-time.After(plenty):
		n.Fatalf("still running after %v", sig)
	}
	return a.cmd.ProcessState.ExitCode()
}

// await polls what has no notification.
func (n *node) await(what string, ok func() bool) {
	n.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(plenty); !ok(); {
		select {
		case <-tick.C:
		case <-late:
			n.Fatalf("%s: not in time", what)
		}
	}
}

func (n *node) awaitLog(a *agent, text string) {
	n.Helper()
	n.await("log of the agent with "+text, func() bool { return strings.Contains(n.read(a.log), text) })
}

// awaitDevices waits until so many devices are published.
func (n *node) awaitDevices(count int) {
	n.Helper()
	n.api.await("devices", func(all []*resourceapi.ResourceSlice) bool { return len(devicesOf(n.T, all)) == count })
}

// newReady returns a node with a kubelet in which an agent has registered, and which has published its devices.
func newReady(t *testing.T, machine string, devices int, args ...string) (*node, *agent) {
	t.Helper()
	n := newNode(t, machine)
	k := n.startKubelet()
	a := n.startAgent(args...)
	k.awaitRegistered(t)
	n.awaitDevices(devices)
	return n, a
}

// inspect is what the running agent prints about itself.
func (n *node) inspect() string {
	n.Helper()
	out, err := exec.Command(program("k8s-gpu"), append(n.flags(), "inspect")...).CombinedOutput()
	if err != nil {
		n.Fatalf("inspect: %v\n%s", err, out)
	}
	return string(out)
}
