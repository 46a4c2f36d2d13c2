package nomad

import (
	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
)

// AgentOptions are what the settings mean for an agent.
func AgentOptions(s config.Nomad) agent.Options {
	return agent.Options{
		Name: Name, Core: s.Core, Health: s.Health, MPSRoot: s.MPSRoot, Open: agent.OpenDriver(s.Core, false), CDI: cdiOptions(s), Prove: s.Prove,
	}
}

// cdiOptions are those of the CDI specifications. The vendor differs from that of k8s-gpu, which may run on the same node.
func cdiOptions(s config.Nomad) cdi.Options {
	roots := s.Core.Roots // of the host: Nomad starts the plugin there
	return cdi.Options{
		Vendor: "nomad.device-plugin.nvidia.com", Folder: s.CDIDir, HookPath: s.CDIHookPath,
		DriverRoot: roots.Driver, ContainerRoot: roots.Driver, DevRoot: roots.Dev, ContainerDevRoot: roots.Dev, SysRoot: roots.Sys,
	}
}
