package prepared

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// check compares the places in which a record has the device of a result: name, unit, placement, names of CDI devices,
// and the device as it was published. It finds damage in a record without a checksum, which an earlier version has
// written.
func (c Claim) check() error {
	for i := range c.Results {
		r := &c.Results[i]
		id, _ := r.Unit.Split()
		switch parent, uuid := r.published(); {
		case id == "":
			continue
		case !r.isNamed(id):
			return fmt.Errorf("the device %q is recorded as %q", r.Device, id)
		case r.At == gpu.WholeGPU(r.At.GPU) && r.At.GPU != id, r.At != gpu.WholeGPU(r.At.GPU) && r.At.GPU == id:
			return fmt.Errorf("the device %q is recorded at %s", id, r.At)
		case uuid != "" && uuid != id:
			return fmt.Errorf("the device %q is published as %q", id, uuid)
		case parent != "" && parent != r.At.GPU:
			return fmt.Errorf("the device %q at %s is published as a part of %q", id, r.At, parent)
		}
		for _, name := range r.CDI {
			if other := cdiDevice(name); other != "" && !c.has(other) {
				return fmt.Errorf("the device %q has the CDI name %q", id, name)
			}
		}
		namesDevices := slices.ContainsFunc(r.CDI, func(name string) bool { return cdiDevice(name) != "" })
		if isUUID(id) && namesDevices && !r.hasCDI(id) {
			return fmt.Errorf("the device %q has the CDI names %q", id, r.CDI)
		}
	}
	return nil
}

// isNamed reports whether the result has the name that a device has in a slice, or the name of a share of it. Other
// packages decide on the name of a device whose ID is no UUID.
func (r *Result) isNamed(id gpu.DeviceID) bool {
	name := strings.ToLower(string(id))
	if !isUUID(id) {
		return true
	}
	share, isShare := strings.CutPrefix(r.Device, name+"-s")
	return r.Device == name || isShare && share != "" && strings.Trim(share, "0123456789") == ""
}

// published returns the UUIDs of the device and of its GPU as they were published; "" = the record lacks them.
func (r *Result) published() (parent, uuid gpu.DeviceID) {
	var d struct {
		Attributes map[string]struct{ String gpu.DeviceID }
	}
	if json.Unmarshal(r.Published, &d) != nil {
		return "", ""
	}
	return d.Attributes["parentUUID"].String, d.Attributes["uuid"].String
}

func (r *Result) hasCDI(id gpu.DeviceID) bool {
	return slices.ContainsFunc(r.CDI, func(name string) bool {
		return strings.EqualFold(string(cdiDevice(name)), string(id))
	})
}

// has reports whether the claim has a device.
func (c Claim) has(id gpu.DeviceID) bool {
	return slices.ContainsFunc(c.Results, func(r Result) bool {
		device, _ := r.Unit.Split()
		return strings.EqualFold(string(device), string(id))
	})
}

// cdiDevice returns the device of a qualified CDI name; "" if the name has no UUID of one.
func cdiDevice(name string) gpu.DeviceID {
	_, device, _ := strings.Cut(name, "=")
	if id := gpu.DeviceID(device); isUUID(id) {
		return id
	}
	return ""
}

// isUUID reports whether an ID has the form of a GPU's or a MIG instance's.
func isUUID(id gpu.DeviceID) bool {
	text := strings.ToLower(string(id))
	return (strings.HasPrefix(text, "gpu-") || strings.HasPrefix(text, "mig-")) &&
		strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}
