package kube

import (
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	helpers "k8s.io/component-helpers/resource"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// What is kept of the cluster's objects: a tenth of them, for a cluster has many pods. Each of them is immutable.

// domain is that of the extended resources of GPUs, as the agents and NVIDIA's device plugin name them.
const domain = "nvidia.com/"

// named is a kept object: with the name that a reflector knows it by.
type named struct{ namespace, name string }

// GetObjectMeta is for a reflector, which looks up the name.
func (n *named) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: n.namespace, Name: n.name}
}

func (n *named) key() named { return *n }

// amounts are resources that a pod requests, or that a node has.
type amounts struct {
	cpu, memory, storage int64 // millicores, bytes, bytes
	other                map[string]int64
	gpus                 map[string]int // by their resource
}

func amountsOf(list corev1.ResourceList) (a amounts) {
	for name, q := range list {
		switch name {
		case corev1.ResourceCPU:
			a.cpu = q.MilliValue()
		case corev1.ResourceMemory:
			a.memory = q.Value()
		case corev1.ResourceEphemeralStorage:
			a.storage = q.Value()
		default:
			a.set(string(name), q.Value())
		}
	}
	return a
}

func (a *amounts) set(name string, n int64) {
	if strings.HasPrefix(name, domain) {
		if a.gpus == nil {
			a.gpus = map[string]int{}
		}
		a.gpus[name] = int(n)
		return
	}
	if a.other == nil {
		a.other = map[string]int64{}
	}
	a.other[name] = n
}

// some reports whether there are GPUs of any resource.
func (a *amounts) some() bool {
	for _, n := range a.gpus {
		if n > 0 {
			return true
		}
	}
	return false
}

type node struct {
	named
	labels      map[string]string
	taints      []corev1.Taint
	cordoned    bool
	ready       bool
	leaving     bool // it is being deleted, or an autoscaler has begun to empty it
	allocatable amounts
	offers      bool // GPUs, by a device plugin: also if none of them is healthy
	report      string
}

// leavingTaints are those of a node that is being emptied.
var leavingTaints = map[string]bool{
	"ToBeDeletedByClusterAutoscaler": true, "karpenter.sh/disrupted": true, corev1.TaintNodeOutOfService: true,
}

func nodeOf(o *corev1.Node) *node {
	n := &node{
		named: named{name: o.Name}, labels: o.Labels, taints: o.Spec.Taints, cordoned: o.Spec.Unschedulable, leaving: o.DeletionTimestamp != nil,
		allocatable: amountsOf(o.Status.Allocatable), report: o.Annotations[faultreport.Annotation],
	}
	for _, t := range o.Spec.Taints {
		n.leaving = n.leaving || leavingTaints[t.Key]
	}
	for _, c := range o.Status.Conditions {
		n.ready = n.ready || c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}
	capacity := amountsOf(o.Status.Capacity)
	n.offers = capacity.some()
	return n
}

type pod struct {
	named
	uid      string
	node     string
	phase    corev1.PodPhase
	deleting bool
	static   bool
	owner    owner
	priority int32
	preempts bool // if its priority is higher than that of others
	ends     time.Duration
	requests amounts

	// Of a pod with GPUs:
	devices []rescue.Hold // as its status shows them
	claims  []podClaim
	places  *places
}

// owner is the controller of a pod. The kind is of the form "Job.batch".
type owner struct{ kind, name string }

// podClaim is a resource claim of a pod.
type podClaim struct {
	name string
	own  bool // it is made for this pod, and ends with it

	// resources are the extended resources that the requests of the claim are for: request -> resource.
	resources map[string]string
}

func (p *pod) withGPU() bool { return p.places != nil }

func (p *pod) ended() bool { return p.phase == corev1.PodSucceeded || p.phase == corev1.PodFailed }

func podOf(o *corev1.Pod) *pod {
	p := &pod{
		named: named{o.Namespace, o.Name}, uid: string(o.UID), node: o.Spec.NodeName, phase: o.Status.Phase, deleting: o.DeletionTimestamp != nil,
		owner: ownerOf(o), preempts: o.Spec.PreemptionPolicy == nil || *o.Spec.PreemptionPolicy != corev1.PreemptNever, ends: 30 * time.Second,
		requests: amountsOf(helpers.PodRequests(o, helpers.PodResourcesOptions{})),
	}
	_, p.static = o.Annotations[corev1.MirrorPodAnnotationKey]
	if o.Spec.Priority != nil {
		p.priority = *o.Spec.Priority
	}
	if s := o.Spec.TerminationGracePeriodSeconds; s != nil {
		p.ends = time.Duration(*s) * time.Second
	}
	p.claims = claimsOf(o)
	if len(p.claims) > 0 || p.requests.some() {
		p.devices = shownDevices(o)
		p.places = placesOf(o)
	}
	return p
}

func ownerOf(o *corev1.Pod) owner {
	ref := metav1.GetControllerOf(o)
	if ref == nil {
		return owner{}
	}
	kind := ref.Kind
	if group, _, ok := strings.Cut(ref.APIVersion, "/"); ok {
		kind += "." + group
	}
	return owner{kind, ref.Name}
}

