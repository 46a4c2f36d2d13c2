package nomad

import (
	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// AgentOptions are what the settings mean for an agent.
func AgentOptions(s config.Nomad) agent.Options {
	o := agent.Options{
		Name: Name, Core: s.Core, Health: s.Health, MPSRoot: s.MPSRoot, Open: agent.OpenDriver(s.Core, false), CDI: cdiOptions(s), Prove: s.Prove,
		Reset: s.Reset, ResetPause: s.ResetPause, Resetter: agent.LocalResetter(s.Core.Roots, s.ResetProgram, s.Health.StateDir),
	}
	if s.Operations.NomadAddress == "" {
		o.NoRecord = &noAllocations
	}
	return o
}

// noAllocations is why no record of allocations is read then.
var noAllocations = use.Unknown{Reason: "nomad_address is off", Remedy: "set nomad_address"}

// cdiOptions are those of the CDI specifications. The vendor differs from that of k8s-gpu, which may run on the same node.
func cdiOptions(s config.Nomad) cdi.Options {
	roots := s.Core.Roots // of the host: Nomad starts the plugin there
	return cdi.Options{
		Vendor: "nomad.device-plugin.nvidia.com", Folder: s.CDIDir, HookPath: s.CDIHookPath,
		DriverRoot: roots.Driver, ContainerRoot: roots.Driver, DevRoot: roots.Dev, ContainerDevRoot: roots.Dev, SysRoot: roots.Sys,
	}
}
