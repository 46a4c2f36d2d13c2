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

// offers says what the node shows: "2 of 4 nvidia/gpu-mps/..." is four units of which two are healthy.
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

// offers says what the node shows: "2 of 4 nvidia.com/gpu.mps" is four units of which two are allocatable. A resource
// that has been taken away stays on a node for a while, as none of none.
func (c *cluster) offers() (string, error) {
	var node struct {
		Status struct{ Capacity, Allocatable map[string]string }
	}
	err := c.get("/api/v1/nodes/"+nodeName, &node)
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
	for _, side := range []struct {
		name, want string
		offers     func() (string, error)
		alive      func() error
	}{
		{"the Nomad node", sorted(groups), s.nomad.offers, s.nomad.process.alive},
		{"the Kubernetes node", sorted(resources), s.kube.offers, s.kube.kubelet.alive},
	} {
		began := time.Now()
		await(t, side.name+" to show\n"+side.want, offersAtMost, func() error {
			got, err := side.offers()
			if err == nil && got != side.want {
				err = fmt.Errorf("it shows\n%s", got)
			}
			return errors.Join(err, side.alive())
		})
		t.Logf("%s after %.1f s:\n%s", side.name, time.Since(began).Seconds(), side.want)
	}
}

func sorted(lines []string) string {
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
