package parity

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// incumbent is what NVIDIA's k8s-device-plugin v0.20.0 makes of a file and a machine, by its own rules: written from
// its sources (internal/rm/device_map.go, internal/rm/rm.go, internal/plugin/server.go and mps.go,
// api/config/v1/config.go) and not from ours. What it leaves to the order of Go's maps is sorted here.
type incumbent struct {
	file struct {
		Flags struct {
			MIGStrategy string `yaml:"migStrategy"`
		}
		Sharing struct {
			TimeSlicing replicated `yaml:"timeSlicing"`
			MPS         replicated
		}
	}
	byID      map[string]gpu.Device
	resources map[string][]string // IDs by resource, sorted
}

// replicated is a section "sharing". What else it may say (rename, devices) is parsed and dropped with a warning.
type replicated struct {
	RenameByDefault            bool  `yaml:"renameByDefault"`
	FailRequestsGreaterThanOne *bool `yaml:"failRequestsGreaterThanOne"`
	Resources                  []struct {
		Name     string
		Replicas int
	}
}

// newIncumbent is an error if the plugin would not start.
func newIncumbent(file []byte, devices []gpu.Device) (*incumbent, error) {
	p := &incumbent{byID: map[string]gpu.Device{}, resources: map[string][]string{}}
	if err := yaml.Unmarshal(file, &p.file); err != nil {
		return nil, err
	}
	plain, err := p.plain(devices)
	if err != nil {
		return nil, err
	}
	for name, ids := range plain {
		of, n := p.sharing(), 1
		for _, r := range of.Resources {
			if domain(r.Name) == name {
				n = r.Replicas
			}
		}
		if n > 1 && of.RenameByDefault {
			name += ".shared"
		}
		for _, id := range ids {
			if n == 1 {
				p.resources[name] = append(p.resources[name], id)
				continue
			}
			for i := range n {
				p.resources[name] = append(p.resources[name], fmt.Sprintf("%s::%d", id, i))
			}
		}
		slices.Sort(p.resources[name])
	}
	return p, nil
}

func domain(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return "nvidia.com/" + name
}

// sharing is what counts: MPS wins over time-slicing.
func (p *incumbent) sharing() replicated {
	if p.mps() {
		return p.file.Sharing.MPS
	}
	return p.file.Sharing.TimeSlicing
}

func (p *incumbent) mps() bool { return len(p.file.Sharing.MPS.Resources) > 0 }

// plain are the devices by resource before any is shared.
func (p *incumbent) plain(devices []gpu.Device) (map[string][]string, error) {
	resources := map[string][]string{}
	strategy := p.file.Flags.MIGStrategy
	profiles, full := map[string]bool{}, false
	for _, d := range devices {
		name := "nvidia.com/gpu"
		switch {
		case d.Profile == "" && d.MIG && strategy != "" && strategy != "none":
			if !slices.ContainsFunc(devices, func(i gpu.Device) bool { return i.Profile != "" && i.At.GPU == d.ID }) {
				return nil, errors.New("at least one device with migEnabled=true was not configured correctly")
			}
			continue
		case d.Profile == "":
			full = true
		case strategy == "mixed":
			if strings.Contains(d.Profile, "c.") {
				return nil, fmt.Errorf("MIG profile '%s' does not match any resource patterns", d.Profile)
			}
			name = "nvidia.com/mig-" + strings.ReplaceAll(d.Profile, "+", ".")
		case strategy == "single":
			profiles[d.Profile] = true
		default:
			continue
		}
		if p.mps() && d.Profile != "" {
			return nil, errors.New("sharing using MPS is not supported for MIG devices")
		}
		p.byID[string(d.ID)] = d
		resources[name] = append(resources[name], string(d.ID))
	}
	if len(profiles) > 1 {
		return nil, errors.New("more than one MIG device type present on node")
	}
	if len(profiles) > 0 && full {
		return nil, errors.New("all devices on the node must be configured with the same migEnabled value")
	}
	return resources, nil
}

// allocate is its answer to an Allocate: environment, mounts, and device nodes as with passDeviceSpecs.
func (p *incumbent) allocate(resource string, ids ...string) (answer, error) {
	shared := false
	var visible, paths []string
	for _, id := range ids {
		if !slices.Contains(p.resources[resource], id) {
			return answer{}, fmt.Errorf("invalid allocation request for %q: invalid request: unknown device: %s", resource, id)
		}
		uuid, _, replica := strings.Cut(id, "::")
		shared = shared || replica
		if !slices.Contains(visible, uuid) {
			visible = append(visible, uuid)
		}
		paths = append(paths, nodes(p.byID[uuid])...) // of two replicas of one GPU twice
	}
	one := p.sharing().FailRequestsGreaterThanOne
	if shared && len(ids) > 1 && (p.mps() || one != nil && *one) {
		return answer{}, fmt.Errorf("invalid allocation request for %q: invalid request: maximum request size for shared resources is 1; found %d", resource, len(ids))
	}
	a := answer{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(visible, ",")}, Nodes: paths}
	if p.mps() { // also for a resource that is not shared
		a.Envs["CUDA_MPS_PIPE_DIRECTORY"] = "/mps/" + resource + "/pipe"
		a.Mounts = []string{
			"/run/nvidia/mps/" + resource + "/pipe -> /mps/" + resource + "/pipe",
			"/run/nvidia/mps/shm -> /dev/shm",
		}
	}
	return a, nil
}

// nodes are those of a device alone; four more are for every container.
func nodes(d gpu.Device) []string {
	paths := []string{fmt.Sprintf("/dev/nvidia%d", d.Minor)}
	if d.Profile != "" {
		paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.GICap), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.CICap))
	}
	return paths
}
