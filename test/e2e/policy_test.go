//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// model is the product name of the GPUs of the machine h100x8.
const model = "NVIDIA H100 80GB HBM3"

// noDaemon is why a unit of MPS takes no work.
const noDaemon = "MPS control daemon does not answer"

// sharedHistory is the state directory of two agents on one node.
const sharedHistory = "history"

func policyDir() string { return filepath.Join(stateDir(), "policy") }

// writePolicy puts a policy in the place of the one before, as an editor does.
func writePolicy(t *testing.T, name string) {
	t.Helper()
	rendered := render(t, "policies/"+name+".yaml", map[string]string{"MPS": mpsRoot()})
	err := errors.Join(os.MkdirAll(policyDir(), 0o755), os.Rename(rendered, filepath.Join(policyDir(), "policy.yaml")))
	if err != nil {
		t.Fatal(err)
	}
}

// changePolicy writes another one and has both agents read it, by their command.
func (s *scene) changePolicy(t *testing.T, name string) {
	t.Helper()
	writePolicy(t, name)
	s.do(t, s.order(t, sharedHistory, "reload"))
}

// hup has both agents read the policy, by the signal.
func (s *scene) hup(t *testing.T) {
	t.Helper()
	for _, program := range []string{"nomad-gpu", "k8s-gpu"} {
		for pid := range running(program) {
			if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestOnePolicy returns one policy file to both agents, twice another one while they run.
func TestOnePolicy(t *testing.T) {
	m := install(t, "h100x8")
	installMPS(t)
	failMPS(t, "no CUDA-capable device")
	s := startSceneUnder(t, m, "shared")
	p := policied{scene: s, Machine: m, top: t}
	step(t, "both offer the units of the policy; those without an MPS daemon are unhealthy", p.offered)
	step(t, "either warns that the other offers the same", p.contested)
	step(t, "units of MPS are healthy while a daemon answers, which Kubernetes runs", p.mps)
	step(t, "the daemon is Nomad's when Kubernetes runs none", p.otherMPS)
	step(t, "a request for a GPU gets no share", p.exclusive)
	step(t, "an XID on a shared GPU takes all of its units and no other", p.xid)
	step(t, "the policy is another one", p.recut)
	step(t, "a job and pods share one GPU, the fifth pod waits", p.shares)
	step(t, "work lands on the MIG instance that it wants", p.instances)
	step(t, "two shares at once are refused where they should be", p.refused)
	step(t, "a policy with a mistake changes nothing, even if Nomad's plugin is killed", p.spoil)
	step(t, "the policy has separate GPUs for each", p.split)
	s.sameProcesses(t)
	checkDriver(t, m)
}

// policied is a scene under a policy.
type policied struct {
	*scene
	*simdriver.Machine
	top    *testing.T
	client io.Closer // of an MPS control daemon
}

// uuids are the GPUs in these slots, which are indices on this machine.
func (p *policied) uuids(slots ...int) (ids []string) {
	for _, slot := range slots {
		ids = append(ids, p.UUID(slot))
	}
	slices.Sort(ids)
	return ids
}

// units is what both offer under the policy "shared" while so many shares and units of MPS are healthy.
func (p *policied) units(shares, mps int) []pool {
	return []pool{
		{"gpu/" + model, "gpu", 2, 2},
		{"gpu-shared/" + model, "gpu.shared", shares, 12},
		{"gpu-mps/" + model, "gpu.mps", mps, 4},
	}
}

func (p *policied) offered(t *testing.T) {
	p.awaitOffers(t, p.units(12, 0)...)
	p.learn(t)
	node, err := p.nomad.node()
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range node.gpus() {
		switch {
		case deviceOf(g.ID) == p.UUID(7):
			t.Errorf("Nomad has %s, which is reserved", g.ID)
		case slices.Contains(p.uuids(5, 6), deviceOf(g.ID)) && !strings.Contains(g.HealthDescription, noDaemon):
			t.Errorf("%s has no MPS daemon, Nomad's description is %q", g.ID, g.HealthDescription)
		}
	}
	for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/gpu.mps"} {
		if ids, err := p.kube.healthy(resource); err != nil || slices.Contains(devicesOf(ids), p.UUID(7)) {
			t.Errorf("kubelet has %q, error %v; %s is reserved", ids, err, p.UUID(7))
		}
	}
	for _, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		text := p.inspect(t, agent)
		line, found := lineWith(text, p.UUID(7))
		if !found || !strings.Contains(line, "reserved") || strings.Count(text, "MPS_DAEMON_DOWN") != 2 {
			t.Errorf("%s inspect: want what is reserved and for what an MPS daemon is missing:\n%s", agent, text)
		}
		t.Logf("%s inspect:\n%s", agent, text)
	}
}

func (p *policied) inspect(t *testing.T, agent string) string {
	t.Helper()
	return must(t, binary(agent), "inspect", "--state-dir="+filepath.Join(stateDir(), sharedHistory))
}

// contested expects a warning in both logs and in both inspections, of every GPU that both offer.
func (p *policied) contested(t *testing.T) {
	for _, c := range []struct {
		agent, other string
		log          func(*testing.T) string
	}{
		{"nomad-gpu", "k8s-gpu", func(t *testing.T) string { return readLog(t, p.nomad.name) }},
		{"k8s-gpu", "nomad-gpu", p.kube.pluginLog},
	} {
		await(t, c.agent+" to show what "+c.other+" offers, too", 30*time.Second, func() error {
			log, inspected := c.log(t), p.inspect(t, c.agent)
			for _, id := range p.uuids(0, 1, 2, 3, 4, 5, 6) {
				logged := hasLine(log, "offered by another agent", id, c.other)
				shown := hasLine(inspected, id+": also offered by "+c.other)
				if !logged || !shown {
					return fmt.Errorf("%s: in the log %v, in inspect %v", id, logged, shown)
				}
			}
			return nil
		})
	}
}

// hasLine reports whether one line of a text holds all the words. Nomad logs attributes in any order.
func hasLine(text string, words ...string) bool {
	for line := range strings.Lines(text) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return true
		}
	}
	return false
}

