package inventory

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Injection configures how a container gets the devices of its plan. The adapters translate it.
type Injection struct {
	Name      string  // by which an operator configured it, for reports: "envvar,cdi-cri"
	Runtime   bool    // by NVIDIA's container runtime, which acts on an environment variable
	Nodes     bool    // by device nodes in the plan
	CDI       CDIMode // by names of CDI devices in the plan
	Libraries bool    // the driver's files as mounts in the plan
}

// Ways names in which ways containers get the devices, by CDI too or not: "NVIDIA's container runtime, CDI".
func (i Injection) Ways(cdi bool) string {
	var ways []string
	for _, way := range []struct {
		on   bool
		name string
	}{{i.Runtime, "NVIDIA's container runtime"}, {i.Nodes, "device nodes"}, {cdi, "CDI"}, {i.Libraries, "mounts of the driver's files"}} {
		if way.on {
			ways = append(ways, way.name)
		}
	}
	return strings.Join(ways, ", ")
}

// CDIMode is whether plans have the names of CDI devices.
type CDIMode uint8

// The CDI modes.
const (
	CDIOff      CDIMode = iota
	CDIRequired         // a unit takes new work only while its device is defined
	CDIAuto             // as CDIRequired while CDI.Usable, else as CDIOff
)

// usesCDI reports whether a unit with this injection needs what c has. Whether CDIAuto does is not known before an incarnation of
// the driver was looked at.
func (i Injection) usesCDI(c *CDI, incarnation int) bool {
	return i.CDI == CDIRequired || i.Libraries || i.CDI == CDIAuto && (c == nil || c.Usable || c.Incarnation != incarnation)
}

// CDI is what this agent's CDI specifications on the host define (Container Device Interface, tags.cncf.io). It is immutable.
type CDI struct {
	// Incarnation of the driver (Inventory.Incarnation) for which the specification was written. One that was written for an
	// earlier incarnation may have device numbers and files that are no longer valid.
	Incarnation int

	Folder    string         // of the specifications on the host
	Kind      string         // vendor and class of the devices: "k8s.device-plugin.nvidia.com/gpu"
	Defined   []gpu.DeviceID // devices that are defined with all of their device nodes, sorted
	Problem   string         // why other devices are not, one line; "" = none
	Undefined []Undefined    // devices with a reason of their own, sorted by ID
	Others    []string       // qualified names that each container gets beside those of its devices, in their order
	Libraries []Mount        // the driver's files, sorted by container path

	Usable bool   // the specification is valid and a container with it has a working driver: see CDIAuto
	Reason string // why it is usable or not, one line

	NoStart  string // why no container with one of the devices starts, one line, such as a missing hook program; "" = none is known
	NoLimits string // why memory limits that containers ask for have no effect, one line; "" = they have, or the driver has no limits

	// Of the limits by which a policy limits shares.
	NoHook        string         // why NVIDIA's hook sets no limit for a container, one line; "" = it does, or no unit needs it
	LimitKind     string         // vendor and class of the devices that have a limit: "k8s.device-plugin.nvidia.com/memory-limit"
	Limits        []uint64       // that have a device, in bytes, sorted
	LimitsProblem string         // why others have none, one line
	WithoutHook   []gpu.DeviceID // devices whose containers NVIDIA's hook sets no limit for, because the agent limits their pods; sorted
}

// Undefined is a device that the specification can't define completely.
type Undefined struct {
	Device gpu.DeviceID
	Reason string // "device node /dev/nvidia3 is missing"
}

// Mount is a file or folder of the host in a container.
type Mount struct {
	HostPath, ContainerPath string
	ReadOnly                bool
}

// defines reports whether a device is defined for an incarnation of the driver, and otherwise why not.
func (c *CDI) defines(id gpu.DeviceID, incarnation int) (ok bool, why string) {
	const notWritten = "not written yet"
	if c == nil || c.Incarnation != incarnation {
		return false, notWritten
	}
	if _, found := slices.BinarySearch(c.Defined, id); found {
		return true, ""
	}
	for _, u := range c.Undefined {
		if u.Device == id {
			return false, u.Reason
		}
	}
	return false, cmp.Or(c.Problem, notWritten)
}

