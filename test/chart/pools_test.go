package chart

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
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

// The configurations of a values file of NVIDIA's chart reach the nodes with the label that its config-manager reads, with no object
// that needs the API server.
func TestConfigurationsByLabel(t *testing.T) {
	all := objects(t, read(t, "testdata/values/nvidia.yaml"))
	sets := daemonSets(t, all)
	configs := map[string]string{}
	for _, o := range all {
		switch o["kind"] {
		case "ConfigMap":
			c := strict[corev1.ConfigMap](t, o)
			configs[c.Name] = c.Data["policy.yaml"]
		case "DaemonSet":
		default:
			t.Errorf("there is a %s", o["kind"])
		}
	}
	given := read(t, "testdata/values/nvidia.yaml")["config"].(values)["map"].(values)
	for label, want := range map[string]string{"": "default", "default": "default", "unknown": "default", "A100-MIG": "A100-MIG", "shared.mps": "shared.mps"} {
		labels := map[string]string{"nvidia.com/gpu.present": "true"}
		if label != "" {
			labels["nvidia.com/device-plugin.config"] = label
		}
		names := placed(t, sets, labels)
		if len(names) != 1 {
			t.Fatalf("label %q: %q", label, names)
		}
		i := slices.IndexFunc(sets, func(d appsv1.DaemonSet) bool { return d.Name == names[0] })
		pod := sets[i].Spec.Template.Spec
		v := pod.Volumes[slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "policy" })]
		if configs[v.ConfigMap.Name] != given[want] {
			t.Errorf("label %q has the configuration %q", label, configs[v.ConfigMap.Name])
		}
		added := pod.Containers[0].SecurityContext.Capabilities.Add
		mps := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "mps-root" })
		if slices.Contains(added, "SYS_ADMIN") != (want == "A100-MIG") || mps != (want == "shared.mps") {
			t.Errorf("label %q: capabilities %v, MPS %t", label, added, mps)
		}
	}
	if got := placed(t, sets, nil); len(got) > 0 {
		t.Errorf("a node that the affinity excludes has %q", got)
	}
}
