//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// oneFault is a machine that both orchestrators have, and one more machine of each.
type oneFault struct {
	*fleet
	kube   *cluster
	second *kubeNode
	bad    string // the GPU that fails
	pod    pod    // has it
	clock
}

// clock is a table of how long after an event each place shows it.
type clock struct {
	shows []showing
	table string
}

// showing is a place where an operator or a program finds the health of a GPU.
type showing struct {
	*view
	fault, recovered string // patterns
}

// TestOneFault has a GPU fall off the bus that both orchestrators have given to work. Both show the same verdict in the same words, new work
// goes to other GPUs and other nodes, and what waited gets the GPU when it has been reset. Then the kernel logs an XID of it that NVML does not
// report: the Nomad agent reads a log like /dev/kmsg, and the pod, which has no such device, the same by syslog(2).
func TestOneFault(t *testing.T) {
	kernel := newKernelLog(t)
	f := &oneFault{
		fleet: startFleet(t, `http_address = "127.0.0.1:9411"`+"\n    kernel_log = \""+kernel.path+"\""),
		kube:  startCluster(t, pluginImage()),
	}
	second, other := f.kube.addNode(t, containerd2, "l40s")
	f.second = second
	f.kube.setKernelLog(t, kernel.profile)
	second.setKernelLog(t, `{"defaultAction": "SCMP_ACT_ALLOW"}`) // of another node
	f.kube.deployPlugin(t, f.machine.Root, "k8s-history", "parts/kernel-log")
	f.kube.awaitGPUs(t, 8, 8)
	second.awaitGPUs(t, 8, 8)
	step(t, "a job and a pod have one GPU", f.work)
	f.follow(t)
	step(t, "it falls off the bus", func(t *testing.T) {
		slot := slotOf(t, f.machine, f.bad)
		f.happens(t, "XID 79 and lost", func() error { return errors.Join(f.machine.XID(slot, 79), f.machine.Lose(slot)) },
			func(s showing) string { return s.fault })
	})
	step(t, "both have the same words", func(t *testing.T) {
		if also := f.sameWords(t); !strings.HasPrefix(also, "lost: GPU is lost") {
			t.Errorf("the Nomad server has one of two faults: also %q", also)
		}
	})
	step(t, "new work goes to other GPUs and other nodes", f.elsewhere)
	step(t, "the GPU is reset, and what waited is placed", func(t *testing.T) {
		f.purge(t, "held")
		slot := slotOf(t, f.machine, f.bad)
		f.happens(t, "reset", func() error { return f.machine.Reset(slot) }, func(s showing) string { return s.recovered })
		f.awaitOn(t, "again", map[string]int{"h100": 1})
		f.kube.awaitRunning(t, "again")
		f.kube.awaitUnchanged(t, "held", f.pod)
		f.checkTasks(t)
	})
	step(t, "the kernel logs an XID that NVML does not report", func(t *testing.T) {
		pci, err := f.machine.Get(slotOf(t, f.machine, f.bad), "pci")
		if err != nil {
			t.Fatal(err)
		}
		f.happens(t, "XID 119 in the kernel log", func() error { return kernel.xid(strings.TrimSuffix(pci, ".0"), 119) },
			func(s showing) string { return strings.Replace(s.fault, "lost", "unhealthy", 1) })
		f.sameWords(t)
	})
	t.Logf("when each shows it:\n%s", f.table)
	f.h100.checkContent(t)
	f.l40s.checkContent(t)
	for _, m := range []*simdriver.Machine{f.machine, f.other, other} {
		checkDriver(t, m)
	}
}

// work starts a pod, and a job that asks for the very GPU that the pod has got.
func (f *oneFault) work(t *testing.T) {
	podOn(t, "held", f.kube.kubeNode, 1)
	f.pod, _ = f.kube.awaitWork(t, "held", 1)
	f.bad = f.pod.ids()[0]
	fleetJob{name: "held", device: where("ids", "set_contains", f.bad)}.submit(t)
	f.awaitOn(t, "held", map[string]int{"h100": 1})
	f.checkTasks(t)
}

