package config

import (
	"errors"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Operations are settings of what operators and other programs read from an agent. "" = none, unless a field has another meaning.
type Operations struct {
	HTTPAddress    string // HOST:PORT of metrics and the status page
	MappingDir     string // folder of the job files that dcgm-exporter reads (--hpc-job-mapping-dir)
	FeaturesFile   string // k8s-gpu: node labels for Node Feature Discovery
	NodeFeatureAPI bool   // k8s-gpu: the same as an object of Kubernetes' API
	Namespace      string // k8s-gpu: of that object
	Pod            string // k8s-gpu: of the agent, for its owners
	NoTimestamp    bool   // k8s-gpu: without nvidia.com/gfd.timestamp
	Oneshot        bool   // k8s-gpu: the labels are written once, and no device is offered
	LogFormat      string // k8s-gpu: auto, text or json
	NomadAddress   string // nomad-gpu: URL of the Nomad agent's API, or unix:// and the path of its socket
	NomadGuessed   bool   // nomad-gpu: NomadAddress is not configured: what answers there may be another node's agent, or nothing may
	NomadTokenFile string // nomad-gpu: file with the ACL token for NomadAddress
}

const (
	flagNodeFeatureAPI = "use-node-feature-api"
	flagOneshot        = "oneshot"
)

// checkLabels reports what node labels lack.
func (s Kubernetes) checkLabels() error {
	o := s.Operations
	var errs []error
	if o.NodeFeatureAPI && s.DRA.Node == "" {
		errs = append(errs, &setting.Error{Key: "--node-name", Remedy: "--" + flagNodeFeatureAPI + " takes the name of this node's Node object: --node-name, or NODE_NAME from the pod's spec.nodeName (fieldRef)"})
	}
	if o.NodeFeatureAPI && o.Namespace == "" {
		errs = append(errs, &setting.Error{Key: "--namespace", Remedy: "--" + flagNodeFeatureAPI + " takes the namespace of the object: --namespace, or NAMESPACE from the pod's metadata.namespace (fieldRef)"})
	}
	if o.Oneshot && !o.NodeFeatureAPI && o.FeaturesFile == "" {
		errs = append(errs, &setting.Error{Key: "--" + flagOneshot, Value: "true", Remedy: "takes --features-file or --" + flagNodeFeatureAPI + ": where the labels go"})
	}
	return errors.Join(errs...)
}

// kubernetesOperations are the options of k8s-gpu.
func kubernetesOperations(o *Operations) []Spec {
	return []Spec{
		{Flag: "hpc-job-mapping-dir", Usage: "folder of the files that dcgm-exporter reads: for each GPU the pods that have it; empty: none",
			binding: orEmpty(&o.MappingDir, ownFolder(&o.MappingDir, defaultMappingDir, isJobFile))},
		{Flag: "features-file", Aliases: []string{"output-file"}, Env: []string{"FEATURES_FILE", "GFD_OUTPUT_FILE"}, Usage: "file of node labels for Node Feature Discovery, with the names of NVIDIA's gpu-feature-discovery; empty: none",
			binding: orEmpty(&o.FeaturesFile, inOwnFolder(&o.FeaturesFile, "/etc/kubernetes/node-feature-discovery/features.d/gfd"))},
		{Flag: flagNodeFeatureAPI, Env: []string{"GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"}, Default: "false",
			Usage:   "write the node labels of NVIDIA's gpu-feature-discovery as a NodeFeature object of Node Feature Discovery, also beside --features-file",
			Note:    "Takes `node-name`, `namespace`, and the verbs `get`, `create` and `update` on nodefeatures of `nfd.k8s-sigs.io` in that namespace",
			binding: boolean(&o.NodeFeatureAPI)},
		{Flag: "namespace", Usage: "namespace of the NodeFeature object", Note: "A pod has it from `metadata.namespace` (`fieldRef`)",
			binding: orEmpty(&o.Namespace, matching(&o.Namespace, schema.Match(nodeForm, "a name"), "want the name of a namespace"))},
		{Flag: "pod-name", Usage: "name of the agent's pod: the NodeFeature object is deleted with it and its DaemonSet; empty: it stays", Note: "Takes the verb `get` on pods in `namespace`",
			binding: orEmpty(&o.Pod, matching(&o.Pod, schema.Match(nodeForm, "a name"), "want the name of a pod"))},
		{Flag: "no-timestamp", Env: []string{"GFD_NO_TIMESTAMP"}, Default: "false", Usage: "node labels without nvidia.com/gfd.timestamp", binding: boolean(&o.NoTimestamp)},
		{Flag: flagOneshot, Env: []string{"GFD_ONESHOT"}, Default: "false", Usage: "write the node labels once and exit; no device is offered", binding: boolean(&o.Oneshot)},
		{Flag: "log-format", Default: "auto", Usage: "text, json, or auto: text on a terminal, else json",
			binding: oneOf(&o.LogFormat, "auto", "text", "json")},
	}
}

// defaultMappingDir is the example of dcgm-exporter's documentation.
const defaultMappingDir = "/var/run/dcgm_job_maps"

// nomadOperations are the options of nomad-gpu.
func nomadOperations(o *Operations) []Spec {
	return []Spec{
		{HCL: "http_address", Usage: "address of /metrics and the status page, such as 127.0.0.1:9411; empty: none", binding: hostPort(&o.HTTPAddress)},
		{HCL: "hpc_job_mapping_dir", Usage: "folder of the files that dcgm-exporter reads: for each GPU the allocations that have it; empty: none",
			binding: orEmpty(&o.MappingDir, ownFolder(&o.MappingDir, defaultMappingDir, isJobFile))},
		{HCL: "nomad_address", Default: "auto",
			Usage:   "the Nomad agent's API, for the owners of devices, and to find out that no work has a GPU that leaves Nomad: auto: NOMAD_ADDR in the agent's environment, else " + DefaultNomadAddress + ", if the agent there is this node's; off: owners are read from control groups only, and no GPU leaves Nomad; or http://HOST:PORT, https://..., unix:///path",
			binding: nomadAddress(o)},
		{HCL: "nomad_token_file", Exists: true, Usage: "file with an ACL token for nomad_address that allows agent:read, node:read and namespace read-job; if not in every namespace, no GPU leaves Nomad",
			binding: pathOrEmpty(&o.NomadTokenFile, "/etc/nomad.d/tandem.token")},
	}
}

// DefaultNomadAddress is that of Nomad's own programs.
const DefaultNomadAddress = "http://127.0.0.1:4646"

// nomadAddress sets where the API of the Nomad agent is.
func nomadAddress(o *Operations) binding {
	t := schema.Match("^(https?://|unix:///).", "a URL")
	t.Values = []string{"auto", "off"}
	return custom(t, func(v Value) error {
		o.NomadAddress, o.NomadGuessed = v.Text, false
		switch v.Text {
		case "auto":
			o.NomadAddress, o.NomadGuessed = DefaultNomadAddress, true
			return nil
		case "off":
			o.NomadAddress = ""
			return nil
		}
		for _, scheme := range []string{"http://", "https://", "unix:///"} {
			if rest, ok := strings.CutPrefix(v.Text, scheme); ok && rest != "" {
				return nil
			}
		}
		return errors.New("want auto, off, http://HOST:PORT, https://HOST:PORT or unix:///PATH")
	})
}

// address is the type of an address to listen on; "" = none.
var address = schema.Type{Pattern: ":[0-9]+$", Words: "`HOST:PORT`", Blank: true}

// hostPort sets "", or an address to listen on.
func hostPort(field *string) binding {
	return custom(address, func(v Value) error {
		*field = v.Text
		colon := strings.LastIndexByte(v.Text, ':')
		if port, err := strconv.ParseUint(v.Text[colon+1:], 10, 16); v.Text != "" && (colon < 0 || err != nil || port == 0) {
			return errors.New("want HOST:PORT such as 127.0.0.1:9411")
		}
		return nil
	})
}
