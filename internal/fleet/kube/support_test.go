package kube

import (
	"fmt"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

var start = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

const gpuResource = "nvidia.com/gpu"

// kubernetes is a cluster of plain objects that tests change.
type cluster struct {
	*testing.T
	nodes   []*corev1.Node
	pods    []*corev1.Pod
	jobs    []*batchv1.Job
	claims  []*resourcev1.ResourceClaim
	slices  []*resourcev1.ResourceSlice
	classes []*resourcev1.DeviceClass
	reports reports

	volumeClaims []*corev1.PersistentVolumeClaim
	volumes      []*corev1.PersistentVolume
}

// newTestCluster has nodes "a", "b" and so on, with GPUs by a device plugin.
func newTestCluster(t *testing.T, gpus ...int) *cluster {
	c := &cluster{T: t, reports: reports{}}
	for i, n := range gpus {
		name := string(rune('a' + i))
		has := corev1.ResourceList{
			"cpu": resource.MustParse("64"), "memory": resource.MustParse("256Gi"), "pods": resource.MustParse("110"), gpuResource: *resource.NewQuantity(int64(n), resource.DecimalSI),
		}
		c.nodes = append(c.nodes, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, "zone": name}},
			Status: corev1.NodeStatus{
				Capacity: has, Allocatable: has.DeepCopy(), Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			},
		})
	}
	return c
}

func (c *cluster) node(name string) *corev1.Node {
	for _, n := range c.nodes {
		if n.Name == name {
			return n
		}
	}
	c.Fatalf("no node %s", name)
	return nil
}

func (c *cluster) allocatable(name string, n int64) {
	c.node(name).Status.Allocatable[gpuResource] = *resource.NewQuantity(n, resource.DecimalSI)
}

// run adds a pod of a ReplicaSet that runs on a node with GPUs.
func (c *cluster) run(name, node string, devices ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": name},
			OwnerReferences: []metav1.OwnerReference{ownedBy("apps/v1", "ReplicaSet", "rs")},
		},
		Spec: corev1.PodSpec{
			NodeName: node, TerminationGracePeriodSeconds: new(int64(10)),
			Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				"cpu": resource.MustParse("1"), gpuResource: *resource.NewQuantity(int64(max(len(devices), 1)), resource.DecimalSI),
			}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if len(devices) > 0 {
		show(p, devices...)
	}
	c.pods = append(c.pods, p)
	return p
}

func ownedBy(api, kind, name string) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: api, Kind: kind, Name: name, Controller: new(true)}
}

// show has the status of a pod show devices; one with a "!" is unhealthy.
func show(p *corev1.Pod, devices ...string) {
	status := corev1.ResourceStatus{Name: gpuResource}
	for _, d := range devices {
		h := corev1.ResourceHealthStatusHealthy
		if d[0] == '!' {
			d, h = d[1:], corev1.ResourceHealthStatusUnhealthy
		}
		status.Resources = append(status.Resources, corev1.ResourceHealth{ResourceID: corev1.ResourceID(d), Health: h})
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", AllocatedResourcesStatus: []corev1.ResourceStatus{status}}}
}

// report writes the annotation of a node.
func (c *cluster) report(node string, at time.Time, faults ...faultreport.Fault) {
	healthy, faulty := c.node(node).Status.Capacity[gpuResource], map[gpu.DeviceID]bool{}
	for _, f := range faults {
		faulty[f.GPU] = true
	}
	text, err := faultreport.Encode(faultreport.Report{
		At: at, Faults: faults, Devices: map[string]int{gpuResource: int(healthy.Value()) - len(faulty)},
	})
	if err != nil {
		c.Fatal(err)
	}
	c.node(node).Annotations = map[string]string{faultreport.Annotation: text}
}

func xid(id gpu.DeviceID, holders ...string) faultreport.Fault {
	return faultreport.Fault{
		GPU: id, State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Since: start.Add(-10 * time.Minute), Holders: holders, HoldersKnown: true,
	}
}

// objects are what is kept of the cluster.
func (c *cluster) objects(followed ...string) objects {
	o := objects{jobs: map[named]*job{}, claims: map[named]*claim{}, classes: map[named]*class{}, reports: c.reports, followed: map[string]bool{}}
	for _, one := range c.nodes {
		o.nodes = append(o.nodes, nodeOf(one))
	}
	for _, one := range c.pods {
		o.pods = append(o.pods, podOf(one))
	}
	for _, one := range c.jobs {
		o.jobs[named{one.Namespace, one.Name}] = jobOf(one)
	}
	for _, one := range c.claims {
		o.claims[named{one.Namespace, one.Name}] = claimOf(one)
	}
	for _, one := range c.classes {
		o.classes[named{name: one.Name}] = classOf(one)
	}
	o.volumeClaims, o.volumes = map[named]*volumeClaim{}, map[named]*volume{}
	for _, one := range c.volumeClaims {
		o.volumeClaims[named{one.Namespace, one.Name}] = volumeClaimOf(one)
	}
	for _, one := range c.volumes {
		o.volumes[named{name: one.Name}] = volumeOf(one)
	}
	for _, one := range c.slices {
		o.slices = append(o.slices, sliceOf(one))
	}
	for _, id := range followed {
		o.followed[id] = true
	}
	return o
}

// seen is the cluster as it is shown at a time, by a watch that is up to date.
func (c *cluster) seen(now time.Time, followed ...string) rescue.Cluster {
	o := c.objects(followed...)
	c.reports.see(o.nodes, now, true)
	if len(followed) == 0 {
		for _, p := range o.pods {
			o.followed[p.uid] = true
		}
	}
	shown := translate(o, now)
	shown.Name, shown.Mode, shown.ReadAt = "east", rescue.ModeAct, now
	return shown
}

// decide has the agents of all nodes renew their reports twice, and decides some time later.
func (c *cluster) decide() rescue.Result {
	state, policy := rescue.State{Ledger: rescue.NewLedger()}.Lead(), rescue.Default()
	policy.MaxGPUs = 8
	var r rescue.Result
	for i := range 5 {
		now := start.Add(time.Duration(i) * 40 * time.Second)
		for _, n := range c.nodes {
			if text, ok := n.Annotations[faultreport.Annotation]; ok {
				parsed, err := faultreport.Parse(text)
				if err != nil {
					continue
				}
				c.report(n.Name, now, parsed.Faults...)
			}
		}
		r = policy.Next(state, rescue.NewFleet(c.seen(now)), now)
		state = r.State
		if len(r.Acts) > 0 {
			return r
		}
	}
	return r
}

// outcome is the first thing that a result has about each pod, for comparisons.
func outcome(r rescue.Result) (all []string) {
	for _, a := range r.Acts {
		all = append(all, "act "+a.Name)
	}
	for _, w := range r.Waits {
		all = append(all, fmt.Sprintf("wait %s %s: %s", w.Name, w.Reason, w.Text))
	}
	for _, w := range r.Refusals {
		all = append(all, fmt.Sprintf("refuse %s %s", w.Name, w.Reason))
	}
	for _, f := range r.Free {
		all = append(all, "free "+string(f.GPU))
	}
	return all
}

// volume has a pod mount a volume.
func (c *cluster) volume(p *corev1.Pod, mode corev1.PersistentVolumeAccessMode, zones ...string) *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{mode}}}
	if len(zones) > 0 {
		v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: zones}},
		}}}}
	}
	c.volumeClaims, c.volumes = append(c.volumeClaims, claim), append(c.volumes, v)
	p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
	return claim
}
