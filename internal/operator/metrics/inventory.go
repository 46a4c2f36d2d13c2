package metrics

import (
	"maps"
	"slices"
	"strconv"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// The metrics of what is offered.
var (
	devices = shared.Gauge("devices", "Devices by resource and health. A shared device counts once for each of its units.", "resource", "health")
	units   = shared.Gauge("device_units", "Units that the device is offered as: 1, or the number of its shares.", "device", "resource", "sharing")
	info    = shared.Gauge("device_info", "An offered device: a GPU, or a MIG instance of the GPU. mig_instance and profile are empty for a GPU, numa if it has no affinity.",
		"device", "gpu", "index", "mig_instance", "model", "profile", "pci", "numa")
	policy   = shared.Gauge("policy_warnings", "Problems of the policy on this node; inspect and the log have the texts.")
	overlaps = shared.Gauge("device_overlaps", "Devices that another agent on this node offers, too.")
	nodes    = shared.Gauge("device_nodes_missing",
		"Device nodes that containers of the device need and the node lacks; inspect names them. No series if containers get neither nodes nor CDI names.", "device")
	cdiDevices = shared.Gauge("cdi_devices",
		"Offered devices that the CDI specification defines, or does not define. No series if no specification is needed, or none was attempted yet.", "state")
	excluded   = shared.Gauge("devices_excluded", "Devices that were found and are not offered.")
	unreadable = shared.Gauge("devices_unreadable", "Devices among devices_excluded that can't be read: a fault, not a decision of the policy.")
	driverInfo = shared.Gauge("driver_info", "The driver: pending, absent, failed, ready or released (maintenance).", "state", "version", "cuda")
)

func collectInventory(p *metric.Samples, s Source) {
	inv := s.State.Allocatable
	driver := inv.Driver()
	p.Add(driverInfo, 1, driver.State.String(), driver.Version, driver.CUDA)
	p.Add(excluded, float64(len(inv.Excluded())))
	p.Add(unreadable, float64(failed(inv.Excluded())))
	p.Add(policy, float64(len(inv.PolicyWarnings())+len(inv.OutdatedBindings())))
	p.Add(overlaps, float64(len(inv.Overlaps())))
	for u := range inv.Devices() {
		d := u.Device
		if missing, known := inv.MissingNodes(d); known {
			p.Add(nodes, float64(len(missing)), string(d.ID))
		}
		p.Add(info, 1, string(d.ID), string(d.At.GPU), strconv.Itoa(d.Index), migIndex(d), d.Model, d.Profile, string(d.PCI), numaNode(d))
	}
	if defined, undefined, known := inv.CDIDevices(); known {
		p.Add(cdiDevices, float64(defined), "defined")
		p.Add(cdiDevices, float64(undefined), "undefined")
	}
	collectUnits(p, s)
}

// failed counts the devices that can't be read.
func failed(excluded []gpu.Exclusion) (n int) {
	for _, e := range excluded {
		if e.Failure != gpu.NotFailed {
			n++
		}
	}
	return n
}

func migIndex(d gpu.Device) string {
	if d.Profile == "" {
		return ""
	}
	return strconv.Itoa(d.Instance)
}

func numaNode(d gpu.Device) string {
	if d.NUMANode < 0 {
		return ""
	}
	return strconv.Itoa(d.NUMANode)
}

// offer is a way in which a device is offered: while a policy changes, a device has two.
type offer struct {
	device   gpu.DeviceID
	resource string
	mode     inventory.SharingMode
}

// collectUnits counts units. The number of series is that of devices, not of shares.
func collectUnits(p *metric.Samples, s Source) {
	byState := map[string]*[health.GPULost + 1]float64{}
	for _, r := range s.Resources {
		byState[r] = new([health.GPULost + 1]float64)
	}
	var offers []offer // of one device
	var counts []float64
	flush := func() {
		for i, o := range offers {
			p.Add(units, counts[i], string(o.device), o.resource, o.mode.String())
		}
		offers, counts = offers[:0], counts[:0]
	}
	for u := range s.State.Allocatable.Units() {
		o := offer{u.Device.ID, s.ResourceOf(u), u.Sharing.Mode}
		if byState[o.resource] == nil {
			byState[o.resource] = new([health.GPULost + 1]float64)
		}
		byState[o.resource][u.Health.State]++
		if len(offers) > 0 && offers[0].device != o.device {
			flush()
		}
		i := slices.Index(offers, o)
		if i < 0 {
			i, offers, counts = len(offers), append(offers, o), append(counts, 0)
		}
		counts[i]++
	}
	flush()
	for _, r := range slices.Sorted(maps.Keys(byState)) {
		for h, n := range byState[r] {
			p.Add(devices, n, r, health.State(h).String())
		}
	}
}
