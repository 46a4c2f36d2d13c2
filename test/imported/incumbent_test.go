package imported

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// original is what an example configures, as NVIDIA's documents describe it. It is written down by hand here: the importer has no part
// in it.
type original struct {
	mig        string // "none" if empty
	strategies []string
	nodes      bool // pass-device-specs, or compatWithCPUManager
	shares     map[string]int
	renamed    bool // renameByDefault
	mps        bool
	imex       bool
	required   bool // imex.required
}

// originals are the examples, by file and, if it has several, name of the configuration. One that is missing here has defaults.
var originals = map[string]original{
	"readme-config1.yaml":                {mig: "mixed"},
	"readme-time-slicing.yaml":           {shares: map[string]int{"gpu": 10}},
	"readme-time-slicing-renamed.yaml":   {shares: map[string]int{"gpu": 10}, renamed: true},
	"readme-mps.yaml":                    {shares: map[string]int{"gpu": 10}, mps: true},
	"readme-mps-renamed.yaml":            {shares: map[string]int{"gpu": 10}, mps: true, renamed: true},
	"readme-imex.yaml":                   {imex: true},
	"readme-imex-required.yaml":          {imex: true, required: true},
	"values-config-files.yaml config1":   {mig: "mixed"},
	"values-cpumanager.yaml":             {nodes: true},
	"values-cpumanager-mixed.yaml":       {nodes: true, mig: "mixed"},
	"values-cdi.yaml":                    {strategies: []string{"cdi-annotations"}},
	"static-flags.yaml":                  {nodes: true},
	"values-map.yaml mig-single":         {mig: "single"},
	"values-map.yaml mig-mixed":          {mig: "mixed"},
	"static-cpumanager.yaml":             {nodes: true},
	"static-service-account.yaml":        {nodes: true},
	"operator-time-slicing-all.yaml any": {shares: map[string]int{"gpu": 4}},
	"operator-time-slicing-fine.yaml a100-40gb": {
		mig: "mixed", shares: map[string]int{"gpu": 8, "mig-1g.5gb": 2, "mig-2g.10gb": 2, "mig-3g.20gb": 3, "mig-7g.40gb": 7},
	},
	"operator-time-slicing-fine.yaml tesla-t4": {shares: map[string]int{"gpu": 4}},
	"operator-patch.yaml":                      {mig: "single", nodes: true},
	"operator-values-name.yaml":                {mig: "single", nodes: true},
	"operator-values.yaml ts":                  {mig: "mixed", nodes: true, shares: map[string]int{"gpu": 2}, renamed: true},
	"operator-values.yaml all-disabled":        {mig: "mixed", nodes: true},
}

// resources are the device IDs that NVIDIA's plugin 0.20.0 lists, by resource (internal/rm/device_map.go), or why it ends.
func (o original) resources(s gpu.Snapshot) (map[string][]string, error) {
	all := map[string][]string{}
	profiles, full := map[string]bool{}, false
	for _, d := range s.Devices {
		switch {
		case d.Profile == "" && (!d.MIG || o.migStrategy() == "none"):
			full = true
			all["gpu"] = append(all["gpu"], string(d.ID))
		case d.Profile == "" || o.migStrategy() == "none":
		case o.migStrategy() == "single":
			profiles[d.Profile] = true
			all["gpu"] = append(all["gpu"], string(d.ID))
		default:
			if strings.Count(strings.SplitN(d.Profile, "g.", 2)[0], ".") > 0 { // compute instances: 1c.3g.20gb
				return nil, fmt.Errorf("no resource for MIG profile %s", d.Profile)
			}
			name := "mig-" + strings.ReplaceAll(d.Profile, "+", ".")
			all[name] = append(all[name], string(d.ID))
		}
	}
	if o.migStrategy() == "single" && (len(profiles) > 1 || len(profiles) == 1 && full) {
		return nil, fmt.Errorf("MIG strategy single on a node whose GPUs differ")
	}
	if o.mps && o.migStrategy() == "mixed" {
		return nil, fmt.Errorf("MPS under MIG strategy mixed")
	}
	if o.required && !slices.Contains(s.Nodes, gpu.IMEXChannelNode) {
		return nil, fmt.Errorf("IMEX channel 0 is required and missing")
	}
	for name, n := range o.shares {
		ids := all[name]
		if ids == nil {
			continue
		}
		delete(all, name)
		if o.renamed {
			name += ".shared"
		}
		for _, id := range ids {
			for i := range n {
				all[name] = append(all[name], fmt.Sprintf("%s::%d", id, i))
			}
		}
	}
	return all, nil
}

func (o original) migStrategy() string {
	if o.mig == "" {
		return "none"
	}
	return o.mig
}

// answer is the Allocate response for units of a resource (internal/plugin/server.go), a line for each part; "error" if it refuses.
func (o original) answer(s gpu.Snapshot, resource string, units []string) []string {
	var ids, lines []string
	for _, u := range units {
		id, _, shared := strings.Cut(u, "::")
		if shared && o.mps && len(units) > 1 {
			return []string{"error"}
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	strategies := o.strategies
	if strategies == nil {
		strategies = []string{"envvar"}
	}
	for _, strategy := range strategies {
		switch strategy {
		case "envvar":
			lines = append(lines, "env NVIDIA_VISIBLE_DEVICES="+strings.Join(ids, ","))
			if o.imex && slices.Contains(s.Nodes, gpu.IMEXChannelNode) {
				lines = append(lines, "env NVIDIA_IMEX_CHANNELS=0")
			}
		case "cdi-annotations":
			for _, id := range ids {
				lines = append(lines, "CDI k8s.device-plugin.nvidia.com/gpu="+id)
			}
		}
	}
	if o.mps {
		pipe := "/mps/nvidia.com/" + resource + "/pipe"
		lines = append(lines, "env CUDA_MPS_PIPE_DIRECTORY="+pipe, "mount /run/nvidia/mps/nvidia.com/"+resource+"/pipe:"+pipe, "mount /run/nvidia/mps/shm:/dev/shm")
	}
	if o.nodes {
		lines = append(lines, o.deviceNodes(s, ids)...)
	}
	slices.Sort(lines)
	return lines
}

// deviceNodes are those of pass-device-specs.
func (o original) deviceNodes(s gpu.Snapshot, ids []string) (lines []string) {
	paths := []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
	for _, d := range s.Devices {
		if !slices.Contains(ids, string(d.ID)) {
			continue
		}
		paths = append(paths, fmt.Sprintf("/dev/nvidia%d", d.Minor))
		if d.Profile != "" {
			paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.GICap), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.CICap))
		}
	}
	slices.Sort(paths)
	for _, path := range slices.Compact(paths) {
		if slices.Contains(s.Nodes, path) {
			lines = append(lines, "node "+path+" rw")
		}
	}
	return lines
}
