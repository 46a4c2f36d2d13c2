// Package spec builds CDI specifications (Container Device Interface, tags.cncf.io) from readings of the driver. It is pure.
package spec

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// AllDevices is the name of the CDI device that has all devices of a specification that are present.
const AllDevices = "all"

// controlNodes are the device nodes that each container gets, as far as the node has them: those of NVIDIA's library.
var controlNodes = []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"}

// Input is what a specification of GPUs and MIG instances is built from.
type Input struct {
	Kind    string                // vendor and class
	Devices []gpu.Device          // in canonical order, also those that are lost, unhealthy or not offered
	Lost    map[gpu.DeviceID]bool // those that the driver does not list any more
	Nodes   []string              // paths of NVIDIA's device nodes, sorted: see gpu.Snapshot
	DRM     map[gpu.PCIAddress]DRM
	DevRoot string // folder on the host that has dev/nvidia0 ...: "/"
	Indices bool   // containers get devices by index: one without such a name is not defined

	Common   specs.ContainerEdits             // without device nodes: what each container gets of the driver
	Symlinks func(links []string) *specs.Hook // creates links ("target::path") in a container; nil, or a nil hook = no links

	// MemoryLimits sets the memory limits that a container's variables have, on one GPU; nil, or a nil hook = no limits.
	MemoryLimits func(gpu.DeviceID) *specs.Hook
}

// DRM are the nodes of a GPU in the kernel's Direct Rendering Manager.
type DRM struct {
	Nodes []string // sorted: "/dev/dri/card1", "/dev/dri/renderD128"
	Links []string // to them, sorted: "../card1::/dev/dri/by-path/pci-0000:3b:00.0-card"
}

// Result is a specification and what it defines.
type Result struct {
	Spec      *specs.Spec             // nil = there is nothing to define
	Defined   []gpu.DeviceID          // with all of their device nodes, sorted
	Undefined []inventory.Undefined   // the other devices, sorted by ID
	Notes     []string                // names that can't be defined, one line each
	Names     map[string]gpu.DeviceID // of the devices, without AllDevices
}

// Build returns the specification of the devices. Each device has its UUID as a name and, unless it is lost, its present index.
//
// A device node has neither type nor number: the runtime reads them when it creates a container, and fails with the path if the
// node is missing. So a device whose node is missing stays in the specification, and only its own containers fail.
func Build(in Input) Result {
	b := builder{Input: in, result: Result{Names: map[string]gpu.DeviceID{}}}
	indices := b.indices()
	taken := b.presentNodes()
	var devices []specs.Device
	all := specs.Device{Name: AllDevices}
	for i := range in.Devices {
		d := &in.Devices[i]
		own := d.OwnNodes()
		lost := in.Lost[d.ID]
		switch {
		case d.Minor < 0 || len(own) == 0:
			b.undefined(d.ID, "its device node is not known")
			continue
		case lost && slices.ContainsFunc(own, func(path string) bool { return taken[path] }):
			// The driver gave its number to another GPU. A container that asks for the lost one must fail.
			b.undefined(d.ID, "lost, and its device node belongs to another GPU")
			continue
		}
		edits, index := b.edits(d, own), d.CurrentIndex().String()
		if name := string(d.ID); parser.ValidateDeviceName(name) == nil {
			devices = append(devices, specs.Device{Name: name, ContainerEdits: edits})
			b.result.Names[name] = d.ID
			if in.Indices && !lost && indices[index] > 1 {
				b.undefined(d.ID, "its index "+index+" is that of another device, too")
			} else {
				b.define(d)
			}
		} else {
			b.undefined(d.ID, "its UUID can't be the name of a CDI device")
			b.result.Notes = append(b.result.Notes, fmt.Sprintf("%s has no name in the CDI specification: CDI allows letters, digits, _, -, . and :", d.ID))
		}
		if lost {
			continue
		}
		if indices[index] == 1 {
			devices = append(devices, specs.Device{Name: index, ContainerEdits: edits})
			b.result.Names[index] = d.ID
		}
		all.ContainerEdits = merge(all.ContainerEdits, edits)
	}
	for index, n := range indices {
		if n > 1 {
			b.result.Notes = append(b.result.Notes, fmt.Sprintf("index %s is that of %d devices, and so the name of none", index, n))
		}
	}
	if len(devices) > 0 {
		if len(all.ContainerEdits.DeviceNodes) > 0 {
			devices = append(devices, all)
		}
		b.result.Spec = New(in.Kind, devices, b.common())
	}
	slices.Sort(b.result.Defined)
	slices.SortFunc(b.result.Undefined, func(x, y inventory.Undefined) int { return cmp.Compare(x.Device, y.Device) })
	slices.Sort(b.result.Notes)
	return b.result
}

