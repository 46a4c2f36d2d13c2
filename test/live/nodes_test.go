package live

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A node that nvidia-modprobe creates when agents run already is in the next container that either orchestrator starts.
func TestDeviceNodeThatIsCreatedLaterReachesContainers(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	const node = "/dev/nvidia-uvm"
	path := filepath.Join(m.Root, node)
	must(t, os.Rename(path, path+".later"))
	s := stage(t, m) // a reading of the machine each minute
	gpu := s.UUID(0)
	must(t, s.kubelet.AwaitHealthy(t.Context(), "nvidia.com/gpu", 8))
	nodes := func() (kubelet, nomad bool) {
		k, err := s.kubelet.Allocate(t.Context(), "nvidia.com/gpu", gpu)
		must(t, err)
		for _, d := range k.GetDevices() {
			kubelet = kubelet || d.GetContainerPath() == node
		}
		n, err := s.nomad.reserve(gpu)
		must(t, err)
		for _, d := range n.Devices {
			nomad = nomad || d.TaskPath == node
		}
		return kubelet, nomad
	}
	described := func() bool {
		d := s.nomad.last().device(t, gpu)
		if !d.Healthy {
			t.Errorf("a device without a node takes no work: %s", d.HealthDesc)
		}
		return strings.Contains(d.HealthDesc, "missing "+node+": run nvidia-modprobe -c0 -u")
	}
	must(t, s.nomad.await(t.Context(), func(f fingerprint) bool { return len(f.health()) == 8 }))
	if k, n := nodes(); k || n || !described() {
		t.Errorf("without the node: kubelet %t, Nomad %t; described %t", k, n, described())
	}
	lists := len(s.kubelet.Lists("nvidia.com/gpu"))
	calls, err := m.Calls()
	must(t, err)

	began := time.Now()
	must(t, os.Rename(path+".later", path))
	for !slices.Contains(s.monitor.State().Snapshot.Nodes, node) {
		if time.Since(began) > patience {
			t.Fatal("the node is not found")
		}
		time.Sleep(tick)
	}
	promised(t, "a new node", time.Since(began), time.Second)
	if k, n := nodes(); !k || !n {
		t.Errorf("with the node: kubelet %t, Nomad %t", k, n)
	}
	must(t, s.nomad.await(t.Context(), func(fingerprint) bool { return !described() }))
	if n := len(s.kubelet.Lists("nvidia.com/gpu")); n != lists {
		t.Errorf("the kubelet got %d lists because of a node", n-lists)
	}
	after, err := m.Calls()
	must(t, err)
	for _, reading := range []string{"nvmlDeviceGetCount_v2", "nvmlDeviceGetName"} {
		if after[reading] != calls[reading] && time.Since(began) < 10*time.Second { // else a reading was due
			t.Errorf("%d calls of %s", after[reading]-calls[reading], reading)
		}
	}
}
