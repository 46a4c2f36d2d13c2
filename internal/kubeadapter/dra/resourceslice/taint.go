package resourceslice

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// MaxTaints is the maximum number of taints of a device (DeviceTaintsMaxLength).
const MaxTaints = 16

// taints returns the taints of a device: that it is withdrawn, that another device's claim holds its hardware, and one for each condition
// of its unit, the worst first. If there are too many, the mildest are left out.
func (in Input) taints(u inventory.Unit, kept, overlapping bool) []kubeapi.DeviceTaint {
	var all []kubeapi.DeviceTaint
	if in.Cordoned != "" || kept {
		all = addTaint(all, withdrawnTaint(in.Cordoned))
	}
	if overlapping {
		all = addTaint(all, kubeapi.DeviceTaint{Key: taintKey(health.ReasonHeld), Effect: kubeapi.NoSchedule})
	}
	evict := in.Evict && in.Allocatable.Driver().State == gpu.DriverReady // else what is known of devices is old
	for _, h := range in.Allocatable.Conditions(u) {
		all = addTaint(all, taintOf(h, evict))
	}
	return all[:min(len(all), MaxTaints)]
}

// Cordon returns devices that take no new work for a reason which is none of theirs: each has the taint "withdrawn", before its others.
// nil is nil.
func Cordon(devices []kubeapi.Device, why string) []kubeapi.Device {
	devices = slices.Clone(devices)
	for i, d := range devices {
		all := []kubeapi.DeviceTaint{withdrawnTaint(why)}
		for _, t := range d.Taints {
			all = addTaint(all, t)
		}
		devices[i].Taints = all[:min(len(all), MaxTaints)]
	}
	return devices
}

func withdrawnTaint(why string) kubeapi.DeviceTaint {
	return kubeapi.DeviceTaint{Key: taintKey(health.ReasonWithdrawn), Value: labelValue(why), Effect: kubeapi.NoSchedule}
}

// addTaint adds a taint. Of several with the same key and value, which conditions of a GPU and of its instance can be, there is one: with
// the strongest effect and the earliest time.
func addTaint(all []kubeapi.DeviceTaint, t kubeapi.DeviceTaint) []kubeapi.DeviceTaint {
	i := slices.IndexFunc(all, func(o kubeapi.DeviceTaint) bool { return o.Key == t.Key && o.Value == t.Value })
	if i < 0 {
		return append(all, t)
	}
	o := &all[i]
	if strength(t.Effect) > strength(o.Effect) {
		o.Effect = t.Effect
	}
	if !t.TimeAdded.IsZero() && t.TimeAdded.Before(o.TimeAdded) {
		o.TimeAdded = t.TimeAdded
	}
	return all
}

func strength(e kubeapi.TaintEffect) int {
	return slices.Index([]kubeapi.TaintEffect{kubeapi.NoEffect, kubeapi.NoSchedule, kubeapi.NoExecute}, e)
}

// taintOf returns the taint of a condition.
func taintOf(h health.Health, evict bool) kubeapi.DeviceTaint {
	t := kubeapi.DeviceTaint{Key: taintKey(h.Reason), Value: taintValue(h), Effect: kubeapi.NoSchedule, TimeAdded: h.Since.UTC().Truncate(time.Second)}
	switch {
	case h.Schedulable():
		t.Effect = kubeapi.NoEffect
	case evict && h.State >= health.Unhealthy && isHardware(h):
		t.Effect = kubeapi.NoExecute
	}
	return t
}

// isHardware reports whether a condition is evidence that the device is broken, so that work on it is lost. The agent's own calls that fail or do
// not return are none: kernels are launched without a call of the driver. Nor is a GPU that is only not listed, which the agent may just not be
// shown, the fabric manager's state, or faults of applications.
func isHardware(h health.Health) bool {
	switch h.Reason {
	case health.ReasonXID:
		return isHardwareClass(xid.XID(h.Code).Class)
	case health.ReasonEvent:
		rule, _ := xid.Event(h.Code)
		return isHardwareClass(rule.Class)
	case health.ReasonLost:
		return h.Detail != health.NotListed
	case health.ReasonRecoveryAction, health.ReasonRemapFailed, health.ReasonUnrepairable, health.ReasonSRAM, health.ReasonNeedsService:
		return true
	default:
		return false
	}
}

