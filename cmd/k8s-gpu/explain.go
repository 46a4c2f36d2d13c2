package main

import (
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/explain"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// explainAdapter is what the kubelet's adapter adds to the command explain.
func explainAdapter(s settings) explain.Adapter {
	return explain.Adapter{
		Name:    kubeadapter.ResourceOf,
		Respond: func(p inventory.Plan) explain.Response { return responseOf(s, p) },
		Notes:   kubeletNotes,
	}
}

// responseOf is the response to Allocate.
func responseOf(s settings, p inventory.Plan) explain.Response {
	made := kubeadapter.Response(p, kubeadapter.Options{DevRoot: s.DevRoot, MPSRoot: s.MPSRoot, Lists: deviceLists(s)})
	r := explain.Response{Env: made.GetEnvs(), Annotations: made.GetAnnotations()}
	for _, d := range made.GetDevices() {
		r.DeviceNodes = append(r.DeviceNodes, explain.Node{HostPath: d.GetHostPath(), ContainerPath: d.GetContainerPath(), Permissions: d.GetPermissions()})
	}
	for _, m := range made.GetMounts() {
		r.Mounts = append(r.Mounts, explain.Mount{HostPath: m.GetHostPath(), ContainerPath: m.GetContainerPath(), ReadOnly: m.GetReadOnly()})
	}
	for _, d := range made.GetCdiDevices() {
		r.CDIDevices = append(r.CDIDevices, d.GetName())
	}
	return r
}

// kubeletNotes are what the kubelet does with a request (kubelet 1.37, pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate).
func kubeletNotes(_ *inventory.Inventory, units []inventory.Unit, n int) []string {
	name := kubeadapter.ResourceOf(units[0])
	if n == 0 {
		return []string{
			fmt.Sprintf("Kubernetes: a pod can't name devices; it requests %s: %d, and the kubelet chooses (see --count)", name, len(units)),
		}
	}
	notes := []string{
		fmt.Sprintf("Kubernetes: resources: limits: %s: %d. The kubelet asks for this choice (GetPreferredAllocation) with the devices that are free when the pod is admitted", name, n),
	}
	for _, u := range units {
		if u.Device.NUMANode >= 0 {
			return append(notes, "Kubernetes: with a topology manager policy other than none, only the devices on the NUMA nodes of its hint take part in the choice, if there are enough")
		}
	}
	return notes
}
