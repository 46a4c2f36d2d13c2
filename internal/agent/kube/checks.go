package kube

import (
	"context"
	"slices"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/doctor/kubelet"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Checks are those of doctor that only a node of Kubernetes has.
func Checks(s config.Kubernetes, version string) []doctor.Check {
	return slices.Concat(kubelet.Checks(doctorOptions(s)), nodeChecks(s, version), draChecks(s, version))
}

// doctorOptions are what the settings mean for the checks of the kubelet.
func doctorOptions(s config.Kubernetes) kubelet.Options {
	lists := s.Strategies
	return kubelet.Options{
		KubeletSocket: s.KubeletSocket, PodResourcesSocket: s.PodResourcesSocket, CRISocket: s.CDI.CRISocket,
		CDIOnly: (lists.CDICRI || lists.CDIAnnotations) && !lists.EnvVar && !lists.VolumeMounts && !lists.Auto,
	}
}

// nodeChecks are those of labels of the Node, if the settings name any.
func nodeChecks(s config.Kubernetes, version string) []doctor.Check {
	if !s.ReadsNode() {
		return nil
	}
	o := kubelet.NodeLabels{Node: s.DRA.Node, API: kubeAPIOptions(s)}
	o.API.Agent = userAgent(version)
	if s.ByLabel.Dir != "" {
		o.Labels = append(o.Labels, s.ByLabel.Label)
	}
	if s.PauseLabel != "" {
		o.Labels = append(o.Labels, s.PauseLabel)
	}
	return []doctor.Check{o.Check()}
}

// draChecks are the checks of the API dra; with device plugins only if something of it is left on the node.
func draChecks(s config.Kubernetes, version string) []doctor.Check {
	if s.Core.API != inventory.DRA {
		switch l := leftoversOf(s); {
		case l.problem() != "":
			return []doctor.Check{l.check(s.Health.StateDir), unreadClaims(s)}
		case len(l.left) == 0:
			return nil
		}
	}
	api := kubeAPIOptions(s)
	api.Agent = userAgent(version)
	return append(kubelet.DRA{
		Node: s.DRA.Node, Driver: resourceslice.Driver, Sockets: dra.SocketPrefix, Slices: publisher.NamePrefix(s.DRA.Node, resourceslice.Driver),
		KubeletDir: s.DRA.KubeletDir, CDIDir: s.CDI.Folder, API: api, Names: []string{kubeadapter.GPUResource},
	}.Checks(), unreadClaims(s))
}

// check is that of doctor for leftovers that are not served.
func (l leftovers) check(stateDir string) doctor.Check {
	const name = "dra"
	return doctor.Check{Name: name, Place: stateDir, Decides: problem.Leftovers, Look: func(context.Context, *doctor.Facts) []doctor.Finding {
		return []doctor.Finding{{Check: name, Severity: doctor.Problem, Place: stateDir, Found: l.problem(), Remedy: l.remedy()}}
	}}
}

const unreadRemedy = "let the agent read it; a damaged file can be removed when no pod has the claim with the UID in its name: kubectl get resourceclaims -A -o custom-columns=UID:.metadata.uid,NAMESPACE:.metadata.namespace,NAME:.metadata.name"

// unreadClaims is doctor's check of the records of prepared claims: one that can't be read may keep GPUs from being given out.
func unreadClaims(s config.Kubernetes) doctor.Check {
	const name = "prepared claims"
	dir := s.Health.StateDir
	return doctor.Check{Name: name, Place: dir, Decides: problem.ClaimUnread, Look: func(context.Context, *doctor.Facts) (all []doctor.Finding) {
		boot, _ := history.BootID(s.Core.Roots.Proc)
		for _, u := range dra.UnreadClaims(dir, boot) {
			all = append(all, doctor.Finding{Check: name, Severity: doctor.Problem, Place: u.Path, Found: u.String(), Remedy: unreadRemedy})
		}
		return all
	}}
}
