package kubeapi

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"
)

// ObjectMeta is the part of metav1.ObjectMeta that agents read or write.
type ObjectMeta struct {
	Name              string            `json:"name,omitempty"`
	Namespace         string            `json:"namespace,omitempty"`
	UID               string            `json:"uid,omitempty"`
	ResourceVersion   string            `json:"resourceVersion,omitempty"`
	Generation        int64             `json:"generation,omitempty"`
	CreationTimestamp *time.Time        `json:"creationTimestamp,omitempty"`
	DeletionTimestamp *time.Time        `json:"deletionTimestamp,omitempty"`
	Labels            map[string]string `json:"labels,omitempty"`
	Annotations       map[string]string `json:"annotations,omitempty"`
	OwnerReferences   []OwnerReference  `json:"ownerReferences,omitempty"`
	Finalizers        []string          `json:"finalizers,omitempty"`
}

// OwnerReference is metav1.OwnerReference.
type OwnerReference struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
	Controller *bool  `json:"controller,omitempty"`
}

// ResourceSlice is resource.k8s.io/v1 ResourceSlice, without the fields that this agent never sets.
type ResourceSlice struct {
	APIVersion string            `json:"apiVersion,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Metadata   ObjectMeta        `json:"metadata"`
	Spec       ResourceSliceSpec `json:"spec"`
}

// ResourceSliceSpec is ResourceSliceSpec of resource.k8s.io/v1.
type ResourceSliceSpec struct {
	Driver   string       `json:"driver"`
	Pool     ResourcePool `json:"pool"`
	NodeName string       `json:"nodeName,omitempty"`
	Devices  []Device     `json:"devices,omitempty"`

	// Unknown is a field of the decoded spec that this type lacks; "" = none. An update with this spec removes it.
	Unknown string `json:"-"`
}

// UnmarshalJSON decodes a spec and finds out whether it has fields that this type lacks.
func (s *ResourceSliceSpec) UnmarshalJSON(data []byte) error {
	type plain ResourceSliceSpec // without this method
	var known plain
	strict := json.NewDecoder(bytes.NewReader(data))
	strict.DisallowUnknownFields()
	unknown := strict.Decode(&known)
	if unknown != nil {
		known = plain{}
		if err := json.Unmarshal(data, &known); err != nil {
			return err
		}
		known.Unknown = strings.TrimPrefix(unknown.Error(), "json: unknown field ")
	}
	*s = ResourceSliceSpec(known)
	return nil
}

// SliceList is ResourceSliceList of resource.k8s.io/v1.
type SliceList struct {
	Metadata ListMeta        `json:"metadata"`
	Items    []ResourceSlice `json:"items"`
}

// ListMeta is the part of metav1.ListMeta that agents read.
type ListMeta struct {
	ResourceVersion string `json:"resourceVersion,omitempty"`
}

// ResourcePool is ResourcePool of resource.k8s.io/v1.
type ResourcePool struct {
	Name               string `json:"name"`
	Generation         int64  `json:"generation"`
	ResourceSliceCount int64  `json:"resourceSliceCount"`
}

// Device is Device of resource.k8s.io/v1.
type Device struct {
	Name       string                     `json:"name"`
	Attributes map[string]DeviceAttribute `json:"attributes,omitempty"`
	Capacity   map[string]DeviceCapacity  `json:"capacity,omitempty"`
	Taints     []DeviceTaint              `json:"taints,omitempty"`

	AllowMultipleAllocations bool `json:"allowMultipleAllocations,omitempty"`

	// Held is no field of the API: a claim has the device, so that it stays listed whatever its health is.
	Held bool `json:"-"`
}

// DeviceAttribute is DeviceAttribute of resource.k8s.io/v1: one of the fields is set.
type DeviceAttribute struct {
	Int     *int64  `json:"int,omitempty"`
	Bool    *bool   `json:"bool,omitempty"`
	String  *string `json:"string,omitempty"`
	Version *string `json:"version,omitempty"` // semver.org 2.0.0
}

// DeviceCapacity is DeviceCapacity of resource.k8s.io/v1. Quantities are in the canonical form of resource.Quantity.
type DeviceCapacity struct {
	Value         string                 `json:"value"`
	RequestPolicy *CapacityRequestPolicy `json:"requestPolicy,omitempty"`
}

// CapacityRequestPolicy is CapacityRequestPolicy of resource.k8s.io/v1.
type CapacityRequestPolicy struct {
	Default    string                      `json:"default"`
	ValidRange *CapacityRequestPolicyRange `json:"validRange,omitempty"`
}

// CapacityRequestPolicyRange is CapacityRequestPolicyRange of resource.k8s.io/v1.
type CapacityRequestPolicyRange struct {
	Min  string `json:"min,omitempty"`
	Max  string `json:"max,omitempty"`
	Step string `json:"step,omitempty"`
}

// TaintEffect is DeviceTaintEffect of resource.k8s.io/v1.
type TaintEffect string

// The effects of taints.
const (
	NoEffect   TaintEffect = "None"       // information only
	NoSchedule TaintEffect = "NoSchedule" // no new pods
	NoExecute  TaintEffect = "NoExecute"  // no new pods, and the device taint eviction controller deletes those that run
)

// DeviceTaint is DeviceTaint of resource.k8s.io/v1. Without TimeAdded the API server sets the time of each write.
type DeviceTaint struct {
	Key       string      `json:"key"`
	Value     string      `json:"value,omitempty"` // a label value
	Effect    TaintEffect `json:"effect"`
	TimeAdded time.Time   `json:"timeAdded,omitzero"` // UTC, whole seconds, as the API server stores it
}

// ResourceClaim is the part of resource.k8s.io/v1 ResourceClaim that a driver reads.
type ResourceClaim struct {
	Metadata ObjectMeta          `json:"metadata"`
	Status   ResourceClaimStatus `json:"status"`
}

// ResourceClaimStatus is the part of ResourceClaimStatus that a driver reads.
type ResourceClaimStatus struct {
	Allocation  *AllocationResult        `json:"allocation,omitempty"`
	ReservedFor []ClaimConsumerReference `json:"reservedFor,omitempty"`
}

// ClaimConsumerReference is the part of ResourceClaimConsumerReference that names a pod which may use a claim.
type ClaimConsumerReference struct {
	Resource string `json:"resource"` // "pods"
	Name     string `json:"name"`
	UID      string `json:"uid"`
}

// AllocationResult is the part of AllocationResult that a driver reads.
type AllocationResult struct {
	Devices DeviceAllocationResult `json:"devices"`
}

// DeviceAllocationResult is DeviceAllocationResult of resource.k8s.io/v1.
type DeviceAllocationResult struct {
	Results []DeviceRequestAllocationResult `json:"results,omitempty"`
	Config  []DeviceAllocationConfiguration `json:"config,omitempty"`
}

// DeviceRequestAllocationResult is DeviceRequestAllocationResult of resource.k8s.io/v1.
type DeviceRequestAllocationResult struct {
	Request          string             `json:"request"` // "request" or "request/subrequest"
	Driver           string             `json:"driver"`
	Pool             string             `json:"pool"`
	Device           string             `json:"device"`
	AdminAccess      bool               `json:"adminAccess,omitempty"`
	Tolerations      []DeviceToleration `json:"tolerations,omitempty"`
	ShareID          string             `json:"shareID,omitempty"`
	ConsumedCapacity map[string]string  `json:"consumedCapacity,omitempty"`
}

// DeviceToleration is DeviceToleration of resource.k8s.io/v1.
type DeviceToleration struct {
	Key      string      `json:"key,omitempty"`
	Operator string      `json:"operator,omitempty"` // "Exists", "Equal" or "" = "Equal"
	Value    string      `json:"value,omitempty"`
	Effect   TaintEffect `json:"effect,omitempty"` // "" = all
}

// DeviceAllocationConfiguration is DeviceAllocationConfiguration of resource.k8s.io/v1.
type DeviceAllocationConfiguration struct {
	Source   string               `json:"source"` // "FromClass" or "FromClaim"
	Requests []string             `json:"requests,omitempty"`
	Opaque   *OpaqueConfiguration `json:"opaque,omitempty"`
}

// OpaqueConfiguration is OpaqueDeviceConfiguration of resource.k8s.io/v1.
type OpaqueConfiguration struct {
	Driver     string          `json:"driver"`
	Parameters json.RawMessage `json:"parameters"`
}

// Node is the part of v1 Node that agents read.
type Node struct {
	Metadata ObjectMeta `json:"metadata"`
	Status   NodeStatus `json:"status"`
}

// NodeStatus is the part of v1 NodeStatus that agents read.
type NodeStatus struct {
	Capacity    map[string]string `json:"capacity,omitempty"`
	Allocatable map[string]string `json:"allocatable,omitempty"`
	NodeInfo    NodeSystemInfo    `json:"nodeInfo"`
}

// NodeSystemInfo is the part of v1 NodeSystemInfo that agents read.
type NodeSystemInfo struct {
	ContainerRuntimeVersion string `json:"containerRuntimeVersion"` // "containerd://2.4.2"
	KubeletVersion          string `json:"kubeletVersion"`          // "v1.37.1"
}
