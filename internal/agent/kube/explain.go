package kube

import (
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceclass"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
)

// Explain is what the kubelet's adapter adds to the command explain.
func Explain(s config.Kubernetes) explain.Adapter {
	if s.Core.API == inventory.DRA {
		return explain.Adapter{
			API: inventory.DRA, Listed: true, Name: claimName, Notes: claimNotes, Prove: s.File.ProveSummary(), Reset: s.File.ResetSummary(),
			Respond: func(p inventory.Plan) explain.Response {
				return explain.Response{Env: map[string]string{}, CDIDevices: p.CDI}
			},
		}
	}
	return explain.Adapter{
		Name:    kubeadapter.ResourceOf,
		Respond: func(p inventory.Plan) explain.Response { return responseOf(s, p) },
		Notes:   kubeletNotes,
		Prove:   s.File.ProveSummary(),
		Reset:   s.File.ResetSummary(),
	}
}

// claimName is what a claim names for a unit: the class of its pool.
func claimName(u inventory.Unit) string { return "DeviceClass " + deviceclass.NameOf(u.Pool) }

// claimNotes are what Kubernetes does with a claim (1.37, k8s.io/dynamic-resource-allocation/structured).
func claimNotes(_ *inventory.Allocatable, units []inventory.Unit, n int) []string {
	names := make([]string, len(units))
	for i, u := range units {
		names[i] = resourceslice.DeviceName(u)
	}
	notes := []string{"Kubernetes: the scheduler chooses, on the node that it chooses: of the devices that class, selectors and taints allow, the first in the slices. In ResourceSlices: " + strings.Join(names, ", ")}
	if n == 0 {
		return append(notes, fmt.Sprintf("Kubernetes: a claim can name a device by its attributes: device.attributes[\"%s\"].uuid == %q", resourceslice.Driver, units[0].Device.ID))
	}
	return append(notes, "Kubernetes: devices of other claims are known here only while pods of this node use them")
}

// responseOf is the response to Allocate.
func responseOf(s config.Kubernetes, p inventory.Plan) explain.Response {
	made := deviceplugin.Response(p, ResponseOptions(s))
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
func kubeletNotes(_ *inventory.Allocatable, units []inventory.Unit, n int) []string {
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
