package kube

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/doctor/kubelet"
)

// Checks are those of doctor that only a node of Kubernetes has.
func Checks(s config.Kubernetes, version string) []doctor.Check {
	return slices.Concat(kubelet.Checks(doctorOptions(s)), draChecks(s, version))
}

// doctorOptions are what the settings mean for the checks of the kubelet.
func doctorOptions(s settings) kubelet.Options {
	lists := s.Strategies
	return kubelet.Options{
		KubeletSocket: s.KubeletSocket, PodResourcesSocket: s.PodResourcesSocket, CRISocket: s.CDI.CRISocket,
		CDIOnly: (lists.CDICRI || lists.CDIAnnotations) && !lists.EnvVar && !lists.VolumeMounts && !lists.Auto,
	}
}

// draChecks are the checks of the API dra; with device plugins only if something of it is left on the node.
func draChecks(s settings, version string) []doctor.Check {
	if s.Core.API != inventory.DRA {
		switch left := leftoversOf(s); {
		case left.problem() != "":
			return []doctor.Check{left.check(s.Health.StateDir), unreadClaims(s)}
		case len(left.of) == 0:
			return nil
		}
	}
	return append(kubelet.DRA{
		Node: s.DRA.Node, Driver: resourceslice.Driver, Sockets: dra.SocketPrefix, Slices: publisher.NamePrefix(s.DRA.Node, resourceslice.Driver),
		KubeletDir: s.DRA.KubeletDir, CDIDir: s.CDI.Folder, API: kubeAPIOptions(s, version), Names: []string{deviceplugin.GPUResource},
	}.Checks(), unreadClaims(s))
}
