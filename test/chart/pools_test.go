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
		for i := range 1 + random.IntN(4) {
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
		if (len(added) > 0) != (want == "A100-MIG") || mps != (want == "shared.mps") {
			t.Errorf("label %q: capabilities %v, MPS %t", label, added, mps)
		}
	}
	if got := placed(t, sets, nil); len(got) > 0 {
		t.Errorf("a node that the affinity excludes has %q", got)
	}
}
