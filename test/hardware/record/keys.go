package record

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// key is a key of a machine file, and the call that reads its value. A value of "" is not written.
type key struct {
	name      string
	functions []string // of which the library needs one
	argument  string   // of the function, for the table of answers
	read      func(nvml.Device) (string, nvml.Return)
}

// keys are those that NVML can read, in the order of the machine files. MIG instances, links and fabric have functions of their
// own. Not readable are lost, resets and what is not of a GPU.
var keys = slices.Concat(identityKeys, memoryKeys, powerKeys, pcieKeys, modeKeys, errorKeys, fieldKeys)

type integer interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

func decimal[T integer](v T) string     { return fmt.Sprint(uint64(v)) }
func hexadecimal[T integer](v T) string { return fmt.Sprintf("0x%x", uint64(v)) }

// mebibytes, watts, megahertz and celsius have the units of the machine files.
func mebibytes(v uint64) string {
	if v%(1<<20) == 0 {
		return fmt.Sprint(v>>20, " MiB")
	}
	return fmt.Sprint(v)
}

func watts[T integer](milliwatts T) string {
	v := uint64(milliwatts)
	if v%1000 != 0 {
		return fmt.Sprint(v, " mW")
	}
	return fmt.Sprint(v/1000, " W")
}

func megahertz[T integer](v T) string { return fmt.Sprint(uint64(v), " MHz") }
func celsius[T integer](v T) string   { return fmt.Sprint(uint64(v), " C") }

func flag[T integer](v T) string { return yesNo(v != 0) }

func yesNo(v bool) string {
	if v {
		return "yes"
	}
	return "no"
}

// of is a key whose function returns one value.
func of[T any](name, function string, call func(nvml.Device) (T, nvml.Return), text func(T) string) key {
	return key{name: name, functions: strings.Fields(function), read: func(d nvml.Device) (string, nvml.Return) {
		v, ret := call(d)
		if ret != nvml.SUCCESS {
			return "", ret
		}
		return text(v), ret
	}}
}

// with is a key whose function has an argument.
func with[A, T any](name, function, argument string, a A, call func(nvml.Device, A) (T, nvml.Return), text func(T) string) key {
	k := of(name, function, func(d nvml.Device) (T, nvml.Return) { return call(d, a) }, text)
	k.argument = "(" + argument + ")"
	return k
}

// field is a key that is a field value.
func field(name string, id uint32, scope uint32, text func(uint64) string) key {
	return with(name, "nvmlDeviceGetFieldValues", fmt.Sprint(id), id, func(d nvml.Device, id uint32) (uint64, nvml.Return) {
		return fieldValue(d, id, scope)
	}, text)
}

// fieldValue reads one field.
func fieldValue(d nvml.Device, id, scope uint32) (uint64, nvml.Return) {
	values := []nvml.FieldValue{{FieldId: id, ScopeId: scope}}
	if ret := d.GetFieldValues(values); ret != nvml.SUCCESS {
		return 0, ret
	}
	if ret := nvml.Return(values[0].NvmlReturn); ret != nvml.SUCCESS {
		return 0, ret
	}
	raw := values[0].Value[:]
	switch nvml.ValueType(values[0].ValueType) {
	case nvml.VALUE_TYPE_DOUBLE:
		return uint64(math.Float64frombits(binary.NativeEndian.Uint64(raw))), nvml.SUCCESS
	case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
		return uint64(binary.NativeEndian.Uint32(raw)), nvml.SUCCESS
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.NativeEndian.Uint16(raw)), nvml.SUCCESS
	default:
		return binary.NativeEndian.Uint64(raw), nvml.SUCCESS
	}
}

// word is the name of a value in machine files, else its number.
func word[T integer](words map[T]string) func(T) string {
	return func(v T) string {
		if name, ok := words[v]; ok {
			return name
		}
		return strconv.FormatUint(uint64(v), 10)
	}
}

var brands = map[nvml.BrandType]string{
	nvml.BRAND_UNKNOWN: "unknown", nvml.BRAND_QUADRO: "quadro", nvml.BRAND_TESLA: "tesla", nvml.BRAND_NVS: "nvs", nvml.BRAND_GRID: "grid",
	nvml.BRAND_GEFORCE: "geforce", nvml.BRAND_TITAN: "titan", nvml.BRAND_NVIDIA_VAPPS: "vapps", nvml.BRAND_NVIDIA_VPC: "vpc",
	nvml.BRAND_NVIDIA_VCS: "vcs", nvml.BRAND_NVIDIA_VWS: "vws", nvml.BRAND_NVIDIA_CLOUD_GAMING: "cloud_gaming",
	nvml.BRAND_QUADRO_RTX: "quadro_rtx", nvml.BRAND_NVIDIA_RTX: "nvidia_rtx", nvml.BRAND_NVIDIA: "nvidia",
	nvml.BRAND_GEFORCE_RTX: "geforce_rtx", nvml.BRAND_TITAN_RTX: "titan_rtx",
}

var architectures = map[nvml.DeviceArchitecture]string{
	nvml.DEVICE_ARCH_KEPLER: "kepler", nvml.DEVICE_ARCH_MAXWELL: "maxwell", nvml.DEVICE_ARCH_PASCAL: "pascal", nvml.DEVICE_ARCH_VOLTA: "volta",
	nvml.DEVICE_ARCH_TURING: "turing", nvml.DEVICE_ARCH_AMPERE: "ampere", nvml.DEVICE_ARCH_ADA: "ada", nvml.DEVICE_ARCH_HOPPER: "hopper",
	nvml.DEVICE_ARCH_BLACKWELL: "blackwell",
}

var virtualizations = map[nvml.GpuVirtualizationMode]string{
	nvml.GPU_VIRTUALIZATION_MODE_NONE: "none", nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH: "passthrough",
	nvml.GPU_VIRTUALIZATION_MODE_VGPU: "vgpu", nvml.GPU_VIRTUALIZATION_MODE_HOST_VGPU: "host_vgpu",
}
