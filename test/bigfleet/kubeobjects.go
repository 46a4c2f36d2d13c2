package bigfleet

import (
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
)

// newNode is a Node as a kubelet, GPU feature discovery and an agent write it: with labels, 50 images and managed fields.
func newNode(n int) *corev1.Node {
	report, err := faultreport.Encode(faultreport.Report{At: time.Now(), Faults: []faultreport.Fault{}, Devices: map[string]int{gpuResource: GPUs}})
	if err != nil {
		panic(err) // of constants
	}
	has := corev1.ResourceList{
		"cpu": resource.MustParse("192"), "memory": resource.MustParse("2Ti"), "ephemeral-storage": resource.MustParse("7Ti"), "pods": resource.MustParse("110"),
		gpuResource: *resource.NewQuantity(GPUs, resource.DecimalSI),
	}
	o := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: nodeName(n), UID: types.UID(nodeUUID(n)), Labels: map[string]string{corev1.LabelHostname: nodeName(n)},
			Annotations: map[string]string{faultreport.Annotation: report}, ManagedFields: fields(4000),
		},
		Status: corev1.NodeStatus{Capacity: has, Allocatable: has.DeepCopy()},
	}
	for i := range 60 {
		o.Labels[fmt.Sprintf("feature.node.kubernetes.io/cpu-feature-%d", i)] = "true"
	}
	for _, kind := range []corev1.NodeConditionType{"MemoryPressure", "DiskPressure", "PIDPressure", corev1.NodeReady} {
		status := corev1.ConditionFalse
		if kind == corev1.NodeReady {
			status = corev1.ConditionTrue
		}
		o.Status.Conditions = append(o.Status.Conditions, corev1.NodeCondition{
			Type: kind, Status: status, Reason: "Kubelet" + string(kind), Message: "kubelet has posted it", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
		})
	}
	for i := range 50 {
		o.Status.Images = append(o.Status.Images, corev1.ContainerImage{
			Names: []string{fmt.Sprintf("registry.example/team/image-%d@sha256:%064d", i, n), fmt.Sprintf("registry.example/team/image-%d:1.0", i)}, SizeBytes: 1 << 30,
		})
	}
	return o
}

func fields(n int) []metav1.ManagedFieldsEntry {
	return []metav1.ManagedFieldsEntry{{Manager: "kubelet", Operation: "Update", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(make([]byte, n)))}}
}

// newPod is a pod with one GPU: of a Job on each tenth node, else of a ReplicaSet.
func newPod(n, g int) *corev1.Pod {
	owner := metav1.OwnerReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: jobName(n), Controller: new(true)}
	if n%10 == 0 {
		owner.APIVersion, owner.Kind = "batch/v1", "Job"
	}
	amounts := corev1.ResourceList{
		"cpu": resource.MustParse("16"), "memory": resource.MustParse("128Gi"), gpuResource: *resource.NewQuantity(1, resource.DecimalSI),
	}
	c := corev1.Container{
		Name: "main", Image: "registry.example/team/image-1:1.0", Command: []string{"python", "-m", "train"}, Resources: corev1.ResourceRequirements{Requests: amounts, Limits: amounts},
		VolumeMounts: []corev1.VolumeMount{{Name: "token", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount", ReadOnly: true}},
	}
	for i := range 30 {
		c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", i), Value: fmt.Sprintf("value %d of %s", i, workName(n, g))})
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: workName(n, g), UID: types.UID(workID(n, g)), Labels: map[string]string{"app": jobName(n)},
			OwnerReferences: []metav1.OwnerReference{owner}, ManagedFields: fields(3000),
		},
		Spec: corev1.PodSpec{
			NodeName: nodeName(n), Containers: []corev1.Container{c}, TerminationGracePeriodSeconds: new(int64(30)), SchedulerName: corev1.DefaultSchedulerName,
			Volumes:     []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}}},
			Tolerations: []corev1.Toleration{{Key: "node.kubernetes.io/not-ready", Operator: "Exists", Effect: "NoExecute", TolerationSeconds: new(int64(300))}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, HostIP: "10.0.0.1", PodIP: "10.1.0.1", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{
				Name: "main", Ready: true, Image: c.Image, ImageID: fmt.Sprintf("registry.example/team/image-1@sha256:%064d", n), ContainerID: fmt.Sprintf("containerd://%064d", n),
				AllocatedResourcesStatus: []corev1.ResourceStatus{{
					Name: gpuResource, Resources: []corev1.ResourceHealth{{ResourceID: corev1.ResourceID(gpuID(n, g)), Health: corev1.ResourceHealthStatusHealthy}},
				}},
			}},
		},
	}
}

// newJob is the Job of the pods of a node, which does not count evictions as failures.
func newJob(n int) *batchv1.Job {
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: jobName(n), ManagedFields: fields(2000)},
		Spec: batchv1.JobSpec{
			Parallelism: new(int32(GPUs)), Template: corev1.PodTemplateSpec{Spec: newPod(n, 0).Spec},
			PodFailurePolicy: &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{{
				Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}},
			}}},
		},
	}
}
