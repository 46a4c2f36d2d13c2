package kube

import (
	"context"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/containerruntime"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/limitserver"
	"github.com/tandem-gpu/tandem/internal/node/resetserver"
)

// AgentOptions are what the settings mean for an agent.
func AgentOptions(s config.Kubernetes) agent.Options {
	o := agent.Options{
		Name: Name, Core: s.Core, Health: s.Health, MPSRoot: s.MPSMount, Open: agent.OpenDriver(s.Core, s.FallbackDriver),
		CDI: cdiOptions(s), Prove: s.File.Prove, Reset: s.File.Reset,
		Resetter:    resetserver.Client{Socket: resetserver.Path(s.Health.StateDir)},
		LimitSetter: limitserver.Client{Socket: limitserver.Path(s.Health.StateDir)},
	}
	if s.PodResourcesSocket == "" {
		o.NoRecord = &noPods
	}
	return o
}

// noPods is why no record of pods is read then.
var noPods = use.Unknown{Reason: "the kubelet's list of pods is not read", Remedy: "set --pod-resources-socket"}

// cdiOptions are those of the CDI specifications. The vendor and with it the file names are those of NVIDIA's plugin, so that the
// files that it left are replaced.
func cdiOptions(s config.Kubernetes) cdi.Options {
	return cdi.Options{
		Vendor: "k8s.device-plugin.nvidia.com", Folder: s.CDI.Folder, FolderIsMount: s.Core.Roots.Driver != s.DriverRoot,
		DriverRoot: s.DriverRoot, ContainerRoot: s.Core.Roots.Driver, DevRoot: s.DevRoot, ContainerDevRoot: s.Core.Roots.Dev, SysRoot: s.Core.Roots.Sys,
		HookPath: s.CDI.HookPath, Indices: s.Core.IndexIDs, DisabledHooks: s.CDI.DisabledHooks, FeatureFlags: s.CDI.FeatureFlags,
		GDS: s.CDI.GDS, MOFED: s.CDI.MOFED, GDRCopy: s.CDI.GDRCopy, IMEXChannels: s.CDI.IMEXChannels,
		Auto: s.Strategies.Auto, Runtime: askRuntime(s.CDI.CRISocket), Stored: storedCDIDevices(s.KubeletSocket),
	}
}

// storedCDIDevices returns a function that reads which CDI devices the kubelet starts containers with again; nil without a socket. Of a checkpoint that can't be read
// there are none: what depends on it reports that.
func storedCDIDevices(socket string) func(kind string) []string {
	if socket == "" {
		return nil
	}
	checkpoint := filepath.Join(filepath.Dir(socket), podresources.CheckpointName)
	return func(kind string) []string {
		devices, _ := podresources.StoredCDIDevices(checkpoint, kind)
		return devices
	}
}

// askRuntime returns a function that asks the container runtime; nil without a socket. What it can't learn is unknown.
func askRuntime(socket string) func(context.Context) cdi.Runtime {
	if socket == "" {
		return nil
	}
	return func(ctx context.Context) cdi.Runtime {
		info, _ := containerruntime.Read(ctx, socket)
		r := cdi.Runtime{Name: info.Name, Version: info.Version, Folders: info.Folders}
		switch {
		case info.CDI == nil:
		case *info.CDI:
			r.CDI = gpu.Enabled
		default:
			r.CDI = gpu.Disabled
		}
		return r
	}
}

// ResponseOptions are those of the device plugins that have a part in the response to Allocate.
func ResponseOptions(s config.Kubernetes) deviceplugin.Options {
	return deviceplugin.Options{DevRoot: s.DevRoot, MPSRoot: s.MPSRoot, Lists: deviceplugin.DeviceLists{
		EnvVar: s.Strategies.Auto || s.Strategies.EnvVar, VolumeMounts: s.Strategies.VolumeMounts,
		CDIAnnotations: s.Strategies.CDIAnnotations, AnnotationPrefix: s.AnnotationPrefix, CDINames: s.Strategies.Auto || s.Strategies.CDICRI,
		GDS: s.CDI.GDS, MOFED: s.CDI.MOFED, GDRCopy: s.CDI.GDRCopy,
	}}
}