// podOn creates a pod for a node, or for any.
func podOn(t *testing.T, name string, node *kubeNode, count int) {
	t.Helper()
	path := render(t, "pod.yaml", map[string]string{"NAME": name, "RESOURCE": gpuResource, "COUNT": fmt.Sprint(count)})
	if node != nil {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		path = write(t, "pod-on.yaml", []byte(strings.Replace(string(text), "spec:\n", "spec:\n  nodeSelector: {kubernetes.io/hostname: "+node.name+"}\n", 1)))
	}
	must(t, "kubectl", "apply", "-f", path)
}

// follow looks at every place where the health of the GPU is shown.
func (f *oneFault) follow(t *testing.T) {
	agent := f.kube.plugin(t)
	pages := map[string]string{
		"k8s-gpu /metrics": "http://" + agent.Status.PodIP + ":9410/metrics", "nomad-gpu /metrics": "http://127.0.0.1:9411/metrics",
	}
	for _, name := range []string{"k8s-gpu /metrics", "nomad-gpu /metrics"} {
		f.shows = append(f.shows, showing{follow(t, name, func() (string, error) { return stateIn(pages[name], f.bad) }), "^lost$", "^healthy$"})
	}
	f.shows = append(f.shows,
		showing{followKubelet(t, f.kube), "^7 healthy$", "^8 healthy$"},
		showing{follow(t, "pod's status", func() (string, error) {
			p, err := f.kube.pod("held")
			return p.health()[f.bad], err
		}), "^Unhealthy$", "^Healthy$"},
		showing{followNode(t, f.kube), "^7 of 8$", "^8 of 8$"},
		showing{follow(t, "k8s-gpu inspect", func() (string, error) {
			time.Sleep(200 * time.Millisecond) // each takes CPU time from what is measured
			return f.kube.inspected(f.bad)
		}), "^lost: ", "^(healthy)?$"},
		showing{follow(t, "Nomad client", func() (string, error) {
			devices, err := f.h100.statistics()
			return devices[f.bad].Stats.Attributes["Health"].StringVal, err
		}), "^lost: ", "^healthy"},
		showing{follow(t, "Nomad server", func() (string, error) {
			n, err := f.h100.node()
			i := slices.IndexFunc(n.gpus(), func(g gpuUse) bool { return g.ID == f.bad })
			if i < 0 {
				return "", errors.Join(fmt.Errorf("it has no %s", f.bad), err)
			}
			return fmt.Sprintf("%v %s", n.gpus()[i].Healthy, n.gpus()[i].HealthDescription), nil
		}), "^false [A-Z0-9_]+ lost: ", "^true "},
	)
}

// stateIn is the state of a GPU in an agent's metrics.
func stateIn(page, id string) (string, error) {
	text, err := fetch(page)
	found := regexp.MustCompile(`(?m)^tandem_device_health\{device="` + id + `",.*state="(\w+)"\} 1$`).FindStringSubmatch(text)
	if err == nil && found == nil {
		err = fmt.Errorf("no state of %s", id)
	}
	if err != nil {
		return "", err
	}
	return found[1], nil
}

// inspected is the health of a GPU in the output of inspect.
func inspected(id string, argv ...string) (string, error) {
	text, err := command(argv...)
	if err != nil {
		return "", err
	}
	var r report.Report
	err = json.Unmarshal([]byte(text), &r)
	for _, d := range r.Devices {
		if string(d.ID) == id {
			return d.Health, err
		}
	}
	return "", errors.Join(fmt.Errorf("it has no %s", id), err)
}

// inspected is the same of the node's k8s-gpu.
func (n *kubeNode) inspected(id string) (string, error) {
	agent, err := n.findPlugin()
	if err != nil {
		return "", err
	}
	return inspected(id, "kubectl", "exec", "--namespace=kube-system", agent.Metadata.Name, "--", "k8s-gpu", "inspect", "--json")
}

