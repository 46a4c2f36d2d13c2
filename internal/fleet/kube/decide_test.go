package kube

import (
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// faulty is a pod "p" with a faulty GPU on node a, which is seen everywhere.
func faulty(c *cluster) *corev1.Pod {
	c.allocatable("a", 1)
	p := c.run("p", "a", "!GPU-1")
	c.report("a", start, xid("GPU-1", "uid-p"))
	return p
}

var ignore = &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{{
	Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}},
}}}

func ofJob(c *cluster, p *corev1.Pod, policy *batchv1.PodFailurePolicy) {
	p.OwnerReferences = []metav1.OwnerReference{ownedBy("batch/v1", "Job", "j")}
	c.jobs = append(c.jobs, &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "j"}, Spec: batchv1.JobSpec{PodFailurePolicy: policy}})
}

// What is decided on the objects of a cluster with two nodes of two GPUs. What is wanted begins the outcome about the pod, or is a part of it.
func TestDecision(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(c *cluster, p *corev1.Pod)
		want   string
	}{
		"a service moves":    {func(*cluster, *corev1.Pod) {}, "act default/p"},
		"only its pod moves": {func(c *cluster, _ *corev1.Pod) { c.run("q", "a", "GPU-2") }, "act default/p"},
		"on its own node":    {func(c *cluster, _ *corev1.Pod) { c.run("q", "b", "GPU-3"); c.run("r", "b", "GPU-4") }, "act default/p"},
		"no place": {func(c *cluster, _ *corev1.Pod) {
			c.run("q", "b", "GPU-3")
			c.run("r", "b", "GPU-4")
			c.run("s", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"a place of a pod that ends is none": {func(c *cluster, _ *corev1.Pod) {
			c.run("q", "b", "GPU-3")
			c.run("r", "b", "GPU-4").DeletionTimestamp = &metav1.Time{Time: start}
			c.run("s", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"a place of a pod that has ended": {func(c *cluster, _ *corev1.Pod) {
			c.run("q", "b", "GPU-3")
			c.run("r", "b", "GPU-4").Status.Phase = corev1.PodSucceeded
			c.run("s", "a", "GPU-2")
		}, "act default/p"},
		"bare pod": {func(_ *cluster, p *corev1.Pod) { p.OwnerReferences = nil }, "refuse default/p NOT_REPLACED"},
		"unknown controller": {func(_ *cluster, p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{ownedBy("kubeflow.org/v1", "PyTorchJob", "x")}
		}, "refuse default/p NOT_REPLACED"},
		"DaemonSet": {func(_ *cluster, p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{ownedBy("apps/v1", "DaemonSet", "x")}
		}, "refuse default/p NOT_REPLACED"},
		"mirror pod": {func(_ *cluster, p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		}, "refuse default/p NOT_REPLACED"},
		"Job without a policy":  {func(c *cluster, p *corev1.Pod) { ofJob(c, p, nil) }, "refuse default/p LOSES_ATTEMPT"},
		"Job with the policy":   {func(c *cluster, p *corev1.Pod) { ofJob(c, p, ignore) }, "act default/p"},
		"Job that is not there": {func(c *cluster, p *corev1.Pod) { ofJob(c, p, ignore); c.jobs = nil }, "refuse default/p LOSES_ATTEMPT"},
		"shown as healthy":      {func(_ *cluster, p *corev1.Pod) { show(p, "GPU-1") }, "wait default/p DEVICE_NOT_SHOWN"},
		"health is not shown":   {func(_ *cluster, p *corev1.Pod) { p.Status.ContainerStatuses = nil }, "act default/p"},
		"the agent names another pod": {func(c *cluster, _ *corev1.Pod) {
			c.run("q", "a", "GPU-2")
			c.report("a", start, xid("GPU-1", "uid-q"))
		}, "HOLDERS_UNKNOWN"},
		"the agent names a pod that is not shown": {func(c *cluster, _ *corev1.Pod) {
			c.report("a", start, xid("GPU-1", "uid-p", "uid-z"))
		}, "or a right is missing"},
		"the agent does not know the holders": {func(c *cluster, _ *corev1.Pod) {
			f := xid("GPU-1")
			f.HoldersKnown = false
			c.report("a", start, f)
		}, "HOLDERS_UNKNOWN"},
		"annotation that can't be read": {func(c *cluster, _ *corev1.Pod) {
			c.node("a").Annotations[faultreport.Annotation] = "{"
		}, ""},
		"annotation of another node that can't be read": {func(c *cluster, _ *corev1.Pod) {
			c.node("b").Annotations = map[string]string{faultreport.Annotation: `{"v":9}`}
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"place that a fault has taken, which the server still counts": {func(c *cluster, _ *corev1.Pod) {
			c.report("b", start, xid("GPU-3"))
			c.run("r", "b", "GPU-4")
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"place on a node that is cordoned": {func(c *cluster, _ *corev1.Pod) {
			c.node("b").Spec.Unschedulable = true
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"taint": {func(c *cluster, _ *corev1.Pod) {
			c.node("b").Spec.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: corev1.TaintEffectNoSchedule}}
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"taint that is tolerated": {func(c *cluster, p *corev1.Pod) {
			c.node("b").Spec.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: corev1.TaintEffectNoSchedule}}
			p.Spec.Tolerations = []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}
			c.run("q", "a", "GPU-2")
		}, "act default/p"},
		"node selector": {func(c *cluster, p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"zone": "a"}
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"required affinity": {func(c *cluster, p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"b"}}}}},
			}}}
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"no CPU elsewhere": {func(c *cluster, p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse("33")
			big := c.run("big", "b", "GPU-3")
			big.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse("32")
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"anti-affinity": {func(_ *cluster, p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "x"}}}}
		}, "it has required pod anti-affinity"},
		"shared volume": {func(c *cluster, p *corev1.Pod) { c.volume(p, corev1.ReadWriteMany) }, "act default/p"},
		"shared volume that is not on the other node": {func(c *cluster, p *corev1.Pod) {
			c.volume(p, corev1.ReadWriteMany, "a")
			c.run("q", "a", "GPU-2")
		}, "wait default/p NO_PLACE"},
		"volume of one node":         {func(c *cluster, p *corev1.Pod) { c.volume(p, corev1.ReadWriteOnce) }, "which one node mounts at a time"},
		"volume that is not bound":   {func(c *cluster, p *corev1.Pod) { c.volume(p, corev1.ReadWriteMany).Status.Phase = corev1.ClaimPending }, "of which the volume is not known"},
		"volumes that are not shown": {func(c *cluster, p *corev1.Pod) { c.volume(p, corev1.ReadWriteMany); c.volumes = nil }, "of which the volume is not known"},
		"priority": {func(c *cluster, p *corev1.Pod) {
			p.Spec.Priority = new(int32(100))
			c.run("q", "b", "GPU-3")
		}, "refuse default/p PREEMPTS"},
		"priority that preempts nothing": {func(c *cluster, p *corev1.Pod) {
			p.Spec.Priority, p.Spec.PreemptionPolicy = new(int32(100)), new(corev1.PreemptNever)
			c.run("q", "b", "GPU-3")
		}, "act default/p"},
		"node that is not ready": {func(c *cluster, _ *corev1.Pod) {
			c.node("a").Status.Conditions[0].Status = corev1.ConditionUnknown
		}, "NODE_NOT_READY"},
		"node that is emptied": {func(c *cluster, _ *corev1.Pod) {
			c.node("a").Spec.Taints = []corev1.Taint{{Key: "karpenter.sh/disrupted", Effect: corev1.TaintEffectNoSchedule}}
		}, "NODE_NOT_READY"},
		"pod that ends":  {func(_ *cluster, p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: start} }, "WORK_NOT_RUNNING"},
		"pod that waits": {func(_ *cluster, p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, "WORK_NOT_RUNNING"},
		"share of a GPU": {func(_ *cluster, p *corev1.Pod) { show(p, "!GPU-1::3") }, "act default/p"},
		"MIG instance": {func(c *cluster, p *corev1.Pod) {
			show(p, "!MIG-7")
			f := xid("GPU-1", "uid-p")
			f.GI = new(uint32(3))
			c.report("a", start, f)
		}, "act default/p"},
		"another MIG instance": {func(c *cluster, p *corev1.Pod) {
			show(p, "MIG-7", "MIG-8")
			f := xid("GPU-1", "uid-p")
			f.GI = new(uint32(3))
			c.report("a", start, f)
		}, "HOLDERS_UNKNOWN"},
		"a fault that is reported only": {func(c *cluster, _ *corev1.Pod) {
			f := xid("GPU-1", "uid-p")
			f.Advisory = true
			c.report("a", start, f)
		}, "FAULT_DOES_NOT_COUNT"},
		"GPU that no work has": {func(c *cluster, _ *corev1.Pod) {
			c.pods = nil
			f := xid("GPU-1")
			f.State, f.Repair = health.GPULost, health.Reboot
			c.report("a", start, f)
		}, "free GPU-1"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newTestCluster(t, 2, 2)
			tc.change(c, faulty(c))
			got := outcome(c.decide())
			if tc.want == "" && len(got) > 0 {
				t.Errorf("%q, want nothing", got)
			}
			if !strings.Contains(strings.Join(got, "\n"), tc.want) || len(got) > 1 && strings.HasPrefix(tc.want, "act") {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
