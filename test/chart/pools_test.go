package chart

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// A node has the plugin of the first pool whose selector it matches, or that of no pool, and never two. Which pods Kubernetes
// would place is the scheduler's own code.
func TestEachNodeIsInOnePool(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	keys, words := []string{"a", "b", "c"}, []string{"1", "2"}
	for range 30 {
		var pools []any
		var selectors []map[string]string
		for i := range 1 + random.IntN(8) {
			selector, given := map[string]string{}, values{}
			for len(selector) == 0 || random.IntN(2) == 0 && len(selector) < 3 {
				key, word := keys[random.IntN(3)], words[random.IntN(2)]
				selector[key], given[key] = word, word
			}
			pools = append(pools, values{"name": fmt.Sprintf("p%d", i), "nodeSelector": given})
			selectors = append(selectors, selector)
		}
		given := values{"pools": pools}
		if random.IntN(2) == 0 { // an affinity of the user's applies to all of them
			given["affinity"] = parse(t, `{nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
				{matchExpressions: [{key: a, operator: Exists}]}, {matchFields: [{key: metadata.name, operator: In, values: [node]}]}]}}}`)
		}
		sets := daemonSets(t, objects(t, given))
		for n := range 27 {
			labels := map[string]string{}
			for i, digit := range []int{n % 3, n / 3 % 3, n / 9} {
				if digit > 0 {
					labels[keys[i]] = words[digit-1]
				}
			}
			want := "tandem-k8s-gpu"
			if i := slices.IndexFunc(selectors, func(s map[string]string) bool { return contains(labels, s) }); i >= 0 {
				want = fmt.Sprintf("tandem-k8s-gpu-p%d", i)
			}
			if got := placed(t, sets, labels); len(got) != 1 || got[0] != want {
				t.Fatalf("node %v has %q, want %s: %v", labels, got, want, pools)
			}
		}
	}
}

// The size of the objects grows with the number of pools, and not with that of all combinations of their labels: etcd refuses an object of 1.5
// MB, and Helm a release that is not much larger.
func TestManyPoolsAreSmall(t *testing.T) {
	for name, selector := range map[string]func(i int) values{
		"two labels, one of them equal": func(i int) values { return values{"a": fmt.Sprint(i), "b": "x"} },
		"two labels with many values":   func(i int) values { return values{"a": fmt.Sprint(i), "b": fmt.Sprint(i % 5)} },
		"three labels":                  func(i int) values { return values{"a": fmt.Sprint(i % 4), "b": fmt.Sprint(i % 3), "c": fmt.Sprint(i)} },
		"a label of its own, and one":   func(i int) values { return values{fmt.Sprint("key", i): "x", "b": "x"} },
	} {
		size := func(n int) (bytes int) {
			var pools []any
			for i := range n {
				pools = append(pools, values{"name": fmt.Sprint("p", i), "nodeSelector": selector(i)})
			}
			files, err := render(t, values{"pools": pools})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			return len(files["tandem-k8s-gpu/templates/daemonset.yaml"]) / (n + 1)
		}
		if six, twelve := size(6), size(12); twelve > 2*six || twelve > 20_000 {
			t.Errorf("%s: %d bytes a pool of 6, %d of 12", name, six, twelve)
		}
	}
}

func contains(labels, selector map[string]string) bool {
	for key, value := range selector {
		if labels[key] != value {
			return false
		}
	}
	return true
}

// placed returns the names of the DaemonSets that have a pod on a node with these labels.
func placed(t *testing.T, sets []appsv1.DaemonSet, labels map[string]string) []string {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: labels}}
	var names []string
	for _, d := range sets {
		pod := &corev1.Pod{Spec: d.Spec.Template.Spec}
		if fits, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node); err != nil {
			t.Fatal(err)
		} else if fits {
			names = append(names, d.Name)
		}
	}
	return names
}

