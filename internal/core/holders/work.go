// Package holders has which work has which devices, and what may be held beside each other: values. Each API has a Record of its work, made of
// the orchestrator's record and of what this agent has given out; what asks who has a GPU reads these.
package holders

import (
	"cmp"
	"strings"
)

// The orchestrators.
const (
	Kubernetes = "kubernetes"
	Nomad      = "nomad"
)

// Work is what has devices: a container of a pod, a resource claim, or a task of a Nomad allocation. It is comparable; "" is unknown.
type Work struct {
	Orchestrator string // Kubernetes, Nomad
	Namespace    string // of the pod, the claim or the job
	Name         string // of the pod; ID of the Nomad job
	Container    string // of the pod; task of the Nomad job
	ID           string // UID of the pod, or of a claim without a pod; ID of the Nomad allocation
	Claim        string // name of the resource claim through which a pod has the device; "" = a device plugin
}

// String names the work for operators of the node, without its container or task: "pod default/train", "claim default/train", of a pod that has
// a claim "pod default/train (claim gpus)", "job default/train (allocation 5b1f3c58)".
func (w Work) String() string {
	switch {
	case w.Claim != "" && w.Name != "":
		return "pod " + w.Namespace + "/" + w.Name + " (claim " + w.Claim + ")"
	case w.Claim != "":
		return "claim " + cmp.Or(w.Namespace, "?") + "/" + w.Claim
	case w.Orchestrator == Nomad && w.ID == "":
		return "an allocation that the Nomad agent's API does not show, to which this agent has given it"
	case w.Orchestrator == Nomad && w.Name == "":
		return "allocation " + w.ID
	case w.Orchestrator == Nomad:
		return "job " + strings.TrimPrefix(w.Namespace+"/"+w.Name, "/") + " (allocation " + w.ID + ")"
	case w.Name != "":
		return "pod " + w.Namespace + "/" + w.Name
	case w.ID != "":
		return "the pod with UID " + w.ID
	}
	return "a pod that was admitted before, or just now"
}

// Short names the work with its container or task where one line has several: "default/train-0 worker". What is unknown is left out.
func (w Work) Short() string {
	return strings.TrimSpace(strings.Trim(w.Namespace+"/"+w.Name, "/") + " " + w.Container)
}

// Compare is the order of work: by orchestrator, namespace, name, container, ID and claim.
func (w Work) Compare(other Work) int {
	return cmp.Or(cmp.Compare(w.Orchestrator, other.Orchestrator), cmp.Compare(w.Namespace, other.Namespace), cmp.Compare(w.Name, other.Name),
		cmp.Compare(w.Container, other.Container), cmp.Compare(w.ID, other.ID), cmp.Compare(w.Claim, other.Claim))
}
