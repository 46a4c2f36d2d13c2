// Package coretest has fakes of the driver and of the monitor for tests of the packages above them.
package coretest

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Source is a fake monitor, as the adapters need one: its inventory is set by the test.
type Source struct {
	allocatable *watch.Value[*inventory.Allocatable]

	mu    sync.Mutex
	usage []gpu.Usage
	err   error
}

// NewSource returns a source whose driver is pending.
func NewSource() *Source {
	pending := gpu.NoDriver(gpu.DriverPending, "not asked yet")
	return &Source{allocatable: watch.NewValue(core.Build(pending, health.Ledger{}, core.DefaultConfig()).WithoutHost())}
}

// Set publishes what takes work.
func (s *Source) Set(inv *inventory.Allocatable) { s.allocatable.Store(inv) }

// SetUsage sets the result of Usage.
func (s *Source) SetUsage(usage []gpu.Usage, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.usage, s.err = usage, err
}

// Current is what was set last.
func (s *Source) Current() *inventory.Allocatable { return s.allocatable.Load() }

// Changed returns a channel that the next Set closes.
func (s *Source) Changed() <-chan struct{} { return s.allocatable.Changed() }

// Watch yields the present value and each later one.
func (s *Source) Watch(ctx context.Context) iter.Seq[*inventory.Allocatable] {
	return s.allocatable.Watch(ctx)
}

// Usage returns the result set by SetUsage.
func (s *Source) Usage(ctx context.Context) ([]gpu.Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usage, s.err
}

// ApplyPolicy has no effect.
func (s *Source) ApplyPolicy(context.Context, core.Config) error { return nil }

// Reserved has no effect.
func (s *Source) Reserved([]gpu.Device) {}

// CheckReservation finds nothing.
func (s *Source) CheckReservation([]inventory.Unit) ([]inventory.Finding, error) { return nil, nil }

// GPUs is a snapshot of n H100s without MIG on two NUMA nodes, every pair connected by 18 NVLinks.
func GPUs(n int) gpu.Snapshot {
	s := gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady, Version: "580.95.05", CUDA: "13.0"}}
	for i := range n {
		id := GPU(i)
		s.Devices = append(s.Devices, gpu.Device{
			ID: id, At: gpu.WholeGPU(id), Index: i, Model: "NVIDIA H100 80GB HBM3", CanMIG: true,
			PCI: gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x10+i)), NUMANode: i * 2 / max(n, 1), Minor: i,
			Memory: 81559 << 20, BAR1: 131072 << 20, PowerLimit: 700_000, CoreClock: 1980, MemoryClock: 2619,
			PCIeGen: 5, PCIeWidth: 16, Compute: gpu.Compute{Major: 9},
			DisplayState: gpu.Disabled, PersistenceMode: gpu.Enabled,
		})
		for j := range i {
			s.Links = append(s.Links, gpu.Link{A: GPU(j), B: id, Path: gpu.PathSystem, NVLinks: 18})
		}
		s.Nodes = append(s.Nodes, fmt.Sprintf("/dev/nvidia%d", i))
	}
	s.Nodes = append(s.Nodes, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
	return gpu.NewSnapshot(s)
}

// GPU is the UUID of the n-th GPU of GPUs.
func GPU(n int) gpu.DeviceID {
	return gpu.DeviceID(fmt.Sprintf("GPU-00000000-0000-4000-8000-%012d", n))
}

// WithMIG is s with GPU n in MIG mode and partitioned into instances of these profiles, one compute instance in each GPU
// instance. WithMIG(s, n) is a GPU in MIG mode without instances.
func WithMIG(s gpu.Snapshot, n int, profiles ...string) gpu.Snapshot {
	s.Devices, s.Nodes = slices.Clone(s.Devices), slices.Clone(s.Nodes)
	at := slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.ID == GPU(n) })
	s.Devices[at].MIG = true
	for i, profile := range profiles {
		d := s.Devices[at]
		d.ID, d.At = Instance(n, i), gpu.Placement{GPU: d.ID, GI: uint32(i + 1), CI: 0} //nolint:gosec // a GPU has seven
		d.Instance, d.Profile, d.MIG, d.CanMIG = i, profile, false, false
		d.Model += " MIG " + profile
		d.Memory /= 8
		d.GICap, d.CICap = 100*(n+1)+10*i, 100*(n+1)+10*i+1
		s.Devices = append(s.Devices, d)
		s.Nodes = append(s.Nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.GICap), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.CICap))
	}
	return gpu.NewSnapshot(s)
}

// Instance is the UUID of the i-th MIG instance of GPU n in WithMIG.
func Instance(n, i int) gpu.DeviceID {
	return gpu.DeviceID(fmt.Sprintf("MIG-00000000-0000-4000-8000-%09d%03d", n, i))
}
