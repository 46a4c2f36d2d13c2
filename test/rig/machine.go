package rig

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Setup is the configuration of an agent.
type Setup struct {
	core.Roots
	StateDir string // health history and local socket; "" = none
	Policy   string // file; "" = none
	Hasty    bool   // check and recover in seconds instead of a minute

	Injection string // how tasks of Nomad get their GPUs; "" = the default

	NomadAddress string // of the Nomad agent's API; "" = the default, where none answers

	PodResources string // socket of the kubelet's pod-resources API; "" = there is none

	// Statistics is the interval at which Nomad asks for them; 0 = it does not. A Nomad client asks every second unless
	// telemetry.collection_interval is set.
	Statistics time.Duration

	// Peer is whether the binary is another device plugin, which has its own defaults for the above. It finds the driver by
	// LD_LIBRARY_PATH, and the kubelet's directory where a kubelet has it, in a mount namespace of its own (root).
	Peer bool
}

// command runs a binary.
func (s Setup) command(binary string, args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	if s.Peer {
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+simdriver.LibraryDir(s.Driver))
	}
	return cmd
}

// settings are those of both agents, by their names in Nomad's config block.
func (s Setup) settings() map[string]string {
	all := map[string]string{"driver_root": s.Driver, "dev_root": s.Dev, "sysfs_root": s.Sys, "procfs_root": s.Proc, "state_dir": s.StateDir}
	if s.Hasty {
		all["health_period"], all["health_settle"], all["recovery_dwell"] = "500ms", "2s", "2s"
	}
	return all
}

// Flags are settings, by their names in Nomad's config block, on the command line of k8s-gpu.
func Flags[V any](settings map[string]V) (args []string) {
	for key, value := range settings {
		args = append(args, fmt.Sprintf("--%s=%v", strings.ReplaceAll(key, "_", "-"), value))
	}
	return args
}

// Machine is what the agents run on.
type Machine struct {
	core.Roots
	What      string
	Simulated *simdriver.Machine // nil on a real one
}

// FindMachine takes this node's GPUs where there are any, else it makes up a machine in dir.
func FindMachine(ctx context.Context, dir, name string) (Machine, error) {
	if name == "" {
		n, err := realGPUs()
		if err == nil && n > 0 {
			return Machine{
				Roots: core.Roots{Driver: "/", Dev: "/", Sys: "/sys", Proc: "/proc"},
				What:  fmt.Sprintf("this node's %d GPU(s) and driver; nothing is taken away from it", n),
			}, nil
		}
		slog.Info("no GPU here", "error", err)
		name = "h100x8"
	}
	sim, err := simdriver.Install(ctx, dir, name)
	if err != nil {
		return Machine{}, err
	}
	return Machine{
		Roots:     core.Roots{Driver: sim.Root, Dev: sim.Root, Sys: sim.Root + "/sys", Proc: sim.Root + "/proc"},
		What:      "simulated, " + name + " (this node has no NVIDIA driver)",
		Simulated: sim,
	}, nil
}

// realGPUs counts the GPUs of this node.
func realGPUs() (int, error) {
	s, err := nvidia.Open(nvidia.Options{Roots: core.Roots{}})
	if err != nil {
		return 0, err
	}
	defer func() { _ = s.Close() }()
	read, err := s.Snapshot()
	return len(read.Devices), err
}
