package resourceslice

import (
	"cmp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// The values of the attribute "type". Shared devices have types that NVIDIA's driver does not have, so that its classes, which select by
// type, never yield a share.
const (
	typeGPU, typeMIG             = "gpu", "mig"
	typeSharedGPU, typeSharedMIG = "shared-gpu", "shared-mig"
)

// The attributes of devices: names and kinds are those of NVIDIA's driver, except pool, sharing and provedOn, which it does not have.
const (
	attrType      = "type"
	attrPool      = "pool"    // name of the pool in the policy
	attrSharing   = "sharing" // inventory.SharingMode
	attrNUMA      = "resource.kubernetes.io/numaNode"
	attrPCIBusID  = "resource.kubernetes.io/pciBusID"
	attrPCIeRoot  = "resource.kubernetes.io/pcieRoot"
	attrParent    = "parentUUID"
	attrProfile   = "profile"
	attrProduct   = "productName"
	attrCompute   = "cudaComputeCapability"
	attrDriver    = "driverVersion"
	attrCUDA      = "cudaDriverVersion"
	attrUUID      = "uuid"
	attrBrand     = "brand"
	attrArch      = "architecture"
	attrMode      = "addressingMode"
	attrProvedOn  = "provedOn" // day of the latest proof, if the GPU passed it
	capMemory     = "memory"
	capShares     = "shares"
	capSlice      = "memorySlice" // and its number
	unknownSemver = "0.0.0"
)

// newDevice returns the device of a unit, without taints.
//
// All devices have the same attributes, because a CEL expression that reads an attribute which a device does not have is an error, which
// keeps the pod from all nodes. An unknown text is "", an unknown version 0.0.0. The exception is numaNode: an integer has no value for
// "unknown", and NVIDIA's driver leaves it out, too. provedOn is only there if GPUs are proved: see Input.Device.
func newDevice(driver gpu.Driver, u inventory.Unit, limits inventory.LimitPolicy, sharesAsDevices bool) kubeapi.Device {
	d := kubeapi.Device{Name: DeviceName(u), Attributes: attributes(driver, u), Capacity: capacities(u.Device)}
	if u.Sharing.Mode == inventory.Exclusive {
		return d
	}
	if sharesAsDevices {
		d.Name = shareName(u)
		d.Capacity[capShares] = kubeapi.DeviceCapacity{Value: "1"}
		if memory := cmp.Or(u.Memory, u.Sharing.Memory); memory > 0 {
			d.Capacity[capMemory] = kubeapi.DeviceCapacity{Value: binarySI(memory)}
		}
		return d
	}
	d.AllowMultipleAllocations = true
	for name, c := range d.Capacity { // without a policy the first claim consumes the whole value
		c.RequestPolicy = &kubeapi.CapacityRequestPolicy{Default: "0", ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: "0"}}
		d.Capacity[name] = c
	}
	if u.Memory > 0 {
		d.Capacity[capMemory] = limitedMemory(u, limits)
	} else if limit := u.Sharing.Memory; limit > 0 && limit <= u.Device.Memory/uint64(max(u.Sharing.Replicas, 1)) {
		// Limits of MPS clients may add up to more than the device has. Then they are no part of the accounts: otherwise fewer shares than configured fit.
		d.Capacity[capMemory].RequestPolicy.Default = binarySI(limit)
	}
	d.Capacity[capShares] = kubeapi.DeviceCapacity{
		Value: decimalSI(uint64(u.Sharing.Replicas)),
		RequestPolicy: &kubeapi.CapacityRequestPolicy{
			Default: "1", ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: "1", Step: "1"},
		},
	}
	return d
}

// leastLimit is the least limit that a claim can ask for, unless that of the policy is less: a CUDA context alone needs some hundred MiB.
const leastLimit uint64 = 512 << 20

// limitedMemory is the capacity of a device of which each claim has a part that the driver limits it to: the consumed capacity, in whole MiB. A claim that asks for
// none has the limit of the policy. Only the value bounds the sum of all claims.
func limitedMemory(u inventory.Unit, limits inventory.LimitPolicy) kubeapi.DeviceCapacity {
	available := limits.Available(u.Device.Memory)
	valid := kubeapi.CapacityRequestPolicyRange{Min: binarySI(min(leastLimit, u.Memory)), Step: "1Mi"}
	value := max(available, u.Memory*uint64(u.Sharing.Replicas)) //nolint:gosec // from 2
	if value > available {                                       // with overcommit; no share has more than the device
		valid.Max = binarySI(available)
	}
	return kubeapi.DeviceCapacity{Value: binarySI(value), RequestPolicy: &kubeapi.CapacityRequestPolicy{Default: binarySI(u.Memory), ValidRange: &valid}}
}

