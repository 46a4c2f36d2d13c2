// Package explain answers what a request for devices would get, and why: which part of the configuration decides about a device, which
// devices are preferred, what the adapter responds. It reads values and calls nothing; the response is made by the adapter's own code.
package explain

import (
	"errors"
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// Adapter is what an orchestrator's adapter adds. Its functions are safe for concurrent use.
type Adapter struct {
	API    inventory.API // units that are offered through another one can't be given; "" = all can
	Listed bool          // the orchestrator takes the first devices that fit, in their order; else it asks which are preferred

	Name    func(u inventory.Unit) string                                            // in a request: "nvidia.com/gpu"
	Respond func(p inventory.Plan) Response                                          // what a container gets for a plan
	Notes   func(inv *inventory.Allocatable, units []inventory.Unit, n int) []string // what the orchestrator does with a request; n = 0: for these units

	Prove string // when GPUs are proved, in one line; "" = none is
	Reset string // when faulty GPUs are reset, in one line; "" = only by a person
}

// Args are what is asked.
type Args struct {
	Devices []string `json:"devices"` // see DeviceMatcher; also the ID of a unit, "UUID::n"
	Pool    string   `json:"pool"`    // with its domain or without; "" = the only one, or "gpu"
	Count   int      `json:"count"`   // number of units, the given devices among them; 0 = the given devices
}

// Input is what is known.
type Input struct {
	State   core.State
	Use     use.Table
	Adapter Adapter
}

// Explanation is an answer. Its JSON is an interface for scripts: keys are added, never changed.
type Explanation struct {
	Source   string    `json:"source,omitempty"` // report.FromAgent, report.FromDriver
	Devices  []Device  `json:"devices"`
	Requests []Request `json:"requests,omitempty"`
	Prove    string    `json:"prove,omitempty"` // when GPUs are proved; "" = none is
	Reset    string    `json:"reset,omitempty"` // when faulty GPUs are reset; "" = only by a person
	Warnings []string  `json:"warnings,omitempty"`
}

// Device is what the configuration makes of one device, and what decides that.
type Device struct {
	ID      string            `json:"id"`
	Index   string            `json:"index"` // NVML index, "0" or "0:1"
	PCI     gpu.PCIAddress    `json:"pci,omitempty"`
	Model   string            `json:"model,omitempty"`
	Outcome inventory.Outcome `json:"outcome"`          // offered, excluded, hidden
	Reason  string            `json:"reason,omitempty"` // of excluded and hidden
	By      string            `json:"by"`               // what decides the outcome: "rule policy.yaml:5: policy.rules[1].select"

	Pool        string `json:"pool,omitempty"`
	PoolBy      string `json:"poolBy,omitempty"`
	Sharing     string `json:"sharing,omitempty"`
	SharingBy   string `json:"sharingBy,omitempty"`
	MemoryLimit uint64 `json:"memoryLimitBytes,omitempty"` // of a share; 0 = none
	LimitedBy   string `json:"limitedBy,omitempty"`        // by what it is limited, in words
	Injection   string `json:"injection,omitempty"`
	InjectionBy string `json:"injectionBy,omitempty"`

	Schedulable bool     `json:"schedulable"`
	Health      string   `json:"health,omitempty"` // one line: faults, and the node's reasons (CDI, MPS, claims, pods, processes)
	HeldBy      []string `json:"heldBy,omitempty"`
	Others      []Other  `json:"others,omitempty"` // parts of the policy that select the device and decide nothing
}

// Other is a part of the policy that selects a device and decides nothing about it.
type Other struct {
	By  string `json:"by"`
	Why string `json:"why"`
}

// Request is a request for units of one pool by one container, and what it gets.
type Request struct {
	Pool  string             `json:"pool"`
	Name  string             `json:"name"`  // as a pod or a job has it
	Units []inventory.UnitID `json:"units"` // that it gets
	Count int                `json:"count,omitempty"`

	Available int              `json:"available,omitempty"`        // with Count: units of the pool that can be given now
	Method    inventory.Method `json:"method,omitempty"`           // with Count: how the units are chosen
	Pairs     []Pair           `json:"pairs,omitempty"`            // with Count: how the chosen GPUs are connected
	NotChosen []NotChosen      `json:"notChosen,omitempty"`        // with Count: the other devices of the pool
	Limit     uint64           `json:"memoryLimitBytes,omitempty"` // of the container, on each of its GPUs; 0 = none
	Refused   string           `json:"refused,omitempty"`          // why the agent would refuse it
	Injection string           `json:"injection,omitempty"`        // how the container gets the devices, and why
	Response  *Response        `json:"response,omitempty"`         // nil = refused
	Notes     []string         `json:"notes,omitempty"`            // what the orchestrator does
	chosen    []inventory.Unit
}

// Pair is how two GPUs are connected.
type Pair struct {
	A         gpu.DeviceID `json:"a"`
	B         gpu.DeviceID `json:"b"`
	NVLinks   int          `json:"nvLinks"`
	Bandwidth int          `json:"bandwidthGBps"` // of the NVLinks, in each direction
	NVSwitch  bool         `json:"nvSwitch,omitempty"`
	Path      string       `json:"pciePath"` // as nvidia-smi topo -m: PIX, PXB, PHB, NODE, SYS; board; unknown
	SameNUMA  bool         `json:"sameNUMANode"`
}

// NotChosen is a device of the pool that is not chosen.
type NotChosen struct {
	ID    gpu.DeviceID `json:"id"`
	Index string       `json:"index"`
	Why   string       `json:"why"`
}

// Response is what a container gets.
type Response struct {
	Env         map[string]string `json:"env"`
	DeviceNodes []Node            `json:"deviceNodes,omitempty"`
	Mounts      []Mount           `json:"mounts,omitempty"`
	CDIDevices  []string          `json:"cdiDevices,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Node is a device node.
type Node struct {
	HostPath      string `json:"hostPath"`
	ContainerPath string `json:"containerPath"`
	Permissions   string `json:"permissions"`
}

// Mount is a file or folder of the host.
type Mount struct {
	HostPath      string `json:"hostPath"`
	ContainerPath string `json:"containerPath"`
	ReadOnly      bool   `json:"readOnly,omitempty"`
}

// Refused is the error of requests that would be refused; nil if all would be answered.
func (e Explanation) Refused() error {
	var errs []error
	for _, r := range e.Requests {
		if r.Refused != "" {
			errs = append(errs, &RefusedError{Name: r.Name, Reason: r.Refused})
		}
	}
	return errors.Join(errs...)
}

// RefusedError is a request that would be refused.
type RefusedError struct{ Name, Reason string }

func (e *RefusedError) Error() string {
	return fmt.Sprintf("explain: a request for %s would be refused: %s", e.Name, e.Reason)
}

// Explain answers. Without arguments it is about every device. The error has every argument that is wrong (*setting.Error, joined).
func Explain(in Input, args Args) (Explanation, error) {
	x := explainer{Input: in, inv: in.State.Allocatable}
	if len(args.Devices) == 0 && args.Pool == "" && args.Count == 0 {
		return Explanation{Devices: x.devices(func(gpu.Device) bool { return true }), Prove: in.Adapter.Prove, Reset: in.Adapter.Reset}, nil
	}
	asked, err := x.resolve(args)
	if err != nil {
		return Explanation{}, err
	}
	if args.Count > 0 {
		return Explanation{Devices: x.devices(func(gpu.Device) bool { return true }), Requests: []Request{x.count(asked, args.Count)}}, nil
	}
	return Explanation{Devices: x.devices(func(d gpu.Device) bool { return asked.asked[d.ID] }), Requests: x.requests(asked.units)}, nil
}