// A node without a GPU has no pod with gpuNodesOnly, and so no token of the account, beside pools and an affinity of the user's.
func TestNodesWithoutAGPU(t *testing.T) {
	for about, given := range map[string]string{
		"alone":       `{gpuNodesOnly: true, api: dra}`,
		"pools":       `{gpuNodesOnly: true, pools: [{name: a, nodeSelector: {a: "1"}, api: dra}]}`,
		"an affinity": `{gpuNodesOnly: true, api: dra, affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: b, operator: DoesNotExist}]}]}}}}`,
	} {
		sets := daemonSets(t, objects(t, parse(t, given)))
		for _, labels := range []map[string]string{{}, {"a": "1"}, {"nvidia.com/gpu.present": "false"}, {"feature.node.kubernetes.io/pci-8086.present": "true"}} {
			if got := placed(t, sets, labels); len(got) > 0 {
				t.Errorf("%s: a node with %v has %q", about, labels, got)
			}
		}
		for _, label := range []string{"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present", "feature.node.kubernetes.io/pci-0302_10de.present", "feature.node.kubernetes.io/pci-0300_10de.present"} {
			for _, a := range []string{"0", "1"} {
				if got := placed(t, sets, map[string]string{label: "true", "a": a}); len(got) != 1 {
					t.Errorf("%s: a node with %s and a=%s has %q", about, label, a, got)
				}
			}
		}
	}
}

// The configurations of a values file of NVIDIA's chart are chosen by the agent of each node, by the label and the rules of its config-manager.
// One DaemonSet has what any of them needs, and the right to read the label.
func TestConfigurationsByLabel(t *testing.T) {
	all := objects(t, read(t, "testdata/values/nvidia.yaml"))
	sets, ofMPS := bothDaemonSets(t, all)
	configs := map[string]map[string]string{}
	var rules []rbacv1.PolicyRule
	for _, o := range all {
		switch o["kind"] {
		case "ConfigMap":
			c := strict[corev1.ConfigMap](t, o)
			configs[c.Name] = c.Data
		case "ClusterRole":
			rules = strict[rbacv1.ClusterRole](t, o).Rules
		case "DaemonSet", "ClusterRoleBinding", "ServiceAccount":
		default:
			t.Errorf("there is a %s", o["kind"])
		}
	}
	if len(sets) != 1 || len(ofMPS) != 1 || len(rules) != 1 || !slices.Equal(rules[0].Verbs, []string{"get", "watch"}) || !slices.Equal(rules[0].Resources, []string{"nodes"}) {
		t.Fatalf("%d DaemonSets of agents, %d of MPS daemons, rules %v", len(sets), len(ofMPS), rules)
	}
	pod := sets[0].Spec.Template.Spec
	v := pod.Volumes[slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "configs" })]
	given := read(t, "testdata/values/nvidia.yaml")["config"].(values)["map"].(values)
	if got := configs[v.ConfigMap.Name]; len(got) != len(given) || got["shared.mps"] != given["shared.mps"] {
		t.Errorf("the configurations are %v", got)
	}
	env := environment(pod)
	if env["CONFIG_FILE_SRCDIR"] != "/etc/tandem/configs" || env["DEFAULT_CONFIG"] != "default" || env["FALLBACK_STRATEGIES"] != "named,single" || env["CONFIG_FILE"] != "" {
		t.Errorf("the environment is %v", env)
	}
	mps := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "mps-root" })
	if !slices.Contains(pod.Containers[0].SecurityContext.Capabilities.Add, "SYS_ADMIN") || !mps || !*pod.AutomountServiceAccountToken {
		t.Error("the pod lacks what one of the configurations needs")
	}
	if got := placed(t, sets, nil); len(got) > 0 {
		t.Errorf("a node that the affinity excludes has %q", got)
	}
}

func environment(pod corev1.PodSpec) map[string]string {
	env := map[string]string{}
	for _, e := range pod.Containers[0].Env {
		env[e.Name] = e.Value
		if e.ValueFrom != nil {
			env[e.Name] = e.ValueFrom.FieldRef.FieldPath
		}
	}
	return env
}

