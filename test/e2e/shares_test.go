//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
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
	p.kube.awaitUnchanged(t, "client", p.pod) // which has a unit that is not offered any more
	if text := p.inspect(t, "k8s-gpu"); !strings.Contains(text, "HELD") || !strings.Contains(text, "client") {
		t.Errorf("k8s-gpu inspect does not tell which pod holds a GPU under its old name:\n%s", text)
	}
	p.kube.remove(t, "client")
	p.awaitOffers(t, underCut...)
}

// five returns five names.
func five(what string) (names []string) {
	for i := range 5 {
		names = append(names, fmt.Sprintf("%s-%d", what, i+1))
	}
	return names
}

func (p *policied) fourJobs(t *testing.T) {
	on := "device=nvidia/gpu-shared/" + model
	ids, output := p.nomad.runJob(t, "two", "complete", on, "count=2")
	checkShares(t, "a job", p.UUID(2), 2, ids, output)
	jobs := five("share")
	for _, name := range jobs[:4] {
		p.nomad.submit(t, "gpus.nomad.hcl", "name="+name, on, "count=1", "then=exec sleep 1000000")
	}
	units := map[string]bool{}
	for _, name := range jobs[:4] {
		ids, output := p.nomad.awaitWork(t, name, "running")
		checkShares(t, "job "+name, p.UUID(2), 1, ids, output)
		units[ids[0]] = true
	}
	if len(units) != 4 {
		t.Errorf("four jobs have %q", slices.Sorted(maps.Keys(units)))
	}
	p.nomad.submit(t, "gpus.nomad.hcl", "name="+jobs[4], on, "count=1", "then=exec sleep 1000000")
	if why := p.nomad.awaitBlocked(t, jobs[4]); !strings.Contains(why, "devices: no devices match request") {
		t.Errorf("%s is blocked because of %s", jobs[4], why)
	}
	p.nomad.remove(t, jobs[0])
	ids, output = p.nomad.awaitWork(t, jobs[4], "running")
	checkShares(t, "job "+jobs[4], p.UUID(2), 1, ids, output)
	p.nomad.remove(t, jobs[1:]...)
}

// checkShares fails unless a job or pod has count shares of a GPU, and its output names that GPU once.
func checkShares(t *testing.T, who, device string, count int, units []string, output string) {
	t.Helper()
	if !slices.Equal(devicesOf(units), []string{device}) || len(units) != count || strings.Count(output, device) != 1 {
		t.Errorf("%s has %q and prints %q; want %d share(s) of %s, named once", who, units, output, count, device)
	}
}

func (p *policied) fourPods(t *testing.T) {
	const resource = "nvidia.com/gpu.shared"
	p.kube.request(t, "two", resource, 2)
	two, output := p.kube.awaitWork(t, "two", 2)
	checkShares(t, "pod two", p.UUID(2), 2, two.ids(), output)
	p.kube.remove(t, "two")
	pods := five("share")
	for _, name := range pods[:4] {
		p.kube.request(t, name, resource, 1)
	}
	for _, name := range pods[:4] {
		pod, output := p.kube.awaitWork(t, name, 1)
		checkShares(t, "pod "+name, p.UUID(2), 1, pod.ids(), output)
	}
	p.kube.request(t, pods[4], resource, 1)
	p.kube.awaitInsufficient(t, pods[4], resource)
	p.kube.remove(t, pods[0])
	pod, output := p.kube.awaitWork(t, pods[4], 1)
	checkShares(t, "pod "+pods[4], p.UUID(2), 1, pod.ids(), output)
	p.kube.remove(t, pods[1:]...)
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

// mpsRoot is where the MPS control daemons have their folders.
func mpsRoot() string { return filepath.Join(stateDir(), "mps") }

// mpsDaemon is a stand-in for the MPS control daemon of a resource: it answers at the socket that NVIDIA's has.
type mpsDaemon struct{ listener net.Listener }

// startMPS starts a daemon where NVIDIA's k8s-device-plugin starts it.
func startMPS(t *testing.T, resource string) *mpsDaemon {
	t.Helper()
	pipe := filepath.Join(mpsRoot(), resource, "pipe")
	control := filepath.Join(pipe, "control")
	for _, dir := range []string{pipe, filepath.Join(mpsRoot(), "shm")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Remove(control) // of one that was killed
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", control)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	d := &mpsDaemon{l}
	t.Cleanup(d.kill)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // killed
			}
			_ = conn.Close()
		}
	}()
	return d
}

// kill leaves the socket behind, as a killed process does. It may be called again.
func (d *mpsDaemon) kill() { _ = d.listener.Close() }
