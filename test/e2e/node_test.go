//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// firstAddress is that of the sandbox, which is the machine of the first node and of the control plane.
const firstAddress = "10.99.0.1"

// kubeNode is one machine of a cluster, with containerd and kubelet. The first one is the sandbox; others have mounts and a network
// of their own. On each of them stateDir() is its own folder.
type kubeNode struct {
	owner   *testing.T // the test that the programs live as long as; its steps are shorter
	name    string
	address string
	pods    string   // the addresses of its pods
	dir     string   // its state folder, as the test sees it
	root    string   // its root folder, as the test sees it; "" = the test's own
	enter   []string // starts a program there
	runtime runtime

	containerd *process
	kubelet    *process
}

// addNode gives the cluster another node, on a machine with these GPUs. Its pods have no control groups of their own: each kubelet would
// remove those of the other one.
func (c *cluster) addNode(t *testing.T, r runtime, machine string) (*kubeNode, *simdriver.Machine) {
	t.Helper()
	number := len(c.nodes) + 1
	n := &kubeNode{
		owner: c.owner, name: fmt.Sprintf("node%d", number), address: fmt.Sprintf("10.99.0.%d", number),
		pods: fmt.Sprintf("10.%d.0.0/16", 87+number), runtime: r,
	}
	n.dir = filepath.Join(stateDir(), n.name)
	m := installIn(t, n.dir, machine)
	n.startMachine(t)
	c.join(t, n)
	return n, m
}

// startMachine makes the mounts and the network of the node, and connects it with the first one.
func (n *kubeNode) startMachine(t *testing.T) {
	t.Helper()
	script, err := filepath.Abs("node")
	if err != nil {
		t.Fatal(err)
	}
	machine := start(n.owner, n.name, []string{"E2E_NODE=" + n.dir}, "unshare", "--mount", "--net", "--", script, n.address, "sleep", "infinity")
	pid := strconv.Itoa(machine.cmd.Process.Pid)
	await(t, "the machine of "+n.name, 60*time.Second, func() error {
		program, err := os.ReadFile("/proc/" + pid + "/comm")
		if err == nil && string(program) != "sleep\n" {
			err = fmt.Errorf("process %s is %s", pid, program)
		}
		return errors.Join(err, machine.alive())
	})
	n.root = "/proc/" + pid + "/root"
	n.enter = []string{"nsenter", "--target=" + pid, "--mount", "--net", "--wd"}
	inside := func(argv ...string) { must(t, slices.Concat(n.enter, argv)...) }
	must(t, "ip", "link", "add", n.name, "type", "veth", "peer", "name", "uplink", "netns", pid)
	must(t, "ip", "link", "set", n.name, "up")
	inside("ip", "link", "set", "uplink", "up")
	inside("ip", "route", "add", firstAddress, "dev", "uplink", "src", n.address)
	inside("ip", "route", "add", "default", "via", firstAddress, "src", n.address)
	must(t, "ip", "route", "add", n.address, "dev", n.name, "src", firstAddress)
	must(t, "ip", "route", "add", n.pods, "via", n.address, "src", firstAddress)
}

// path is that of a file of the node, as the test sees it.
func (n *kubeNode) path(name string) string { return n.root + name }

// configure writes the configuration of the node's programs. Each kubelet has a folder of its own for the logs of pods: once a minute it
// removes those of pods that it does not know.
func (n *kubeNode) configure(t *testing.T) {
	t.Helper()
	values := map[string]string{
		"STATE": stateDir(), "PODLOGS": filepath.Join(logDir(), n.log("pods")), "PODGROUPS": strconv.FormatBool(n.runtime.podGroups), "PODS": n.pods, "MORE": "",
	}
	if n.runtime.aligned {
		n.simulateNUMA(t)
		values["MORE"] = alignment
	}
	if n.runtime.eager {
		values["MORE"] = "crashLoopBackOff: {maxContainerRestartPeriod: 1s}"
	}
	if n.runtime.podRoot != "" {
		values["MORE"] = "cgroupRoot: " + n.runtime.podRoot
	}
	for _, name := range []string{"cni/10-e2e.conflist", "kubelet.yaml", "kubeconfig.yaml", n.runtime.config} {
		renderIn(t, n.dir, name, values)
	}
}

func (n *kubeNode) startContainerd(t *testing.T) {
	t.Helper()
	path := "PATH=" + n.runtime.folder + ":" + os.Getenv("PATH") // where it finds its shim
	n.containerd = n.start("containerd", []string{path}, n.runtime.folder+"containerd", "-c", n.runtime.config)
	await(t, "containerd", 60*time.Second, func() error {
		_, err := n.ctr("version")
		return err
	})
}

// restartContainerd ends containerd by the signal and starts it anew; containers go on meanwhile.
func (n *kubeNode) restartContainerd(t *testing.T, signal syscall.Signal) {
	t.Helper()
	n.containerd.stop(t, signal)
	n.startContainerd(t)
}

func (n *kubeNode) startKubelet() {
	n.kubelet = n.start("kubelet", nil, "kubelet", "--config=kubelet.yaml", "--kubeconfig=kubeconfig.yaml", "--feature-gates="+os.Getenv(featureGates),
		"--hostname-override="+n.name, "--node-ip="+n.address, "--v=2")
}