func isHardwareClass(c xid.Class) bool {
	return c == xid.Contained || c == xid.Reset || c == xid.Node || c == xid.Fabric
}

// GPU returns the GPU of a device, which may be an instance or a share of it.
func GPU(d kubeapi.Device) gpu.DeviceID {
	for _, name := range []string{attrParent, attrUUID} {
		if v := d.Attributes[name].String; v != nil && *v != "" {
			return gpu.DeviceID(*v)
		}
	}
	return ""
}

// EvictOnly returns devices of which only those of some GPUs evict pods: the effect NoExecute of the others is NoSchedule. nil is nil.
func EvictOnly(devices []kubeapi.Device, gpus map[gpu.DeviceID]bool) []kubeapi.Device {
	devices = slices.Clone(devices)
	for i, d := range devices {
		if gpus[GPU(d)] || !slices.ContainsFunc(d.Taints, IsNoExecute) {
			continue
		}
		devices[i].Taints = slices.Clone(d.Taints)
		for j, t := range devices[i].Taints {
			if IsNoExecute(t) {
				devices[i].Taints[j].Effect = kubeapi.NoSchedule
			}
		}
	}
	return devices
}

// IsNoExecute reports whether a taint deletes the pods that use the device.
func IsNoExecute(t kubeapi.DeviceTaint) bool { return t.Effect == kubeapi.NoExecute }

// taintKey returns the key of the taint for a reason: one for each cause, so that a claim can tolerate one of them. xid and gpu-lost are
// keys of NVIDIA's driver, whose tolerations keep their meaning. The others follow from the name of the reason, which never changes.
func taintKey(r health.Reason) string {
	name := strings.ReplaceAll(strings.ToLower(r.String()), "_", "-")
	switch r {
	case health.ReasonLost:
		name = "gpu-lost"
	case health.ReasonRecoveryAction:
		name = "recovery-action"
	case health.ReasonOverlap:
		name = "contested"
	case health.ReasonMoving: // another value of the same key: whoever tolerates a withdrawn device tolerates one that is about to be
		return taintKey(health.ReasonWithdrawn)
	default:
	}
	return Driver + "/" + name
}

// taintValue returns what distinguishes causes with the same key, as a label value.
func taintValue(h health.Health) string {
	switch h.Reason {
	case health.ReasonXID:
		return strconv.FormatUint(h.Code, 10)
	case health.ReasonEvent:
		return "0x" + strconv.FormatUint(h.Code, 16)
	case health.ReasonRecoveryAction:
		return labelValue(strings.ToLower(strings.TrimPrefix(h.Cause(), "RECOVERY_ACTION_")))
	case health.ReasonOverlap:
		return labelValue(h.Detail)
	case health.ReasonMoving:
		return "moving"
	default:
		return ""
	}
}

// labelValue returns a text as the value of a label, which has at most 63 letters, digits, '-', '_' and '.', and begins and ends with a
// letter or digit.
func labelValue(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-', r == '.':
			return r
		}
		return '-'
	}, s)
	s = strings.Trim(s, "-.")
	return strings.Trim(s[:min(len(s), 63)], "-.")
}

// Stamp returns devices in which each taint has a time. A taint without one is of a condition whose beginning is not recorded: it gets
// the time that the same taint (by device, key and value) has in before, which is what was published last, else now. The API server
// stamps a taint without a time with the time of each write, so that it would never be old.
func Stamp(devices, before []kubeapi.Device, now time.Time) []kubeapi.Device {
	type taint struct{ device, key, value string }
	since := map[taint]time.Time{}
	for _, d := range before {
		for _, t := range d.Taints {
			since[taint{d.Name, t.Key, t.Value}] = t.TimeAdded
		}
	}
	stamped := slices.Clone(devices)
	for i, d := range stamped {
		if !slices.ContainsFunc(d.Taints, func(t kubeapi.DeviceTaint) bool { return t.TimeAdded.IsZero() }) {
			continue
		}
		stamped[i].Taints = slices.Clone(d.Taints)
		for j := range stamped[i].Taints {
			t := &stamped[i].Taints[j]
			if t.TimeAdded.IsZero() {
				t.TimeAdded = since[taint{d.Name, t.Key, t.Value}]
			}
			if t.TimeAdded.IsZero() {
				t.TimeAdded = now.UTC().Truncate(time.Second)
			}
		}
	}
	return stamped
}
