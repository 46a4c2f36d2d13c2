package kube

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// bigNode and bigPod are objects of the size that they have in clusters: with images, managed fields, environment.
func bigNode(i int) *corev1.Node {
	n := newTestCluster(nil, 8).nodes[0]
	n.Name = fmt.Sprintf("node-%04d", i)
	n.Labels[corev1.LabelHostname] = n.Name
	for k := range 20 {
		n.Labels[fmt.Sprintf("nvidia.com/label-%d", k)] = fmt.Sprintf("value-%d", k)
	}
	for k := range 50 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example/image-%d@sha256:%064d", k, i), fmt.Sprintf("registry.example/image-%d:1.0", k)}, SizeBytes: 1 << 30})
	}
	n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(strings.Repeat("x", 4000))}}
	return n
}

func bigPod(i int) *corev1.Pod {
	p := (&cluster{}).run(fmt.Sprintf("pod-%05d", i), fmt.Sprintf("node-%04d", i/8), fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i))
	p.UID = types.UID(fmt.Sprintf("%08d-1111-1111-1111-111111111111", i))
	p.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(strings.Repeat("x", 3000))}}
	c := &p.Spec.Containers[0]
	c.Image = "registry.example/image:1.0"
	c.Resources.Requests["memory"] = resource.MustParse("16Gi")
	for k := range 30 {
		c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", k), Value: fmt.Sprintf("value %d of pod %d", k, i)})
	}
	p.Spec.Tolerations = []corev1.Toleration{{Key: "node.kubernetes.io/not-ready", Operator: "Exists", Effect: "NoExecute", TolerationSeconds: new(int64(300))}}
	return p
}

// heap is the memory in use.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkObjects keeps 1,000 nodes and 8,000 pods with GPUs, and reports their memory; then it translates them.
func BenchmarkObjects(b *testing.B) {
	before := heap()
	c := newCluster(Options{Name: "east"}, nil, nil)
	for i := range 1000 {
		if err := c.tables.nodes.Add(bigNode(i)); err != nil {
			b.Fatal(err)
		}
	}
	for i := range 8000 {
		if err := c.tables.pods.Add(bigPod(i)); err != nil {
			b.Fatal(err)
		}
	}
	kept := heap() - before
	for _, followed := range []int{0, 8, 8000} {
		b.Run(fmt.Sprintf("followed=%d", followed), func(b *testing.B) {
			var shown rescue.Cluster
			for b.Loop() {
				o := c.tables.objects()
				o.followed, o.reports = map[string]bool{}, reports{}
				for _, p := range o.pods[:followed] {
					o.followed[p.uid] = true
				}
				o.reports.see(o.nodes, time.Now(), true)
				shown = translate(o, time.Now())
			}
			if len(shown.Nodes) != 1000 || len(shown.Work) != 8000 {
				b.Errorf("%d nodes, %d pods", len(shown.Nodes), len(shown.Work))
			}
			b.ReportMetric(float64(kept)/(1<<20), "MB-kept")
		})
	}
}