// happens does something to the machine and notes how long after it each place showed what it should.
func (c *clock) happens(t *testing.T, event string, do func() error, pattern func(showing) string) {
	t.Helper()
	if c.table == "" {
		c.table = "| event |"
		for _, s := range c.shows {
			c.table += " " + s.name + " |"
		}
		c.table += "\n|---" + strings.Repeat("|---", len(c.shows)) + "|\n"
	}
	began := time.Now()
	if err := do(); err != nil {
		t.Fatal(err)
	}
	c.table += "| " + event + " |"
	for _, s := range c.shows {
		c.table += fmt.Sprintf(" %.2f s |", s.await(t, began, pattern(s)).Seconds())
	}
	c.table += "\n"
}

// sameWords fails unless the verdicts of both agents, and what both commands print, are one text. The minute in it is that of each agent. The Nomad
// server has the cause before it, no recovery action, and also the GPU's other faults, which are returned.
func (f *oneFault) sameWords(t *testing.T) (also string) {
	t.Helper()
	own := regexp.MustCompile(`since \S+Z|; recovery action: [^;]*`)
	words := func(text string) string { return own.ReplaceAllString(text, "") }
	n, err := f.h100.node()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(n.gpus(), func(g gpuUse) bool { return g.ID == f.bad })
	_, description, _ := strings.Cut(words(n.gpus()[i].HealthDescription), " ")
	verdict, also, _ := strings.Cut(description, "; also ")
	t.Logf("the verdict: %s, and also %s", verdict, also)
	inKube, err := f.kube.inspected(f.bad)
	inNomad, err2 := inspected(f.bad, binary("nomad-gpu"), "inspect", "--json", "--state-dir="+filepath.Join(stateDir(), "h100-history"))
	for _, text := range []string{inKube, inNomad} {
		if err := errors.Join(err, err2); err != nil || words(text) != verdict {
			t.Errorf("inspect has %q, error %v", text, err)
		}
	}
	shown := must(t, "nomad", "node", "status", "-address="+nomadAPI, "-verbose", "-stats", n.ID)
	line, found := lineWith(words(shown), verdict)
	t.Logf("nomad node status -verbose -stats: %s", line)
	if !found {
		t.Errorf("it lacks the verdict:\n%s", shown)
	}
	for _, other := range []func() (string, error){f.l40s.offers, f.second.offers} { // the other machines have nothing
		if text, err := other(); err != nil || !strings.HasPrefix(text, "6 of 6") && !strings.HasPrefix(text, "8 of 8") {
			t.Errorf("another node offers %q, error %v", text, err)
		}
	}
	return also
}

// elsewhere has work ask for all other GPUs of the node, then for one more, and for one of this node.
func (f *oneFault) elsewhere(t *testing.T) {
	fleetJob{name: "rest", gpus: 7}.submit(t) // only this machine has so many
	podOn(t, "rest", f.kube.kubeNode, 6)      // the scheduler counts seven, of which the pod held has one
	f.awaitOn(t, "rest", map[string]int{"h100": 1})
	rest, _ := f.kube.awaitWork(t, "rest", 6)
	if slices.Contains(rest.ids(), f.bad) {
		t.Errorf("pod rest has %q, of which %s is unhealthy", rest.ids(), f.bad)
	}
	f.checkTasks(t)
	fleetJob{name: "next"}.submit(t)
	podOn(t, "next", nil, 1)
	fleetJob{name: "again", device: where("ids", "set_contains", f.bad)}.submit(t)
	podOn(t, "again", f.kube.kubeNode, 1)
	f.awaitOn(t, "next", map[string]int{"l40s": 1})
	f.kube.awaitRunning(t, "next")
	if next, err := f.kube.pod("next"); err != nil || next.Spec.NodeName != f.second.name {
		t.Errorf("pod next is on %q, error %v", next.Spec.NodeName, err)
	}
	f.h100.awaitBlocked(t, "again")
	f.kube.awaitInsufficient(t, "again", gpuResource)
}
