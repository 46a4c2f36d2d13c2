// Package incumbent is a model of NVIDIA's k8s-device-plugin v0.20.0: what it offers and answers, written from its sources
// (internal/rm/device_map.go, internal/rm/rm.go, internal/plugin/server.go and mps.go, api/config/v1/config.go) and its documents, and not
// from ours. What it leaves to the order of Go's maps is sorted here.
package incumbent

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Config is what its file, flags and environment configure. The zero value is its default.
type Config struct {
	MIG        string         // migStrategy; "" = none
	Shares     map[string]int // replicas, by resource without "nvidia.com/"; of MPS, or else of time-slicing
	Renamed    bool           // renameByDefault
	MPS        bool
	OneShare   bool     // failRequestsGreaterThanOne
	Strategies []string // deviceListStrategy; nil = envvar
	Nodes      bool     // passDeviceSpecs, or compatWithCPUManager
	IMEX       bool     // channel 0
	NeedsIMEX  bool     // imex.required
}

// Plugin is the plugin with a configuration on a machine.
type Plugin struct {
	Config
	snapshot  gpu.Snapshot
	Resources map[string][]string // IDs by resource without "nvidia.com/", sorted
}

// New is an error if the plugin ends at its start.
func New(c Config, s gpu.Snapshot) (*Plugin, error) {
	if c.NeedsIMEX && !slices.Contains(s.Nodes, gpu.IMEXChannelNode) {
		return nil, errors.New("IMEX channel 0 is required and missing")
	}
	devices, err := c.devices(s.Devices)
	if err != nil {
		return nil, err
	}
	p := &Plugin{Config: c, snapshot: s, Resources: map[string][]string{}}
	for name, ids := range devices {
		n := max(1, c.Shares[name])
		if n > 1 && c.Renamed {
			name += ".shared"
		}
		for _, id := range ids {
			if n == 1 {
				p.Resources[name] = append(p.Resources[name], id)
				continue
			}
			for i := range n {
				p.Resources[name] = append(p.Resources[name], fmt.Sprintf("%s::%d", id, i))
			}
		}
		slices.Sort(p.Resources[name])
	}
	return p, nil
}

// devices are those by resource before any is shared.
func (c Config) devices(all []gpu.Device) (map[string][]string, error) {
	resources := map[string][]string{}
	profiles, full := map[string]bool{}, false
	for _, d := range all {
		name := "gpu"
		switch {
		case d.Profile == "" && d.MIG && c.MIG != "" && c.MIG != "none":
			if !slices.ContainsFunc(all, func(i gpu.Device) bool { return i.Profile != "" && i.At.GPU == d.ID }) {
				return nil, errors.New("a GPU in MIG mode without instances")
			}
			continue
		case d.Profile == "":
			full = true
		case c.MIG == "mixed":
			if strings.Contains(d.Profile, "c.") { // compute instances: 1c.3g.20gb
				return nil, fmt.Errorf("no resource for MIG profile %s", d.Profile)
			}
			name = "mig-" + strings.ReplaceAll(d.Profile, "+", ".")
		case c.MIG == "single":
			profiles[d.Profile] = true
		default:
			continue
		}
		if c.MPS && d.Profile != "" {
			return nil, errors.New("MPS of MIG devices")
		}
		resources[name] = append(resources[name], string(d.ID))
	}
	if len(profiles) > 1 || len(profiles) > 0 && full {
		return nil, errors.New("MIG strategy single on a node whose GPUs differ")
	}
	return resources, nil
}

// Answer is the answer to an Allocate.
type Answer struct {
	Env           map[string]string
	Mounts, Nodes []string // "HOST -> CONTAINER", and paths; of the nodes those of the devices alone, once each
	CDI           []string // names in annotations
}

// Allocate is the answer for units of a resource.
func (p *Plugin) Allocate(resource string, units ...string) (Answer, error) {
	var ids []string
	for _, u := range units {
		if !slices.Contains(p.Resources[resource], u) {
			return Answer{}, fmt.Errorf("invalid allocation request for \"nvidia.com/%s\": invalid request: unknown device: %s", resource, u)
		}
		id, _, shared := strings.Cut(u, "::")
		if shared && len(units) > 1 && (p.MPS || p.OneShare) {
			return Answer{}, fmt.Errorf("invalid allocation request for \"nvidia.com/%s\": invalid request: maximum request size for shared resources is 1; found %d", resource, len(units))
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	a := Answer{Env: map[string]string{}, Nodes: p.nodes(ids)}
	if p.Strategies == nil || slices.Contains(p.Strategies, "envvar") {
		a.Env["NVIDIA_VISIBLE_DEVICES"] = strings.Join(ids, ",")
		if p.IMEX && slices.Contains(p.snapshot.Nodes, gpu.IMEXChannelNode) {
			a.Env["NVIDIA_IMEX_CHANNELS"] = "0"
		}
	}
	if slices.Contains(p.Strategies, "cdi-annotations") {
		for _, id := range ids {
			a.CDI = append(a.CDI, "k8s.device-plugin.nvidia.com/gpu="+id)
		}
	}
	if p.MPS { // also for a resource that is not shared
		pipe := "/mps/nvidia.com/" + resource + "/pipe"
		a.Env["CUDA_MPS_PIPE_DIRECTORY"] = pipe
		a.Mounts = []string{"/run/nvidia/mps/nvidia.com/" + resource + "/pipe -> " + pipe, "/run/nvidia/mps/shm -> /dev/shm"}
	}
	return a, nil
}

// nodes are those of devices, sorted; none without Nodes.
func (p *Plugin) nodes(ids []string) (paths []string) {
	if !p.Nodes {
		return nil
	}
	for _, d := range p.snapshot.Devices {
		if !slices.Contains(ids, string(d.ID)) {
			continue
		}
		paths = append(paths, fmt.Sprintf("/dev/nvidia%d", d.Minor))
		if d.Profile != "" {
			paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.GICap), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.CICap))
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// CommonNodes are those that every container gets beside, if the node has them.
var CommonNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
