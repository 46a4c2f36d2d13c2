package config

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// DRA are the settings of the API dra, Kubernetes' Dynamic Resource Allocation. Whether it is used is Kubernetes.Core.API.
type DRA struct {
	Node       string  // name of this node's object in Kubernetes' API; "" = not known
	API        KubeAPI // Kubernetes' API
	KubeletDir string  // the kubelet's --root-dir, on the host and here
	Evict      bool    // the taint of a GPU whose hardware is broken deletes the pods that use it: effect NoExecute

	EvictionsPerHour int // GPUs of this node whose pods are deleted within an hour, at most
}

// KubeAPI is where and as whom the agent calls Kubernetes' API. "" = as a pod does: the address from the environment, the files of the
// service account.
type KubeAPI struct {
	Address   string // URL
	TokenFile string
	CAFile    string
}

// Configured reports whether an operator has set any of it.
func (a KubeAPI) Configured() bool { return a != KubeAPI{} }

const (
	flagAPI          = "api"
	flagListStrategy = "device-list-strategy"
	flagIDStrategy   = "device-id-strategy"
	flagOnUnhealthy  = "on-unhealthy"
	flagPerHour      = "evictions-per-hour"
	flagStateDir     = "state-dir"

	defaultKubeletDir = "/var/lib/kubelet"
)

// nodeForm is a name of a Node object: a DNS subdomain (RFC 1123).
const nodeForm = `^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`

// draOptions are the choice of the API, and the options of dra.
func draOptions(s *Kubernetes) []Spec {
	return []Spec{
		{Flag: flagAPI, Key: flagAPI, Default: string(inventory.DevicePlugin),
			Usage:   "through which API of Kubernetes this node offers its devices: device-plugin, or dra (Dynamic Resource Allocation)",
			Note:    "See [dra](dra.md)",
			binding: oneOf(&s.Core.API, inventory.DevicePlugin, inventory.DRA)},
		{Flag: "node-name", Usage: "name of this node's Node object; the API dra requires it",
			Note:    "A pod has it from `spec.nodeName` (`fieldRef`)",
			binding: orEmpty(&s.DRA.Node, matching(&s.DRA.Node, schema.Match(nodeForm, "a name"), "want the name of a Node object"))},
		{Flag: "kube-api", Key: "dra.kubeAPI", Usage: "address of Kubernetes' API, such as https://10.0.0.1:6443; empty: that of the pod's environment",
			binding: orEmpty(&s.DRA.API.Address, matching(&s.DRA.API.Address, schema.Match("^https?://[^/?#@]+/?$", "a URL"), "want a URL such as https://10.0.0.1:6443"))},
		{Flag: "kube-token-file", Key: "dra.kubeTokenFile", Exists: true, Usage: "file with the token for Kubernetes' API; empty: that of the pod's service account",
			Note:    "Read again for each request",
			binding: pathOrEmpty(&s.DRA.API.TokenFile, "/var/run/secrets/kubernetes.io/serviceaccount/token")},
		{Flag: "kube-ca-file", Key: "dra.kubeCAFile", Exists: true, Usage: "certificates with which Kubernetes' API is verified; empty: those of the pod's service account",
			binding: pathOrEmpty(&s.DRA.API.CAFile, "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")},
		{Flag: "kubelet-dir", Key: "dra.kubeletDir", Default: defaultKubeletDir,
			Usage:   "the kubelet's --root-dir, in which it finds the sockets of DRA drivers; on the host and here",
			Note:    "The sockets are below `plugins_registry` and `plugins/gpu.nvidia.com`. `kubelet-socket` and `pod-resources-socket` have settings of their own",
			binding: ownFolder(&s.DRA.KubeletDir, defaultKubeletDir, nil)},
		{Flag: flagOnUnhealthy, Key: "dra.onUnhealthy", Default: "taint",
			Usage:   "what an unhealthy device means for pods that use it: taint: nothing, only no new pods; evict: if its hardware is broken, Kubernetes deletes them",
			Note:    "`evict` gives the taint the effect `NoExecute`. Kubernetes then deletes the pods without regard to disruption budgets, except those that tolerate it, and those that requested an extended resource such as `nvidia.com/gpu`, which its eviction controller does not see",
			binding: choice(&s.DRA.Evict, map[string]bool{"taint": false, "evict": true})},
		{Flag: flagPerHour, Key: "dra.evictionsPerHour", Default: "1",
			Usage:   "with on-unhealthy evict: of how many GPUs of this node pods are deleted within an hour, at most",
			Note:    "A GPU counts that a claim has, and that has been broken for 30 seconds in which two more checks agreed. The pods of others stay until the hour is over. A restart of the agent starts no new hour",
			binding: count(&s.DRA.EvictionsPerHour)},
	}
}

