package config

import (
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// WriteSchema writes the JSON Schema of the configuration file.
func WriteSchema(w io.Writer) error {
	return schema.Write(w, "Configuration file of gpu-fleet", schema.ObjectOf(rootKeys()...))
}

// The values of keys.
var (
	kinds = []string{string(fleet.Kubernetes), string(fleet.Nomad)}
	modes = []string{rescue.ModeOff.String(), rescue.ModeReport.String(), rescue.ModeAct.String()}
)

// The types of values that several keys have.
var (
	nameType    = schema.Match(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,48}[A-Za-z0-9])?$`, "a name of at most 50 letters, digits, dots, hyphens and underscores")
	addressType = schema.Match(`^(https?://[^/]+/?|unix://.+)$`, "an address such as `https://nomad.example:4646`, or `unix://` and the path of a socket")
	listenType  = schema.Type{Pattern: `^(\[[^\[\]]+\]|[^:\[\]]*):(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5]?[0-9]{1,4})$`,
		Words: "host and port such as `127.0.0.1:9410` or `:9410`", Blank: true}
	controllerType = schema.Match(`^[A-Z][A-Za-z0-9]*(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+$`, "kind and API group, such as `PyTorchJob.kubeflow.org`")
	durationType   = schema.Match(`^(0|([0-9.]+(ns|us|µs|ms|s|m|h))+)$`, "a duration such as `30s` or `10m`")
	pathType       = schema.Type{Pattern: `.`, Words: "a path; a relative one begins at the folder of this file", Blank: true}
	textType       = schema.Type{Pattern: `.`, Words: "text", Blank: true}
	boolType       = schema.Type{Kind: schema.Bool}
)

func rootKeys() []schema.Key {
	return []schema.Key{
		{Name: "clusters", Required: true, Usage: "the Kubernetes clusters and Nomad regions of the team",
			Type: schema.ListOf(schema.Type{Kind: schema.Object, Name: "cluster", Keys: clusterKeys, Cases: clusterCases}, 1)},
		{Name: "ledger", Type: schema.ObjectOf(ledgerKeys...), Usage: "where the ledger is, and the lock by which one of several processes leads"},
		{Name: "policy", Type: schema.ObjectOf(policyKeys()...), Usage: "which faults count, and how much is moved: one policy for all clusters"},
		{Name: "listen", Default: DefaultListen, Type: listenType, Usage: "address of the page, of `/metrics` and of the commands `status`, `plan`, `stop` and `resume`"},
		{Name: "token_file", Type: pathType, Usage: "file with the token that a request to stop or resume must present; without it they are refused"},
	}
}

var clusterKeys = []schema.Key{
	{Name: "name", Required: true, Type: nameType, Usage: "name in messages, in metrics and in the ledger"},
	{Name: "kind", Required: true, Type: schema.OneOf(kinds...), Usage: "what the cluster is"},
	{Name: "mode", Default: rescue.ModeReport.String(), Type: schema.OneOf(modes...),
		Usage: "`act`: work is moved; `report`: each act that would be made is listed, and none is made; `off`: nothing is decided for the cluster"},
	{Name: "kubeconfig", Type: pathType, Usage: "Kubernetes: file with address and credentials; without it the cluster in which gpu-fleet runs"},
	{Name: "context", Type: textType, Usage: "Kubernetes: context of the kubeconfig; without it the current one"},
	{Name: "controllers", Type: schema.ListOf(controllerType, 0),
		Usage: "Kubernetes: further kinds of owners that replace a pod that was evicted, on another node if need be"},
	{Name: "address", Type: addressType, Usage: "Nomad: address of the servers' HTTP API; required"},
	{Name: "region", Type: textType, Usage: "Nomad: region; without it that of the servers at the address"},
	{Name: "token_file", Type: pathType, Usage: "Nomad: file with the ACL token, which is read at each use"},
	{Name: "ca_file", Type: pathType, Usage: "Nomad: certificates of the authorities that sign the servers' certificates; without it those of the system"},
	{Name: "cert_file", Type: pathType, Usage: "Nomad: certificate of gpu-fleet, for servers that verify it"},
	{Name: "key_file", Type: pathType, Usage: "Nomad: key of that certificate"},
}

// The keys of one kind of cluster.
var (
	kubernetesKeys = []string{"kubeconfig", "context", "controllers"}
	nomadKeys      = []string{"address", "region", "token_file", "ca_file", "cert_file", "key_file"}
)

var clusterCases = []schema.Case{
	{Key: "kind", Values: []string{string(fleet.Kubernetes)}, Then: absent(nomadKeys)},
	{Key: "kind", Values: []string{string(fleet.Nomad)}, Then: append(absent(kubernetesKeys), schema.Key{Name: "address", Required: true, Type: addressType})},
}

func absent(names []string) (keys []schema.Key) {
	for _, name := range names {
		keys = append(keys, schema.Key{Name: name, Type: schema.Absent})
	}
	return keys
}

var ledgerKeys = []schema.Key{
	{Name: "cluster", Type: textType, Usage: "name of the cluster that has ledger and lock; without it `file` has the ledger, and no other process may run"},
	{Name: "namespace", Type: textType, Usage: "Kubernetes: namespace of ConfigMap and Lease, `gpu-fleet` by default; Nomad: namespace of the variables, `default` by default"},
	{Name: "name", Type: textType, Usage: "Kubernetes: name of ConfigMap and Lease, `gpu-fleet` by default; Nomad: path below which the variables are, `nomad/jobs/gpu-fleet` by default"},
	{Name: "file", Default: defaultFile, Type: pathType, Usage: "file with the ledger, if no cluster has it"},
}

// option is a setting of the policy.
type option struct {
	schema.Key
	set func(document.Value)
}

// policyOptions are the settings of a policy. Their limits are those of Policy.Check.
func policyOptions(p *rescue.Policy) []option {
	return []option{
		{schema.Key{Name: "ignore", Type: schema.ListOf(textType, 0), Usage: "causes that are no reason to move work, as the agents' `inspect` shows them: `[XID_48, NVLINK_DOWN]`"},
			func(v document.Value) { p.Ignore = causes(v) }},
		lasts("delay", &p.Delay, "for how long a fault must have lasted; in this time a fault of many nodes shows itself as such"),
		counts("max_gpus", &p.MaxGPUs, 1, 64, "GPUs of a node from which work is moved within an hour"),
		counts("max_nodes", &p.MaxNodes, 1, 1000, "nodes from which work is moved at a time; `max_percent` if that is more"),
		counts("max_percent", &p.MaxPercent, 0, 50, "the same, as a percentage of the nodes with GPUs of all clusters"),
		lasts("cool_down", &p.CoolDown, "for how long a node counts in `max_nodes` after its work was moved"),
		counts("attempts", &p.Attempts, 1, 10, "moves of the work of one GPU within a day"),
		counts("quorum_nodes", &p.QuorumNodes, 1, 1000, "nodes that may get a fault of one cause within `quorum_time`; one more stops all acts until `gpu-fleet resume`"),
		lasts("quorum_time", &p.QuorumTime, "see `quorum_nodes`"),
		lasts("deadline", &p.Deadline, "after which a move that the orchestrator does not let through is given up; 0 = never"),
		allows("preempt", &p.Preempt, "the orchestrator may end one workload of lower priority for a replacement"),
		allows("ineligible", &p.Ineligible, "Nomad: a node of which all GPUs need repair takes no new work"),
	}
}

func policyKeys() (keys []schema.Key) {
	p := rescue.Default()
	for _, o := range policyOptions(&p) {
		keys = append(keys, o.Key)
	}
	return keys
}

// lasts is a duration.
func lasts(name string, field *time.Duration, usage string) option {
	set := func(v document.Value) {
		text, ok := v.Scalar()
		if !ok {
			return
		}
		d, err := time.ParseDuration(text)
		if err != nil {
			v.Failf("want a time such as 30s or 10m")
			return
		}
		*field = d
	}
	return option{schema.Key{Name: name, Default: shortest(*field), Type: durationType, Usage: usage}, set}
}

// shortest is a duration as a person writes it: "1m" and not "1m0s".
func shortest(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// counts is a whole number.
func counts(name string, field *int, least, most int, usage string) option {
	set := func(v document.Value) {
		text, ok := v.Scalar()
		if !ok {
			return
		}
		n, err := strconv.Atoi(text)
		if err != nil {
			v.Failf("want a whole number")
			return
		}
		*field = n
	}
	return option{schema.Key{Name: name, Default: strconv.Itoa(*field), Type: schema.Int(least, most), Usage: usage}, set}
}

// allows is true or false.
func allows(name string, field *bool, usage string) option {
	set := func(v document.Value) { *field = v.Bool(*field) }
	return option{schema.Key{Name: name, Default: strconv.FormatBool(*field), Type: boolType, Usage: usage}, set}
}