// gives reports whether a container gets a unit's device by its definition, and otherwise why not. That no container starts counts for claims
// only: containers have no other way to their devices. For the other APIs an operator has chosen CDI, and the evidence is a warning.
func (c *CDI) gives(u *Unit, incarnation int) (ok bool, why string) {
	switch ok, why = c.defines(u.Device.ID, incarnation); {
	case ok && u.API == DRA && c.NoStart != "":
		return false, c.NoStart
	case ok && u.limitedByPod() && !c.withoutHook(u.Device.ID):
		return false, "not written yet without the hook for limits, as the agent limits the pod"
	}
	return ok, why
}

func (c *CDI) withoutHook(id gpu.DeviceID) bool {
	_, found := slices.BinarySearch(c.WithoutHook, id)
	return found
}

// noLimit returns why a container with a device does not get a limit by NVIDIA's hook; "" if it does.
func (c *CDI) noLimit(id gpu.DeviceID, limit uint64) (reason health.Reason, why string) {
	switch {
	case c == nil:
		return health.ReasonNoCDI, "not written yet"
	case c.NoHook != "":
		return health.ReasonNoLimit, c.NoHook
	case c.withoutHook(id):
		return health.ReasonNoCDI, "not written yet with the hook for limits"
	}
	if _, found := slices.BinarySearch(c.Limits, limit); !found {
		return health.ReasonNoCDI, cmp.Or(c.LimitsProblem, fmt.Sprintf("no device for the limit of %d MiB is written yet", limit/gpu.MiB))
	}
	return health.ReasonNone, ""
}

// LimitClass is the class of the CDI devices that have a limit. Each is named by its limit in MiB.
const LimitClass = "memory-limit"

// limitName returns the qualified name of the CDI device that has a limit: its edits are the variables that NVIDIA's hook reads.
func (c *CDI) limitName(limit uint64) string { return fmt.Sprintf("%s=%d", c.LimitKind, limit/gpu.MiB) }

// ParseLimit returns the limit of a CDI device of LimitClass by its name without the kind, in bytes; false if the name is none of that class.
func ParseLimit(device string) (limit uint64, ok bool) {
	mib, err := strconv.ParseUint(device, 10, 44)
	return mib * gpu.MiB, err == nil && mib > 0
}

// Equal reports whether two CDI values are equal; nil equals nil.
func (c *CDI) Equal(d *CDI) bool {
	if c == nil || d == nil {
		return c == d
	}
	return c == d || c.Incarnation == d.Incarnation && c.Folder == d.Folder && c.Kind == d.Kind && c.Problem == d.Problem && c.Usable == d.Usable && c.Reason == d.Reason && c.NoStart == d.NoStart && c.NoLimits == d.NoLimits &&
		c.NoHook == d.NoHook && c.LimitKind == d.LimitKind && c.LimitsProblem == d.LimitsProblem && slices.Equal(c.Limits, d.Limits) && slices.Equal(c.WithoutHook, d.WithoutHook) &&
		slices.Equal(c.Defined, d.Defined) && slices.Equal(c.Undefined, d.Undefined) && slices.Equal(c.Others, d.Others) &&
		slices.Equal(c.Libraries, d.Libraries)
}

// names returns the qualified names of CDI devices for a container with devices of these IDs.
func (c *CDI) names(ids []string) []string {
	names := make([]string, 0, len(ids)+len(c.Others))
	for _, id := range ids {
		names = append(names, c.Kind+"="+id)
	}
	return append(names, c.Others...)
}

// CDI returns what this agent's CDI specifications define; nil if it is not known yet, or no unit needs CDI.
func (a *Allocatable) CDI() *CDI { return a.cdi }

// UsesCDI reports whether plans with an injection have the names of CDI devices at present.
func (a *Allocatable) UsesCDI(i Injection) bool {
	return i.CDI == CDIRequired || i.CDI == CDIAuto && a.cdi != nil && a.cdi.Usable
}

// NeedsCDI reports whether units need a CDI specification, or would use a valid one.
func (a *Allocatable) NeedsCDI() bool { return a.needsCDI }

// CDIDevices counts the devices of units that CDI specifications define for the present driver, and those that they do not. It returns
// false if this is not known yet, or no unit needs CDI.
func (a *Allocatable) CDIDevices() (defined, undefined int, known bool) {
	if a.cdi == nil {
		return 0, 0, false
	}
	for u := range a.Devices() {
		if ok, _ := a.cdi.defines(u.Device.ID, a.incarnation); ok {
			defined++
		} else {
			undefined++
		}
	}
	return defined, undefined, true
}

// Incarnation returns the number of the driver's incarnation: it changes when the driver becomes ready after it was not.
func (inv *Inventory) Incarnation() int { return inv.orEmpty().incarnation }
