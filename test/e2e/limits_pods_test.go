//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/cudastub"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	unifiedGroups = "/sys/fs/cgroup/unified" // the control groups of version 2 of a machine that has those of version 1, too
	limitPodRoot  = "/e2e-machine-limits"    // of the kubelet's pods
)

// limitPodsTest is a node with the API dra and a pool whose shares have a limit.
type limitPodsTest struct {
	*draCluster
	parts []string // of the DaemonSet
}

// TestLimitsOfPods has a pod leak beside pods that share its GPU, by the policy of TestLimits: fence 13, 15, 17. It fails at its limit, and its neighbours keep what they
// have. The limit is that of the pod's group, which k8s-gpu has k8s-gpu limit-server set before kubelet makes the first container.
//
// The groups are the kernel's, and kubelet and runc make them in the hierarchy of version 2, too, which is beside those of version 1 here. One thing is done for them
// that they do only where there is no version 1: the controller is enabled above the groups of pods. Where the kernel has no misc, hugetlb stands in for it.
func TestLimitsOfPods(t *testing.T) {
	if _, err := os.Stat(unifiedGroups + "/cgroup.controllers"); err != nil {
		t.Skip("SKIPPED: no control groups of version 2 beside those of version 1, as a pod that has a control group namespace can't see the group with its limit: ", err)
	}
	controller := limitController(t, unifiedGroups)
	text, err := simdriver.Text("h100x8")
	if err == nil {
		text, err = simdriver.WithLimits(text, simdriver.Misc, unifiedGroups, "memacct_controller = "+controller)
	}
	if err != nil {
		t.Fatal(err)
	}
	m, err := simdriver.InstallText(t.Context(), filepath.Join(stateDir(), "machine"), text)
	if err != nil {
		t.Fatal(err)
	}
	l := startLimitPods(t, m)
	l.enable(t, controller)
	l.deploy(t, l.parts...)
	l.awaitDevices(t, 1, 0)
	must(t, "kubectl", "apply", "-f", "testdata/dra/limited.yaml")
	step(t, "a pod beyond its limit", l.leak)
	step(t, "a claim for more memory than the rest", l.more)
	step(t, "the agent and the server are killed", l.kill)
	step(t, "the server is away", l.away)
	step(t, "all pods end", l.end)
	checkDriver(t, m)
}

