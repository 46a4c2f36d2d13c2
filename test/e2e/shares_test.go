//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// underCut is what both offer under the policy "cut".
var underCut = []pool{
	{"gpu/" + model, "gpu", 4, 4},
	{"gpu-shared/" + model, "gpu.shared", 4, 4},
	{"gpu-shared/careful", "careful", 8, 8},
	{"gpu-shared/" + model + " MIG 1g.10gb", "mig-1g.10gb.shared", 4, 4},
	{"gpu/" + model + " MIG 3g.40gb", "mig-3g.40gb", 1, 1},
}

func (p *policied) recut(t *testing.T) {
	if err := p.SetMIG(7, "1g.10gb", "1g.10gb", "3g.40gb"); err != nil {
		t.Fatal(err)
	}
	p.changePolicy(t, "cut")
	held := slices.Concat(underCut[1:], []pool{{"gpu/" + model, "", 4, 4}, {"", "gpu", 3, 4}, {"", "gpu.mps", 0, 1}})
	p.awaitOffers(t, held...)
	p.awaitDaemonEnds(t)
	p.kube.awaitUnchanged(t, "client", p.pod) // which has a unit that is not offered any more
	if text := p.inspect(t, "k8s-gpu"); !strings.Contains(text, "HELD") || !strings.Contains(text, "client") {
		t.Errorf("k8s-gpu inspect does not tell which pod holds a GPU under its old name:\n%s", text)
	}
	p.kube.remove(t, "client")
	p.awaitOffers(t, underCut...)
}

// shares has a job and a pod use two shares of one GPU each, then four pods one share each; a fifth waits for one of them.
func (p *policied) shares(t *testing.T) {
	const resource = "nvidia.com/gpu.shared"
	check := func(name string, units []string, output string, count int) {
		t.Helper()
		if gpu := p.UUID(2); !slices.Equal(devicesOf(units), []string{gpu}) || len(units) != count || strings.Count(output, gpu) != 1 {
			t.Errorf("%s has %q and prints %q; want %d share(s) of %s, named once", name, units, output, count, gpu)
		}
	}
	ids, output := p.nomad.runJob(t, "two", "complete", "device=nvidia/gpu-shared/"+model, "count=2")
	check("job two", ids, output, 2)
	p.kube.request(t, "two", resource, 2)
	two, output := p.kube.awaitWork(t, "two", 2)
	check("pod two", two.ids(), output, 2)
	p.kube.remove(t, "two")
	for n := range 4 {
		p.kube.request(t, fmt.Sprint("share-", n), resource, 1)
	}
	for n := range 4 {
		pod, output := p.kube.awaitWork(t, fmt.Sprint("share-", n), 1)
		check(pod.Metadata.Name, pod.ids(), output, 1)
	}
	p.kube.request(t, "fifth", resource, 1)
	p.kube.awaitInsufficient(t, "fifth", resource)
	p.kube.remove(t, "share-0")
	fifth, output := p.kube.awaitWork(t, "fifth", 1)
	check("pod fifth", fifth.ids(), output, 1)
	p.kube.remove(t, "share-1", "share-2", "share-3", "fifth")
}

func (p *policied) instances(t *testing.T) {
	ids, err := p.Instances(7)
	if err != nil {
		t.Fatal(err)
	}
	small, large := ids[:2], ids[2]
	p.kube.request(t, "large", "nvidia.com/mig-3g.40gb", 1)
	p.kube.request(t, "small", "nvidia.com/mig-1g.10gb.shared", 1)
	got, _ := p.nomad.runJob(t, "large", "complete", "mig_profile=3g.40gb", "least_memory=30 GiB", "count=1")
	if !slices.Equal(got, []string{large}) {
		t.Errorf("a job that wants 3g.40gb has %q, want %s", got, large)
	}
	if pod, _ := p.kube.awaitWork(t, "large", 1); !slices.Equal(pod.ids(), []string{large}) {
		t.Errorf("a pod that wants 3g.40gb has %q, want %s", pod.ids(), large)
	}
	if pod, _ := p.kube.awaitWork(t, "small", 1); !slices.Contains(small, deviceOf(pod.ids()[0])) {
		t.Errorf("a pod that wants a share of 1g.10gb has %q, want one of %q", pod.ids(), small)
	}
	p.kube.remove(t, "large", "small")
}

func (p *policied) refused(t *testing.T) {
	const why = "maximum request size for shared resources is 1"
	p.kube.request(t, "two", "nvidia.com/careful", 2)
	p.nomad.submit(t, "gpus.nomad.hcl", "name=careful", "device=nvidia/gpu-shared/careful", "count=2")
	p.nomad.awaitRefused(t, "careful", why)
	p.kube.awaitRefused(t, "two", why)
	p.nomad.remove(t, "careful")
	p.kube.remove(t, "two")
}

// spoil has both agents read a policy with a mistake, and Nomad start another plugin with it: one that would not be
// configured Nomad gives up, until the agent is restarted.
func (p *policied) spoil(t *testing.T) {
	const mistake = "time-sharing"
	write(t, "policy/policy.yaml", []byte("version: v1\npolicy:\n  rules:\n    - {select: {index: 0}, use: "+mistake+"}\n"))
	p.hup(t)
	await(t, "both to complain", 30*time.Second, func() error {
		if nomad, kube := readLog(t, p.nomad.name), p.kube.pluginLog(t); !strings.Contains(nomad, mistake) || !strings.Contains(kube, mistake) {
			return errors.New("their logs do not")
		}
		return nil
	})
	p.sameProcesses(t)
	p.nomad.killPlugin(t)
	p.awaitOffers(t, underCut...)
	p.nomad.runJob(t, "after", "complete", "count=1")
	p.learn(t)
}