// attributes returns the attributes of a unit's device.
func attributes(driver gpu.Driver, u inventory.Unit) map[string]kubeapi.DeviceAttribute {
	d := u.Device
	compute := ""
	if d.Compute != (gpu.Compute{}) {
		compute = d.Compute.String()
	}
	all := map[string]kubeapi.DeviceAttribute{
		attrType:     text(typeOf(d.At.GI != gpu.Whole, u.Sharing.Mode != inventory.Exclusive)),
		attrUUID:     text(string(d.ID)),
		attrProduct:  text(d.Product()),
		attrBrand:    text(brand(d.Brand)),
		attrArch:     text(d.Architecture),
		attrMode:     text(d.AddressingMode),
		attrCompute:  version(compute),
		attrDriver:   version(driver.Version),
		attrCUDA:     version(driver.CUDA),
		attrPCIBusID: text(string(d.PCI)),
		attrPCIeRoot: text(d.PCIeRoot),
		attrParent:   text(""),
		attrProfile:  text(d.Profile),
		attrPool:     text(u.Pool),
		attrSharing:  text(u.Sharing.Mode.String()),
	}
	if d.At.GI != gpu.Whole {
		all[attrParent] = text(string(d.At.GPU))
	}
	if d.NUMANode >= 0 {
		node := int64(d.NUMANode)
		all[attrNUMA] = kubeapi.DeviceAttribute{Int: &node}
	}
	return all
}

func typeOf(instance, shared bool) string {
	switch {
	case instance && shared:
		return typeSharedMIG
	case instance:
		return typeMIG
	case shared:
		return typeSharedGPU
	}
	return typeGPU
}

// capacities returns the capacities of a device: names and units are those of NVIDIA's driver.
func capacities(d gpu.Device) map[string]kubeapi.DeviceCapacity {
	all := map[string]kubeapi.DeviceCapacity{capMemory: {Value: binarySI(d.Memory)}}
	if d.At.GI == gpu.Whole {
		return all
	}
	for name, n := range map[string]int{
		"multiprocessors": d.Slices.Multiprocessors, "copyEngines": d.Slices.CopyEngines, "decoders": d.Slices.Decoders,
		"encoders": d.Slices.Encoders, "jpegEngines": d.Slices.JPEGDecoders, "ofaEngines": d.Slices.OFAs,
	} {
		all[name] = kubeapi.DeviceCapacity{Value: decimalSI(uint64(max(n, 0)))}
	}
	if end := d.MemorySlices.First + d.MemorySlices.Count; end <= maxMemorySlices {
		for i := d.MemorySlices.First; i < end; i++ {
			all[capSlice+strconv.Itoa(i)] = kubeapi.DeviceCapacity{Value: "1"}
		}
	}
	return all
}

// maxMemorySlices is the maximum number of memory slices of a GPU. A device with as many has 32 attributes and capacities, which is the
// maximum (ResourceSliceMaxAttributesAndCapacitiesPerDevice).
const maxMemorySlices = 8

// brand returns the spelling of NVIDIA's driver for a brand in that of nvidia-smi.
func brand(name string) string {
	if spelled, ok := brands[name]; ok {
		return spelled
	}
	return name
}

// brands are the brands that NVIDIA's driver spells differently (go-nvlib, GetBrandAsString).
var brands = map[string]string{
	"NVIDIA": "Nvidia", "GRID": "Grid", "NVIDIA RTX": "NvidiaRTX", "GeForce RTX": "GeForceRTX", "Quadro RTX": "QuadroRTX", "Titan RTX": "TitanRTX",
	"NVIDIA Virtual Applications": "NvidiaVApps", "NVIDIA Virtual PC": "NvidiaVPC", "NVIDIA vGPU for Compute": "NvidiaVCS",
	"NVIDIA RTX Virtual Workstation": "NvidiaVWS", "NVIDIA Cloud Gaming": "NvidiaCloudGaming",
}

// maxAttributes is how many attributes and capacities a device has at most (ResourceSliceMaxAttributesAndCapacitiesPerDevice).
const maxAttributes = 32

// maxText is the maximum length of a text or version in an attribute (DeviceAttributeMaxValueLength).
const maxText = 64

func text(s string) kubeapi.DeviceAttribute {
	s = strings.ToValidUTF8(s, "")
	for len(s) > maxText {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return kubeapi.DeviceAttribute{String: &s}
}

// version returns a version as semver.org 2.0.0 has it, which the API server requires: "580.65.06" becomes 580.65.6, "9.0" becomes 9.0.0.
// What follows the first three numbers is left out.
func version(s string) kubeapi.DeviceAttribute {
	numbers := [3]string{"0", "0", "0"}
	for i, part := range strings.SplitN(s, ".", len(numbers)+1) {
		n, err := strconv.ParseUint(leadingDigits(part), 10, 32)
		if i == len(numbers) || err != nil {
			break
		}
		numbers[i] = strconv.FormatUint(n, 10)
		if leadingDigits(part) != part {
			break
		}
	}
	v := strings.Join(numbers[:], ".")
	return kubeapi.DeviceAttribute{Version: &v}
}

func leadingDigits(s string) string {
	return s[:len(s)-len(strings.TrimLeft(s, "0123456789"))]
}

// binarySI returns a number as resource.Quantity formats it with suffixes for powers of 1024: "80Gi".
func binarySI(n uint64) string {
	return withSuffix(n, 1024, []string{"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"})
}

// decimalSI returns a number as resource.Quantity formats it with suffixes for powers of 1000: "2k".
func decimalSI(n uint64) string {
	return withSuffix(n, 1000, []string{"", "k", "M", "G", "T", "P", "E"})
}

// withSuffix returns the shortest exact form, which the API server returns for any form: others would differ when they are read back.
func withSuffix(n, base uint64, suffixes []string) string {
	i := 0
	for ; n > 0 && n%base == 0 && i < len(suffixes)-1; i++ {
		n /= base
	}
	return strconv.FormatUint(n, 10) + suffixes[i]
}