// New returns a specification with the devices by name and the lowest version that has all of its fields: readers refuse a
// version that is newer than they are.
func New(kind string, devices []specs.Device, common specs.ContainerEdits) *specs.Spec {
	slices.SortFunc(devices, func(x, y specs.Device) int { return cmp.Compare(x.Name, y.Name) })
	s := &specs.Spec{Version: specs.CurrentVersion, Kind: kind, Devices: devices, ContainerEdits: common}
	if v, err := specs.MinimumRequiredVersion(s); err == nil { // else the validation fails
		s.Version = v
	}
	return s
}

type builder struct {
	Input
	result Result
}

// define records that a device is in the specification, and whether all of its nodes are there.
func (b *builder) define(d *gpu.Device) {
	missing := slices.DeleteFunc(d.RequiredNodes(), b.present)
	switch {
	case len(missing) == 0:
		b.result.Defined = append(b.result.Defined, d.ID)
	case len(b.Nodes) == 0:
		b.undefined(d.ID, "the host's device nodes are not visible to this process: mount the host's /dev")
	default:
		b.undefined(d.ID, fmt.Sprintf("device node %s is missing: run %s", strings.Join(missing, ", "), d.CreateNodesCommand(missing)))
	}
}

func (b *builder) undefined(id gpu.DeviceID, reason string) {
	b.result.Undefined = append(b.result.Undefined, inventory.Undefined{Device: id, Reason: reason})
}

func (b *builder) present(path string) bool {
	_, found := slices.BinarySearch(b.Nodes, path)
	return found
}

// indices counts the devices that are not lost by their index.
func (b *builder) indices() map[string]int {
	n := map[string]int{}
	for i := range b.Devices {
		if d := &b.Devices[i]; !b.Lost[d.ID] {
			n[d.CurrentIndex().String()]++
		}
	}
	return n
}

// presentNodes are the own nodes of the devices that are not lost.
func (b *builder) presentNodes() map[string]bool {
	taken := map[string]bool{}
	for i := range b.Devices {
		if d := &b.Devices[i]; !b.Lost[d.ID] {
			for _, path := range d.OwnNodes() {
				taken[path] = true
			}
		}
	}
	return taken
}

// edits are those of one device.
func (b *builder) edits(d *gpu.Device, own []string) specs.ContainerEdits {
	var e specs.ContainerEdits
	paths := slices.Clone(own)
	drm := b.DRM[d.PCI]
	if d.Profile != "" && !strings.Contains(d.Profile, "gfx") {
		drm = DRM{} // the instance has no graphics engine
	}
	paths = append(paths, drm.Nodes...)
	slices.Sort(paths)
	for _, path := range slices.Compact(paths) {
		e.DeviceNodes = append(e.DeviceNodes, Node(b.DevRoot, path))
	}
	var hooks []*specs.Hook
	if len(drm.Links) > 0 && b.Symlinks != nil {
		hooks = append(hooks, b.Symlinks(drm.Links))
	}
	if b.MemoryLimits != nil && d.Profile == "" && !d.MIG { // the driver charges nothing to a limit while MIG mode is enabled
		hooks = append(hooks, b.MemoryLimits(d.ID))
	}
	e.Hooks = slices.DeleteFunc(hooks, func(h *specs.Hook) bool { return h == nil })
	return e
}

// common is what each container gets.
func (b *builder) common() specs.ContainerEdits {
	e := b.Common
	for _, path := range controlNodes {
		if b.present(path) {
			e.DeviceNodes = append(e.DeviceNodes, Node(b.DevRoot, path))
		}
	}
	return e
}

// Node is a device node that a container may read and write, below a folder on the host.
func Node(devRoot, path string) *specs.DeviceNode {
	n := &specs.DeviceNode{Path: path, Permissions: "rw"}
	if host := Join(devRoot, path); host != path {
		n.HostPath = host // one that equals the path would need a newer version of the format
	}
	return n
}

// merge adds the edits of another device; nodes and hooks that both have are added once.
func merge(e, other specs.ContainerEdits) specs.ContainerEdits {
	for _, n := range other.DeviceNodes {
		if !slices.ContainsFunc(e.DeviceNodes, func(m *specs.DeviceNode) bool { return m.Path == n.Path }) {
			e.DeviceNodes = append(e.DeviceNodes, n)
		}
	}
	slices.SortFunc(e.DeviceNodes, func(x, y *specs.DeviceNode) int { return cmp.Compare(x.Path, y.Path) })
	for _, h := range other.Hooks {
		if !slices.ContainsFunc(e.Hooks, func(g *specs.Hook) bool { return slices.Equal(g.Args, h.Args) }) {
			e.Hooks = append(e.Hooks, h)
		}
	}
	return e
}