// start starts a program on the node. Its log has the name of the program, and on other nodes than the first one the node's before.
func (n *kubeNode) start(name string, env []string, argv ...string) *process {
	return start(n.owner, n.log(name), env, slices.Concat(n.enter, argv)...)
}

// log is the name of a program's log.
func (n *kubeNode) log(program string) string {
	if n.root == "" {
		return program
	}
	return n.name + "-" + program
}

// awaitReady waits until the node is ready for pods.
func (n *kubeNode) awaitReady(t *testing.T) {
	t.Helper()
	await(t, n.name+" to be ready", 60*time.Second, func() error {
		ready, err := command("kubectl", "get", "node", n.name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")]}`)
		if err == nil && !strings.Contains(ready, `"status":"True"`) {
			err = errors.New(ready)
		}
		return errors.Join(err, n.kubelet.alive())
	})
}

// offer returns how many GPUs the node has and how many of them are allocatable; "" is a resource that it does not
// know.
func (n *kubeNode) offer() (capacity, allocatable string, err error) {
	var node struct {
		Status struct{ Capacity, Allocatable map[string]string }
	}
	err = fetchJSON(kubeAPI+"/api/v1/nodes/"+n.name, &node)
	return node.Status.Capacity[gpuResource], node.Status.Allocatable[gpuResource], err
}

// awaitGPUs waits until the node shows this capacity and this many allocatable GPUs.
func (n *kubeNode) awaitGPUs(t *testing.T, capacity, allocatable int) {
	t.Helper()
	want := fmt.Sprintf("%d %d", capacity, allocatable)
	await(t, "capacity and allocatable "+want, 60*time.Second, func() error {
		all, free, err := n.offer()
		if got := all + " " + free; err == nil && got != want {
			err = fmt.Errorf("the node shows %q", got)
		}
		return err
	})
	t.Logf("node %s: capacity %d, allocatable %d", n.name, capacity, allocatable)
}

// plugin returns the node's pod of the DaemonSet; one that is being deleted does not count.
func (n *kubeNode) plugin(t *testing.T) pod {
	t.Helper()
	p, err := n.findPlugin()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// findPlugin is plugin for what looks while the API server may end.
func (n *kubeNode) findPlugin() (pod, error) {
	var list struct{ Items []pod }
	err := fetchJSON(kubeAPI+"/api/v1/namespaces/kube-system/pods?fieldSelector=spec.nodeName="+n.name, &list)
	pods := slices.DeleteFunc(list.Items, func(p pod) bool {
		return p.Metadata.DeletionTimestamp != "" || strings.Contains(p.Metadata.Name, "-mps-daemon-")
	})
	if err != nil {
		return pod{}, err
	}
	if len(pods) != 1 {
		return pod{}, fmt.Errorf("pods of kube-system on %s: %+v; want one", n.name, pods)
	}
	return pods[0], nil
}

// ctr runs containerd's client on kubelet's containers and images.
func (n *kubeNode) ctr(argv ...string) (string, error) {
	return command(slices.Concat([]string{n.runtime.folder + "ctr", "--address", n.dir + "/containerd.sock", "--namespace", "k8s.io"}, argv)...)
}

// tasks returns the process id and the state of every container that containerd runs, by the container's id.
func (n *kubeNode) tasks() (map[string]string, error) {
	text, err := n.ctr("tasks", "list")
	tasks := map[string]string{}
	for line := range strings.Lines(text) {
		if id, state, found := strings.Cut(strings.Join(strings.Fields(line), " "), " "); found {
			tasks[id] = state
		}
	}
	return tasks, err
}

// containerProcesses returns the first process of every container that runs on the node.
func (n *kubeNode) containerProcesses(t *testing.T) []int {
	t.Helper()
	tasks, err := n.tasks()
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, task := range tasks { // "4711 RUNNING"
		pid, err := strconv.Atoi(strings.Fields(task)[0])
		if err == nil { // else it is the line above the table
			pids = append(pids, pid)
		}
	}
	return pids
}

// killAgent kills k8s-gpu on the node.
func (n *kubeNode) killAgent(t *testing.T) {
	t.Helper()
	agents := running("k8s-gpu")
	for _, pid := range n.containerProcesses(t) {
		if _, found := agents[pid]; !found {
			continue
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

// powerOff kills all containers and programs of the node at once, and empties /run. What kubelet and containerd have on disk stays.
func (n *kubeNode) powerOff(t *testing.T) {
	t.Helper()
	pids := n.containerProcesses(t)
	mounts := func(pid int) string {
		namespace, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)) // "" = the process has ended
		return namespace
	}
	for pid := range running("containerd-shim") {
		if mounts(pid) == mounts(n.containerd.cmd.Process.Pid) {
			pids = append(pids, pid)
		}
	}
	n.kubelet.stop(t, syscall.SIGKILL)
	n.containerd.stop(t, syscall.SIGKILL)
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	must(t, slices.Concat(n.enter, []string{"umount", "--recursive", "--lazy", "/run"})...)
	must(t, slices.Concat(n.enter, []string{"mount", "-t", "tmpfs", "tmpfs", "/run"})...)
}
