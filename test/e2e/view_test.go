//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// view records what one program shows of the GPUs, until the end of the test.
type view struct {
	name string

	mu    sync.Mutex
	shown []change // each differs from the one before
	err   error    // of the last look
}

type change struct {
	asked time.Time
	at    time.Time // of the answer
	what  string
}

// lookEvery is the resolution of the times of a view.
const lookEvery = 50 * time.Millisecond

// follow reads every lookEvery. Failed reads are not recorded.
func follow(t *testing.T, name string, ask func() (string, error)) *view {
	t.Helper()
	v := &view{name: name}
	var looking sync.WaitGroup
	ctx := t.Context()
	looking.Go(func() {
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			asked := time.Now()
			what, err := ask()
			v.note(asked, what, err)
			<-tick.C
		}
	})
	t.Cleanup(looking.Wait)
	return v
}

func (v *view) note(asked time.Time, what string, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err = err
	if err == nil && (len(v.shown) == 0 || v.shown[len(v.shown)-1].what != what) {
		v.shown = append(v.shown, change{asked, time.Now(), what})
	}
}

// await waits until the program shows what matches the pattern, and returns how long after since it began to.
func (v *view) await(t *testing.T, since time.Time, pattern string) time.Duration {
	t.Helper()
	wanted := regexp.MustCompile(pattern)
	var last change
	await(t, v.name+" to show "+pattern, 90*time.Second, func() error {
		v.mu.Lock()
		defer v.mu.Unlock()
		if len(v.shown) == 0 {
			return errors.Join(errors.New("it shows nothing"), v.err)
		}
		if last = v.shown[len(v.shown)-1]; !wanted.MatchString(last.what) {
			return errors.Join(fmt.Errorf("it shows %q", last.what), v.err)
		}
		return nil
	})
	took := max(0, last.at.Sub(since))
	t.Logf("%s after %v: %s", v.name, took.Round(time.Millisecond), last.what)
	return took
}

// since returns what was shown at the time and after.
func (v *view) since(at time.Time) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []string
	for i, s := range v.shown {
		if s.at.Before(at) && i+1 < len(v.shown) && !v.shown[i+1].at.After(at) {
			continue // was over by then
		}
		all = append(all, s.what)
	}
	return all
}

// followNomad looks at the Nomad node: "7 of 8, unhealthy: ..." is one of eight devices unhealthy for that reason.
func followNomad(t *testing.T, a *agent) *view {
	t.Helper()
	return follow(t, "the Nomad node", func() (string, error) {
		n, err := a.node()
		text := fmt.Sprintf("%d of %d", n.healthy(), len(n.gpus()))
		reasons := map[string]bool{}
		for _, g := range n.gpus() {
			if !g.Healthy && !reasons[g.HealthDescription] {
				reasons[g.HealthDescription] = true
				text += ", " + g.HealthDescription
			}
		}
		return text, err
	})
}

// followNode looks at the Kubernetes node: "7 of 8" is eight GPUs of which seven are allocatable, "of" no such resource.
func followNode(t *testing.T, c *cluster) *view {
	t.Helper()
	return follow(t, "the Kubernetes node", func() (string, error) {
		capacity, allocatable, err := c.offer()
		return strings.TrimSpace(allocatable + " of " + capacity), err
	})
}

// followKubelet looks at what kubelet has been told: "7 healthy".
func followKubelet(t *testing.T, c *cluster) *view {
	t.Helper()
	return follow(t, "kubelet", func() (string, error) {
		ids, err := c.healthy(gpuResource)
		return fmt.Sprintf("%d healthy", len(ids)), err
	})
}

// pool is what both nodes should show of interchangeable units.
type pool struct {
	group       string // on Nomad, without the vendor: "gpu-shared/NVIDIA H100 80GB HBM3"; "" = not there
	resource    string // on Kubernetes, without the domain: "gpu.shared"; "" = not there
	healthy, of int
}

// deviceOf is the UUID in a unit's id: "GPU-..." of "GPU-...::3".
func deviceOf(unit string) string {
	uuid, _, _ := strings.Cut(unit, "::")
	return uuid
}

// devicesOf are those of units, each once and in order.
func devicesOf(units []string) []string {
	var devices []string
	for _, id := range units {
		devices = append(devices, deviceOf(id))
	}
	slices.Sort(devices)
	return slices.Compact(devices)
}

// offers returns what the node shows: "2 of 4 nvidia/gpu-mps/..." is four units of which two are healthy.
func (a *agent) offers() (string, error) {
	n, err := a.node()
	var lines []string
	for _, g := range n.NodeResources.Devices {
		one := node{}
		one.NodeResources.Devices = []group{g}
		lines = append(lines, fmt.Sprintf("%d of %d %s/%s/%s", one.healthy(), len(g.Instances), g.Vendor, g.Type, g.Name))
	}
	return sorted(lines), err
}

// offers returns what the node shows: "2 of 4 nvidia.com/gpu.mps" is four units of which two are allocatable. A resource
// that has been taken away stays on a node for a while, as none of none.
func (n *kubeNode) offers() (string, error) {
	var node struct {
		Status struct{ Capacity, Allocatable map[string]string }
	}
	err := fetchJSON(kubeAPI+"/api/v1/nodes/"+n.name, &node)
	var lines []string
	for name, all := range node.Status.Capacity {
		if strings.HasPrefix(name, "nvidia.com/") && all != "0" {
			lines = append(lines, fmt.Sprintf("%s of %s %s", node.Status.Allocatable[name], all, name))
		}
	}
	return sorted(lines), err
}

// offersAtMost is how long a node may take to show what is offered. A device that a pod held is free when a kubelet that has
// been running for two minutes no longer lists the pod: until then its pod-resources API may lack pods.
const offersAtMost = 3 * time.Minute

// awaitOffers waits until both nodes show just these pools.
func (s *scene) awaitOffers(t *testing.T, pools ...pool) {
	t.Helper()
	var groups, resources []string
	for _, p := range pools {
		if p.group != "" {
			groups = append(groups, fmt.Sprintf("%d of %d nvidia/%s", p.healthy, p.of, p.group))
		}
		if p.resource != "" {
			resources = append(resources, fmt.Sprintf("%d of %d nvidia.com/%s", p.healthy, p.of, p.resource))
		}
	}
	for _, n := range []struct {
		name, want string
		offers     func() (string, error)
		alive      func() error
	}{
		{"the Nomad node", sorted(groups), s.nomad.offers, s.nomad.process.alive},
		{"the Kubernetes node", sorted(resources), s.kube.offers, s.kube.kubelet.alive},
	} {
		began := time.Now()
		await(t, n.name+" to show\n"+n.want, offersAtMost, func() error {
			got, err := n.offers()
			if err == nil && got != n.want {
				err = fmt.Errorf("it shows\n%s", got)
			}
			return errors.Join(err, n.alive())
		})
		t.Logf("%s after %.1f s:\n%s", n.name, time.Since(began).Seconds(), n.want)
	}
}

func sorted(lines []string) string {
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
