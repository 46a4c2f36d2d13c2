package kubelet

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/containerruntime"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
)

// criSockets are the defaults of containerd, CRI-O, k3s and cri-dockerd.
var criSockets = []string{"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock", "/run/cri-dockerd.sock"}

const runtimeCheck = "container runtime"

// runtime asks the container runtime for its version, its runtimes and its settings of CDI.
func (o Options) runtime(ctx context.Context, f *doctor.Facts) []doctor.Finding {
	socket := o.CRISocket
	for _, path := range criSockets {
		if _, err := os.Stat(filepath.Join("/", f.HostRoot, path)); socket == "" && err == nil {
			socket = filepath.Join("/", f.HostRoot, path)
		}
	}
	if socket == "" {
		return []doctor.Finding{finding(runtimeCheck, doctor.Note, strings.Join(criSockets, ", "), "no container runtime is visible from here", "")}
	}
	info, err := containerruntime.Read(ctx, socket)
	if err != nil {
		return []doctor.Finding{finding(runtimeCheck, doctor.Warning, socket, "no answer: "+err.Error(), "systemctl status containerd (or crio); run doctor as root")}
	}
	return o.judge(f, socket, info)
}

func (o Options) judge(f *doctor.Facts, socket string, info containerruntime.Info) []doctor.Finding {
	name := info.Name + " " + info.Version
	if info.CDI != nil && !*info.CDI {
		if o.CDIOnly {
			return []doctor.Finding{finding(runtimeCheck, doctor.Problem, socket, name+": CDI is switched off, and containers get their GPUs by CDI only",
				"set enable_cdi = true in its configuration and restart it; or another --device-list-strategy")}
		}
		name += ", CDI is switched off"
	}
	only, _ := f.ByRuntime()
	isNVIDIA := func(name string) bool { return strings.Contains(name, "nvidia") }
	if len(only) > 0 && info.Runtimes != nil {
		switch {
		case !slices.ContainsFunc(info.Runtimes, isNVIDIA):
			severity, program := doctor.Problem, "containerd"
			if info.Name != program {
				severity, program = doctor.Warning, "crio" // which may have NVIDIA's runtime as a hook
			}
			return []doctor.Finding{finding(runtimeCheck, severity, socket, name+" has no runtime nvidia, and containers get their GPUs by NVIDIA's runtime only",
				"nvidia-ctk runtime configure --runtime="+program+", and restart it; or another --device-list-strategy: cdi-cri")}
		case !isNVIDIA(info.DefaultRuntime):
			return []doctor.Finding{finding(runtimeCheck, doctor.Note, socket, fmt.Sprintf("%s: the default runtime is %s, so only pods with runtimeClassName: nvidia get their GPUs", name, info.DefaultRuntime), "")}
		}
	}
	return []doctor.Finding{finding(runtimeCheck, doctor.OK, socket, name, "")}
}