func (p *policied) exclusive(t *testing.T) {
	p.kube.request(t, "pair", gpuResource, 2)
	ids, _ := p.nomad.runJob(t, "pair", "running", "count=2", "then=exec sleep 1000000")
	p.nomad.submit(t, "gpus.nomad.hcl", "name=third", "count=1", "device=gpu")
	pod, _ := p.kube.awaitWork(t, "pair", 2)
	p.kube.request(t, "third", gpuResource, 1)
	if want := p.uuids(0, 1); !slices.Equal(ids, want) || !slices.Equal(pod.ids(), want) {
		t.Errorf("a job has %q, a pod %q, want %q", ids, pod.ids(), want)
	}
	p.nomad.awaitBlocked(t, "third")
	p.kube.awaitInsufficient(t, "third", gpuResource)
	p.nomad.remove(t, "pair", "third")
	p.kube.remove(t, "pair", "third")
}

func (p *policied) xid(t *testing.T) {
	const slot = 3
	failGPU(t, p.Machine, p.UUID(slot))
	p.awaitOffers(t, p.units(8, 4)...)
	await(t, "Nomad to show XID 95", 30*time.Second, func() error {
		node, err := p.nomad.node()
		for _, g := range node.gpus() {
			if bad := deviceOf(g.ID) == p.UUID(slot); g.Healthy == bad || bad && !strings.Contains(g.HealthDescription, "XID 95") {
				err = errors.Join(err, fmt.Errorf("%s has XID 95, Nomad has %+v", p.UUID(slot), g))
			}
		}
		return err
	})
	if ids, err := p.kube.healthy("nvidia.com/gpu.shared"); err != nil || !slices.Equal(devicesOf(ids), p.uuids(2, 4)) {
		t.Errorf("kubelet has %q, error %v; want units of %q", ids, err, p.uuids(2, 4))
	}
	if err := p.Reset(slot); err != nil {
		t.Fatal(err)
	}
	p.awaitOffers(t, p.units(12, 4)...)
}

func (p *policied) split(t *testing.T) {
	if err := p.MIGOff(7); err != nil {
		t.Fatal(err)
	}
	p.changePolicy(t, "split")
	p.awaitOffers(t, pool{"gpu/" + model, "", 4, 4}, pool{"", "gpu", 4, 4})
	await(t, "each to have its GPUs", 30*time.Second, func() error { // under the policy before both have four, too
		node, err := p.nomad.node()
		kubelets, err2 := p.kube.healthy(gpuResource)
		var nomads []string
		for _, g := range node.gpus() {
			nomads = append(nomads, g.ID)
		}
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		if !slices.Equal(nomads, p.uuids(0, 1, 2, 3)) || !slices.Equal(kubelets, p.uuids(4, 5, 6, 7)) {
			return fmt.Errorf("Nomad has %q, kubelet %q", nomads, kubelets)
		}
		return nil
	})
	for _, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		await(t, agent+" to have its GPUs for itself", 30*time.Second, func() error {
			if line, found := lineWith(p.inspect(t, agent), "also offered"); found {
				return errors.New(line)
			}
			return nil
		})
	}
}