func claimsOf(o *corev1.Pod) (all []podClaim) {
	names := map[string]string{}
	for _, s := range o.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil {
			names[s.Name] = *s.ResourceClaimName
		}
	}
	for _, c := range o.Spec.ResourceClaims {
		switch {
		case c.ResourceClaimName != nil:
			all = append(all, podClaim{name: *c.ResourceClaimName})
		case names[c.Name] != "": // else it is not made yet, or not needed
			all = append(all, podClaim{name: names[c.Name], own: c.ResourceClaimTemplateName != nil})
		}
	}
	if s := o.Status.ExtendedResourceClaimStatus; s != nil {
		c := podClaim{name: s.ResourceClaimName, own: true, resources: map[string]string{}}
		for _, m := range s.RequestMappings {
			c.resources[m.RequestName] = m.ResourceName
		}
		all = append(all, c)
	}
	return all
}

// shownDevices are the GPUs and instances that the status of a pod shows: of device plugins, from Kubernetes 1.36 on.
func shownDevices(o *corev1.Pod) []rescue.Hold {
	d := statusDevices{seen: map[corev1.ResourceID]bool{}, at: map[gpu.DeviceID]int{}}
	for _, list := range [][]corev1.ContainerStatus{o.Status.InitContainerStatuses, o.Status.ContainerStatuses} {
		for i := range list {
			for _, s := range list[i].AllocatedResourcesStatus {
				for _, r := range s.Resources {
					d.add(r)
				}
			}
		}
	}
	return d.holds
}

type statusDevices struct {
	holds []rescue.Hold
	seen  map[corev1.ResourceID]bool // an init container may have the devices of another container
	at    map[gpu.DeviceID]int       // in holds
}

func (d *statusDevices) add(r corev1.ResourceHealth) {
	text, _, _ := strings.Cut(string(r.ResourceID), "::") // a unit of a shared device
	if !strings.HasPrefix(text, "GPU-") && !strings.HasPrefix(text, "MIG-") {
		return
	}
	id := gpu.DeviceID(text)
	i, ok := d.at[id]
	if !ok {
		i = len(d.holds)
		d.at[id] = i
		d.holds = append(d.holds, rescue.Hold{Device: id})
	}
	if !d.seen[r.ResourceID] {
		d.holds[i].Units++
	}
	d.seen[r.ResourceID] = true
	d.holds[i].Shown = max(d.holds[i].Shown, shown(r.Health))
}

// shown is a health of a pod's status. Of two containers that show one device differently, the worse counts.
func shown(h corev1.ResourceHealthStatus) rescue.Shown {
	switch h {
	case corev1.ResourceHealthStatusUnhealthy:
		return rescue.ShownUnhealthy
	case corev1.ResourceHealthStatusHealthy:
		return rescue.ShownHealthy
	case corev1.ResourceHealthStatusUnknown:
	}
	return rescue.NotShown
}

type job struct {
	named
	loses bool // an attempt, if a pod is evicted
}

func jobOf(o *batchv1.Job) *job {
	return &job{named: named{o.Namespace, o.Name}, loses: !ignoresDisruption(o.Spec.PodFailurePolicy)}
}

// ignoresDisruption reports whether a pod that is evicted counts as no failure. The first rule that matches the pod holds, so one of another kind before
// it may be that.
func ignoresDisruption(p *batchv1.PodFailurePolicy) bool {
	if p == nil {
		return false
	}
	for _, r := range p.Rules {
		if r.OnExitCodes != nil {
			return false
		}
		for _, c := range r.OnPodConditions {
			if c.Type == corev1.DisruptionTarget && (c.Status == "" || c.Status == corev1.ConditionTrue) {
				return r.Action == batchv1.PodFailurePolicyActionIgnore
			}
		}
	}
	return false
}

// slice is a ResourceSlice of one node.
type slice struct {
	named
	node, driver, pool string
	generation, count  int64 // of the pool, and how many slices it has then
	devices            []sliceDevice
}

type sliceDevice struct {
	name    string
	values  map[string]string // attributes that are text, by name with domain
	tainted bool              // it takes no new work
	simple  bool              // one claim takes all of it, and nothing of other devices
}

func sliceOf(o *resourcev1.ResourceSlice) *slice {
	s := &slice{named: named{name: o.Name}, driver: o.Spec.Driver, pool: o.Spec.Pool.Name, generation: o.Spec.Pool.Generation, count: o.Spec.Pool.ResourceSliceCount}
	if o.Spec.NodeName == nil || !strings.HasSuffix(s.driver, strings.TrimSuffix(domain, "/")) {
		return s // of no node, or of other devices
	}
	s.node = *o.Spec.NodeName
	for i := range o.Spec.Devices {
		d := &o.Spec.Devices[i]
		one := sliceDevice{name: d.Name, values: map[string]string{}, simple: len(d.ConsumesCounters) == 0 && (d.AllowMultipleAllocations == nil || !*d.AllowMultipleAllocations)}
		for _, t := range d.Taints {
			one.tainted = one.tainted || t.Effect != resourcev1.DeviceTaintEffectNone
		}
		for name, v := range d.Attributes {
			if v.StringValue != nil {
				one.values[withDomain(string(name), s.driver)] = *v.StringValue
			}
		}
		s.devices = append(s.devices, one)
	}
	return s
}