func startLimitPods(t *testing.T, m *simdriver.Machine) *limitPodsTest {
	t.Helper()
	roots, err := filepath.Glob("/sys/fs/cgroup/*")
	for _, root := range roots {
		err = errors.Join(err, os.MkdirAll(root+limitPodRoot, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	installHook(t, m)
	cudastub.Build(t, simdriver.LibraryDir(m.Root))
	r := containerd2WithPodGroups
	r.podRoot = limitPodRoot
	c := startClusterOn(t, r, pluginImage(), saveImage(t, "localhost/leak:1", []string{"/bin/sh"}, cudastub.BuildLeak(t, t.TempDir())))
	writePolicy(t, "limits")
	render(t, "parts/own/kustomization.yaml", map[string]string{"POLICY": policyDir()})
	render(t, "parts/limits/kustomization.yaml", map[string]string{
		"GROUPS": unifiedGroups, "PROGRAM": os.Getenv(limitPrograms) + "/k8s-gpu", "MACHINE": m.Root, "HISTORY": filepath.Join(stateDir(), "k8s-history"),
	})
	reader, err := os.ReadFile("../../deploy/limits-reader/kustomization.yaml") // deploy/limits has it
	if err != nil {
		t.Fatal(err)
	}
	write(t, "parts/limits-reader/kustomization.yaml", []byte(strings.ReplaceAll(string(reader), "path: /var/log/pods", "path: "+logDir()+"/pods")))
	return &limitPodsTest{&draCluster{cluster: c, machines: map[string]*simdriver.Machine{c.name: m}}, []string{shippedPart(t, "limits"), "parts/own", "parts/limits"}}
}

// enable enables a controller in the groups above those of pods, as runc does with version 2.
func (l *limitPodsTest) enable(t *testing.T, controller string) {
	t.Helper()
	for _, group := range []string{"/", limitPodRoot, limitPodRoot + "/kubepods", limitPodRoot + "/kubepods/besteffort"} {
		await(t, controller+" in "+group, 60*time.Second, func() error {
			return os.WriteFile(unifiedGroups+group+"/cgroup.subtree_control", []byte("+"+controller), 0o644)
		})
	}
}

// begin creates a pod that runs a command of a shell, with a claim from a template.
func (l *limitPodsTest) begin(t *testing.T, name, claim, command string) {
	t.Helper()
	m := l.machine()
	must(t, "kubectl", "apply", "-f", render(t, "dra/limited-pod.yaml", map[string]string{
		"NAME": name, "CLAIM": claim, "COMMAND": command, "MACHINE": m.Root, "LIBRARY": simdriver.LibraryDir(m.Root) + "/libcuda.so.1", "GPU": m.UUID(0),
	}))
}

// holdHalf is the command of a pod that has 8 GiB.
const holdHalf = "sleep 1000000 | leak $LIBRARY 1024 8192"

// awaitHolds waits until a pod has its 8 GiB.
func (l *limitPodsTest) awaitHolds(t *testing.T, name string) {
	t.Helper()
	await(t, "the memory of pod "+name, 60*time.Second, func() error {
		out, err := command("kubectl", "logs", name)
		if err == nil && !strings.Contains(out, "has 8192 MiB, result 0") {
			err = errors.New(out + l.events(name))
		}
		return err
	})
}

// allocatesAtMost fails unless a pod gets so many GiB more, and no more.
func (l *limitPodsTest) allocatesAtMost(t *testing.T, name string, gib int) {
	t.Helper()
	out := must(t, "kubectl", "exec", name, "--", "sh", "-c", "leak $LIBRARY 1024 100000 </dev/null")
	if want := fmt.Sprintf("has %d MiB, result 2", gib<<10); !strings.Contains(out, want) {
		t.Errorf("pod %s: %q, want %q", name, out, want)
	}
}

// awaitLimits waits until inspect shows these pods and no others: "state: used of limit".
func (l *limitPodsTest) awaitLimits(t *testing.T, want map[string]string) {
	t.Helper()
	await(t, fmt.Sprintf("the limits %v", want), 60*time.Second, func() error {
		text, err := command("kubectl", "exec", "--namespace=kube-system", daemonSet, "--", "k8s-gpu", "inspect", "--json")
		if err != nil {
			return err
		}
		var r report.Report
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return err
		}
		if r.MemoryLimits == nil {
			return errors.New("there are none")
		}
		got := map[string]string{}
		for _, s := range r.MemoryLimits.Shares {
			got[s.Work.Name] = s.State + " " + s.Reason
			if s.UsedBytes != nil && s.HardBytes != nil {
				got[s.Work.Name] = fmt.Sprintf("%s: %d of %d GiB", strings.TrimSpace(got[s.Work.Name]), *s.UsedBytes>>30, *s.HardBytes>>30)
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("they are %q, %+v", got, *r.MemoryLimits)
		}
		return nil
	})
}

var neighbours = []string{"neighbour-1", "neighbour-2"}

const half = "limited: 8 of 16 GiB"

// leak has a pod allocate until it fails, between neighbours that have their memory.
func (l *limitPodsTest) leak(t *testing.T) {
	for _, name := range neighbours {
		l.begin(t, name, "limited", holdHalf)
	}
	for _, name := range neighbours {
		l.awaitHolds(t, name)
	}
	l.begin(t, "leak", "limited", "until [ -e /end ]; do sleep 1; done | leak $LIBRARY 1024 100000 >/out; cat /out; case $(cat /out) in *result?0) ;; *) exit 1;; esac")
	l.awaitRunning(t, "leak")
	await(t, "the end of the memory", 60*time.Second, func() error {
		out, err := command("kubectl", "exec", "leak", "--", "cat", "/out")
		if err == nil && !strings.Contains(out, "has 16384 MiB, result 2") {
			err = errors.New(out)
		}
		return err
	})
	l.awaitLimits(t, map[string]string{"leak": "limited: 16 of 16 GiB", neighbours[0]: half, neighbours[1]: half})
	for _, name := range neighbours {
		l.allocatesAtMost(t, name, 8)
	}
}

// more has a pod wait that claims more than the rest of the GPU's memory, until the pod that leaks has failed.
func (l *limitPodsTest) more(t *testing.T) {
	l.begin(t, "large", "limited-large", holdHalf)
	l.awaitEvent(t, "large", "FailedScheduling", "")
	must(t, "kubectl", "exec", "leak", "--", "sh", "-c", ": >/end")
	l.awaitPod(t, "leak", "to fail", func(p pod) error {
		if p.Status.Phase != "Failed" {
			return errors.New(p.Status.Phase)
		}
		return nil
	})
	l.awaitHolds(t, "large")
	l.allocatesAtMost(t, "large", 23)
	l.awaitLimits(t, map[string]string{"large": "limited: 8 of 31 GiB", neighbours[0]: half, neighbours[1]: half})
	must(t, "kubectl", "delete", "pod", "large", "leak")
}

// kill kills the agent and the server. That changes nothing for the pods.
func (l *limitPodsTest) kill(t *testing.T) {
	was := map[string]pod{}
	for _, name := range neighbours {
		p, err := l.pod(name)
		if err != nil {
			t.Fatal(err)
		}
		was[name] = p
	}
	before, err := l.machine().Limits()
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, pid := range l.containerProcesses(t) {
		if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.Contains(string(line), "k8s-gpu") {
			killed++
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	if killed != 2 {
		t.Fatalf("%d processes were killed", killed)
	}
	for _, name := range neighbours {
		l.allocatesAtMost(t, name, 8)
	}
	l.awaitLimits(t, map[string]string{neighbours[0]: half, neighbours[1]: half})
	for name, p := range was {
		l.awaitUnchanged(t, name, p)
	}
	after, err := l.machine().Limits()
	if entries := entriesOf(before); err != nil || !slices.Equal(entriesOf(after), entries) {
		t.Errorf("the driver had %q, it has %q, error %v", entries, entriesOf(after), err)
	}
}

// entriesOf are the groups that the driver limits, with their limits. It keeps an entry without a limit for a group that had one.
func entriesOf(lines []string) (entries []string) {
	for _, line := range lines {
		entry := line[:max(0, strings.LastIndexByte(line, ' '))] // without what is used
		if strings.HasPrefix(entry, "entry ") && !strings.HasSuffix(entry, fmt.Sprintf(" %d", gpu.NoMemoryLimit)) {
			entries = append(entries, entry)
		}
	}
	slices.Sort(entries)
	return entries
}

// away has a pod wait for the server, which is the only one with the rights to limit it.
func (l *limitPodsTest) away(t *testing.T) {
	const server = "daemonset/tandem-k8s-gpu-limit-server"
	must(t, "kubectl", "delete", "--namespace=kube-system", "--wait", "--cascade=foreground", server)
	l.begin(t, "late", "limited", holdHalf)
	await(t, "the pod to wait", 30*time.Second, func() error {
		if events := l.events("late"); !strings.Contains(events, "FailedScheduling") && !strings.Contains(events, "FailedPrepareDynamicResources") {
			return errors.New(events)
		}
		return nil
	})
	t.Log(l.events("late"))
	p, err := l.pod("late")
	if err != nil || p.Status.Phase != "Pending" {
		t.Errorf("the pod is %s, error %v; %s", p.Status.Phase, err, l.events("late"))
	}
	for _, name := range neighbours {
		l.allocatesAtMost(t, name, 8)
	}
	must(t, "kubectl", "apply", "-k", stateDir())
	l.awaitHolds(t, "late")
	l.awaitLimits(t, map[string]string{"late": half, neighbours[0]: half, neighbours[1]: half})
}

// end ends all pods. No limit is left, and nothing that was charged.
func (l *limitPodsTest) end(t *testing.T) {
	l.removeAll(t)
	l.awaitLimits(t, map[string]string{})
	lines, err := l.machine().Limits()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range lines {
		if strings.HasPrefix(line, "charge ") {
			t.Errorf("the driver still has %s", line)
		}
	}
	if entries := entriesOf(lines); len(entries) > 0 {
		t.Errorf("the driver still has %q", entries)
	}
}
