package kubeadapter

import (
	"strings"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// A MIG instance may get the ID of the one that was in its place before, in another profile.
func TestSameIDInAnotherProfile(t *testing.T) {
	const was, is = "nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-2g.20gb"
	r := newRig(t)
	r.startKubelet()
	machine := migMachine()
	r.src.Set(buildInventory(machine, mixedConfig()))
	r.start()
	r.awaitHealthy(was, 1)
	list, _ := r.kubelet.Devices(was)
	id := list[0].GetID()
	old, err := r.kubelet.Plugin(was)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range machine.Devices {
		if string(d.ID) == id {
			machine.Devices[i].Profile = "2g.20gb"
		}
	}
	r.src.Set(buildInventory(machine, mixedConfig()))
	r.awaitHealthy(is, 1)
	_, err = old.Allocate(t.Context(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	if err == nil || !strings.Contains(err.Error(), "belongs to "+is+" now, not "+was) {
		t.Errorf("the old resource grants it: %v", err)
	}
	r.await("the old resource without it", func() bool {
		devices, ok := r.kubelet.Devices(was)
		return ok && len(devices) == 0
	})
	for i, list := range r.kubelet.Lists(was)[1:] {
		if len(list) == 0 && r.kubelet.Lists(was)[i][0].GetHealth() == v1beta1.Healthy {
			t.Error("it was dropped while it was healthy")
		}
	}
	if _, err := r.kubelet.Allocate(t.Context(), is, id); err != nil {
		t.Errorf("the new resource: %v", err)
	}
}