func withDomain(name, driver string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return driver + "/" + name
}

type claim struct {
	named
	results     []resourcev1.DeviceRequestAllocationResult
	reservedFor int
	requests    []claimRequest
	unknown     string // why it is not known which devices would do
}

type claimRequest struct {
	name, class string
	selectors   []string
	count       int
}

func claimOf(o *resourcev1.ResourceClaim) *claim {
	c := &claim{named: named{o.Namespace, o.Name}, reservedFor: len(o.Status.ReservedFor)}
	if a := o.Status.Allocation; a != nil {
		c.results = a.Devices.Results
	}
	if len(o.Spec.Devices.Constraints) > 0 {
		c.unknown = "constraints between devices"
	}
	for i := range o.Spec.Devices.Requests {
		r := &o.Spec.Devices.Requests[i]
		e := r.Exactly
		if e == nil || e.AllocationMode == resourcev1.DeviceAllocationModeAll || e.AdminAccess != nil && *e.AdminAccess || e.Capacity != nil {
			c.unknown = "a request for alternatives, all devices, administration or a capacity"
			continue
		}
		one := claimRequest{name: r.Name, class: e.DeviceClassName, count: int(max(e.Count, 1))}
		for _, s := range e.Selectors {
			one.selectors = append(one.selectors, expression(s))
		}
		c.requests = append(c.requests, one)
	}
	return c
}

func expression(s resourcev1.DeviceSelector) string {
	if s.CEL == nil {
		return ""
	}
	return s.CEL.Expression
}

type class struct {
	named
	selectors []string
	resource  string // the extended resource that it serves
}

func classOf(o *resourcev1.DeviceClass) *class {
	c := &class{named: named{name: o.Name}}
	for _, s := range o.Spec.Selectors {
		c.selectors = append(c.selectors, expression(s))
	}
	if o.Spec.ExtendedResourceName != nil {
		c.resource = *o.Spec.ExtendedResourceName
	}
	return c
}

// places is where a pod may run, by all that it asks for but devices.
type places struct {
	selector    map[string]string
	affinity    *corev1.NodeSelector
	tolerations []corev1.Toleration
	volumes     []string // persistent volume claims
	unknown     string   // what it asks for that is not looked at here, so that no node is certain
}

func placesOf(o *corev1.Pod) *places {
	p := &places{selector: o.Spec.NodeSelector, tolerations: o.Spec.Tolerations}
	if a := o.Spec.Affinity; a != nil {
		if a.NodeAffinity != nil {
			p.affinity = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		}
		if a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			p.unknown = "required pod affinity"
		}
		if a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			p.unknown = "required pod anti-affinity"
		}
	}
	for _, t := range o.Spec.TopologySpreadConstraints {
		if t.WhenUnsatisfiable == corev1.DoNotSchedule {
			p.unknown = "topology spread constraints with DoNotSchedule"
		}
	}
	p.addVolumes(o.Spec.Volumes)
	for i := range o.Spec.Containers {
		if slices.ContainsFunc(o.Spec.Containers[i].Ports, func(port corev1.ContainerPort) bool { return port.HostPort != 0 }) {
			p.unknown = "ports of the node"
		}
	}
	if name := o.Spec.SchedulerName; name != "" && name != corev1.DefaultSchedulerName {
		p.unknown = "scheduler " + name
	}
	if len(o.Spec.SchedulingGates) > 0 {
		p.unknown = "scheduling gates"
	}
	return p
}

func (p *places) addVolumes(all []corev1.Volume) {
	for i := range all {
		if c := all[i].PersistentVolumeClaim; c != nil {
			p.volumes = append(p.volumes, c.ClaimName)
		}
		if all[i].Ephemeral != nil {
			p.unknown = "generic ephemeral volumes"
		}
	}
}

// volumeClaim is a PersistentVolumeClaim, with the volume that is bound to it.
type volumeClaim struct {
	named
	volume string
}

func volumeClaimOf(o *corev1.PersistentVolumeClaim) *volumeClaim {
	c := &volumeClaim{named: named{o.Namespace, o.Name}}
	if o.Status.Phase == corev1.ClaimBound {
		c.volume = o.Spec.VolumeName
	}
	return c
}

// volume is a PersistentVolume.
type volume struct {
	named
	affinity *corev1.NodeSelector
	shared   bool // several nodes mount it at a time
}

func volumeOf(o *corev1.PersistentVolume) *volume {
	v := &volume{named: named{name: o.Name}}
	if o.Spec.NodeAffinity != nil {
		v.affinity = o.Spec.NodeAffinity.Required
	}
	for _, m := range o.Spec.AccessModes {
		v.shared = v.shared || m == corev1.ReadWriteMany || m == corev1.ReadOnlyMany
	}
	return v
}