// matching sets a text of a form.
func matching(field *string, t schema.Type, remedy string) binding {
	return custom(t, func(v Value) error {
		*field = v.Text
		if ok, err := regexp.MatchString(t.Pattern, v.Text); !ok {
			return cmp.Or(err, errors.New(remedy))
		}
		return nil
	})
}

// applyDRA sets what the API dra implies, and returns what is not possible with it. given are the values of the options by flag.
func (s *Kubernetes) applyDRA(given map[string]Value) (problems []error) {
	refuse := func(v Value, remedy string) {
		problems = append(problems, &setting.Error{Key: v.Where, Value: v.Text, Remedy: remedy})
	}
	if s.Core.API != inventory.DRA {
		if v := given[flagOnUnhealthy]; v.Where != "" && s.DRA.Evict {
			s.Notes = append(s.Notes, v.Where+" has no effect: device plugins have no taints; it belongs to api dra")
		}
		return nil
	}
	var lists Strategies
	if v := given[flagListStrategy]; v.Where != "" && lists.set(v) == nil && (lists.EnvVar || lists.VolumeMounts || lists.CDIAnnotations) {
		refuse(v, "with api dra containers get their devices by CDI only: want cdi-cri or auto, or remove it")
	}
	if v := given[flagPassDeviceSpecs]; v.Where != "" && s.Core.Injection.Nodes {
		refuse(v, "with api dra the CDI specification has the device nodes: remove it")
	}
	if v := given[flagIDStrategy]; v.Where != "" && s.Core.IndexIDs {
		refuse(v, "with api dra devices are named by UUID, because a claim outlives a reboot: want uuid, or remove it")
	}
	if s.File.OnePerRequest != "" {
		refuse(Value{Text: "true", Where: s.File.OnePerRequest}, "with api dra a request never gets two shares of one device, and one for two shares gets them on two devices: remove it")
	}
	if s.Health.StateDir == "" {
		refuse(given[flagStateDir], "with api dra the prepared claims are kept there, and Unprepare needs them: want a folder such as "+defaultStateDir)
	}
	s.Strategies, s.Core.Injection.Nodes = Strategies{CDICRI: true}, false
	return problems
}

// CheckNode reports a missing setting without which an agent can't run with the API dra, or hand faults over. A file may be valid without it: it is the same on
// all nodes.
func (s Kubernetes) CheckNode() error {
	var what string
	switch {
	case s.DRA.Node != "":
		return nil
	case s.Core.API == inventory.DRA:
		what = "api dra"
	case s.HandOver.Enabled:
		what = "--" + flagHandOver
	default:
		return nil
	}
	return &setting.Error{Key: "--node-name", Remedy: what + " takes the name of this node's Node object: --node-name, or NODE_NAME from the pod's spec.nodeName (fieldRef)"}
}

// apiSummary is a line about the API dra.
func (s Kubernetes) apiSummary() []string {
	if s.Core.API != inventory.DRA {
		return nil
	}
	parts := []string{"api: dra", "driver gpu.nvidia.com"}
	if s.DRA.Evict {
		parts = append(parts, fmt.Sprintf("pods of broken devices are deleted, of %d GPUs within an hour at most, except those that requested an extended resource", s.DRA.EvictionsPerHour))
	}
	if s.DRA.Node == "" {
		parts = append(parts, "the agent also takes --node-name or NODE_NAME")
	}
	return []string{strings.Join(parts, ", ")}
}