// The API server is called only for what needs it: rights, token and environment of each value.
func TestAccess(t *testing.T) {
	const label = "nvidia.com/gpu.deploy.client"
	for text, want := range map[string]struct {
		kinds string // of the objects beside the DaemonSet
		env   map[string]string
	}{
		`config: {map: {default: {version: v1}}}`:                                                       {"ConfigMap", map[string]string{"CONFIG_FILE": "/etc/tandem/policy.yaml"}},
		`config: {map: {a: {version: v1}}, fallbackStrategies: [empty]}`:                                {"ClusterRole ClusterRoleBinding ConfigMap ServiceAccount", map[string]string{"FALLBACK_STRATEGIES": "empty"}},
		`config: {name: own}`:                                                                           {"ClusterRole ClusterRoleBinding ServiceAccount", map[string]string{"CONFIG_FILE_SRCDIR": "/etc/tandem/configs"}},
		`config: {map: {a: {api: dra}, default: {version: v1}}}`:                                        {"", map[string]string{"API": "", "CONFIG_FILE_SRCDIR": "/etc/tandem/configs"}},
		`nfd: {enabled: false}`:                                                                         {"", nil}, // as some give it to NVIDIA's chart
		`gfd: {enabled: false}`:                                                                         {"", map[string]string{"FEATURES_FILE": "", "USE_NODE_FEATURE_API": ""}},
		`gfd: {enabled: true, noTimestamp: true}`:                                                       {"Role RoleBinding ServiceAccount", map[string]string{"FEATURES_FILE": "", "USE_NODE_FEATURE_API": "true", "NAMESPACE": "metadata.namespace", "POD_NAME": "metadata.name", "GFD_NO_TIMESTAMP": "true"}},
		`{gfd: {enabled: true}, noTimestamp: true, sleepInterval: 30s}`:                                 {"Role RoleBinding ServiceAccount", map[string]string{"USE_NODE_FEATURE_API": "true", "GFD_NO_TIMESTAMP": "true", "GFD_SLEEP_INTERVAL": ""}},
		`{noTimestamp: true, sleepInterval: 30}`:                                                        {"", map[string]string{"USE_NODE_FEATURE_API": "", "GFD_NO_TIMESTAMP": ""}},
		`{gfd: {enabled: true}, nodeLabels: {nodeFeatureAPI: false}}`:                                   {"", map[string]string{"USE_NODE_FEATURE_API": "", "FEATURES_FILE": "/etc/kubernetes/node-feature-discovery/features.d/gfd"}},
		`nodeLabels: {enabled: true, noTimestamp: true}`:                                                {"", map[string]string{"USE_NODE_FEATURE_API": "", "GFD_NO_TIMESTAMP": "true"}},
		`nodeLabels: {enabled: true, nodeFeatureAPI: true}`:                                             {"Role RoleBinding ServiceAccount", map[string]string{"USE_NODE_FEATURE_API": "true", "GFD_NO_TIMESTAMP": ""}},
		`gpuOperator: {onDriverUpgrade: quiesce}`:                                                       {"ClusterRole ClusterRoleBinding ServiceAccount", map[string]string{"PAUSE_LABEL": label}},
		`gpuOperator: {onDriverUpgrade: evict}`:                                                         {"", map[string]string{"PAUSE_LABEL": "", label: "true"}},
		`{pools: [{name: a, nodeSelector: {a: b}, nodeLabels: {enabled: true, nodeFeatureAPI: true}}]}`: {"Role RoleBinding ServiceAccount", nil},
	} {
		all := objects(t, parse(t, text))
		var kinds []string
		for _, o := range all {
			if kind := o["kind"].(string); kind != "DaemonSet" {
				kinds = append(kinds, kind)
			}
		}
		slices.Sort(kinds)
		pod := daemonSets(t, all)[0].Spec.Template.Spec
		needsToken := strings.Contains(want.kinds, "Role") || strings.Contains(text, "api: dra")
		if got := strings.Join(kinds, " "); got != want.kinds && !strings.Contains(text, "api: dra") || *pod.AutomountServiceAccountToken != needsToken {
			t.Errorf("%s: objects %s, a token %t", text, got, *pod.AutomountServiceAccountToken)
		}
		env := environment(pod)
		env[label] = pod.NodeSelector[label]
		for name, value := range want.env {
			if env[name] != value {
				t.Errorf("%s: %s is %q, want %q", text, name, env[name], value)
			}
		}
	}
}
