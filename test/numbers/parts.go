package main

import (
	"slices"
	"strings"
)

// part is a part of an agent, with the functions that belong to it: how the names of functions, or of their packages, start.
type part struct {
	name      string
	functions []string
}

// Parts that are not functions of an agent.
const (
	driverLibrary = "driver library"
	collection    = "Go garbage collection"
	sysmon        = "Go sysmon thread"
	scheduler     = "Go scheduler"
	kernelOnly    = "kernel, without a caller"
	unknown       = "other"

	userUnknown, kernelUnknown = "no symbols", "no symbols, in the kernel"
)

// runtimeParts run because another part does.
var runtimeParts = []string{sysmon, scheduler, kernelOnly}

// module is that of this project.
const module = "github.com/tandem-gpu/tandem/"

// parts of the agents. A sample belongs to the first part of which a function is on the stack, so what one part calls of a later one is
// its own. Stacks are from frame pointers, so the caller of a function that has none may be missing.
var parts = []part{
	{collection, []string{
		"runtime.gcBgMarkWorker", "runtime.bgsweep", "runtime.bgscavenge", "runtime.gcStart", "runtime.gcAssistAlloc",
		"runtime.runFinalizers", "runtime.runCleanups", "runtime/debug.",
	}},
	{"event wait", []string{module + "internal/core/monitor.runWaiter"}},
	{"statistics", []string{
		module + "internal/nomadadapter.(*Plugin).stats", module + "internal/nomadadapter.(*Plugin).Stats",
		module + "internal/nomadadapter.(*statsStream)", module + "internal/core/nvidia.(*Session).Usage",
		module + "internal/core/nvidia.queryAll[go.shape.[]" + module + "internal/core/gpu.Usage]",
		module + "internal/core/monitor.(*Monitor).Usage",
		"github.com/hashicorp/nomad/plugins/device.(*devicePluginServer).Stats",
		"github.com/hashicorp/nomad/plugins/device/proto._DevicePlugin_Stats_Handler",
	}},
	{"health check", []string{
		module + "internal/core/nvidia.(*Session).Probe", module + "internal/core/monitor.(*Monitor).probe",
		module + "internal/core/monitor.(*probeScheduler)", module + "internal/core/nvidia.(*healthRecord)",
	}},
	{"reading of the machine", []string{module + "internal/core/nvidia.(*Session).Snapshot"}},
	{"reader, between requests", []string{module + "internal/core/monitor.(*Monitor).runReader"}},
	{"checks for device nodes", []string{module + "internal/core/monitor.(*Monitor).checkNodes"}},
	{"checkpoint", []string{
		module + "internal/node/history", module + "internal/core/monitor.(*Monitor).startCheckpoints",
		module + "internal/core/monitor.(*Monitor).writeCheckpoints",
	}},
	{"monitor", []string{module + "internal/core/monitor"}},
	{"GPU workers, other", []string{module + "internal/core/nvidia"}},
	{"devices of other agents", []string{module + "internal/node/ownership"}},
	{"MPS daemons", []string{module + "internal/node/mps"}},
	{"kubelet's directory", []string{module + "internal/kubeadapter/deviceplugin.(*kubelet)", "github.com/fsnotify/fsnotify"}},
	{"pod resources", []string{module + "internal/kubeadapter/deviceplugin.(*tracker).followReadings", module + "internal/kubeadapter/podresources"}},
	{"lists for kubelet", []string{module + "internal/kubeadapter/deviceplugin"}},
	{"fingerprint", []string{module + "internal/nomadadapter.(*Plugin).fingerprint", module + "internal/nomadadapter.(*fingerprinter)"}},
	{"control socket", []string{module + "internal/operator/control"}},
	{"parent process", []string{module + "internal/nomadadapter/process.WatchParent"}},
	{"kernel log", []string{module + "internal/node/kmsg", module + "internal/agent.(*sources)"}},
	{"watchdog", []string{module + "internal/util/watchdog"}},
	{"log", []string{module + "internal/util/asynclog", "log/slog", "github.com/hashicorp/go-hclog"}},
	{"gRPC", []string{"google.golang.org/grpc", "github.com/hashicorp/go-plugin"}},
	{"HTTP", []string{module + "internal/operator/status", "net/http"}},
}

// runtimeFunctions are the parts of a stack without a function of the above: the outermost function says which.
var runtimeFunctions = []part{
	{sysmon, []string{"runtime.sysmon"}},
	{scheduler, []string{"runtime.mcall", "runtime.mstart", "runtime.morestack", "runtime.schedule", "runtime.findRunnable", "runtime.rt0_go"}},
}

// partOf is the part to which a sample belongs, and whether the driver library ran. In a binary without symbols (nil) the part is a
// rough one. If the library has no frame pointers, it is the part: the stack ends in it.
func (s *symbols) partOf(stack []frame) (name string, inDriver bool) {
	user := slices.DeleteFunc(slices.Clone(stack), frame.kernel)
	inDriver = slices.ContainsFunc(user, func(f frame) bool { return strings.Contains(f.file, "libnvidia-ml.so") })
	var names []string
	if s != nil {
		for _, f := range user {
			if name := s.name(f); name != "" {
				names = append(names, name)
			}
		}
	}
	switch {
	case len(user) == 0:
		return kernelOnly, false
	case len(names) == 0 && (inDriver || s != nil): // libc, called by the driver library
		return driverLibrary, true
	case s == nil && len(user) < len(stack):
		return kernelUnknown, false
	case s == nil:
		return userUnknown, false
	}
	for _, table := range [][]part{parts, runtimeFunctions} {
		if name := firstOf(table, names); name != "" {
			return name, inDriver
		}
	}
	return packageOf(names), inDriver
}

func firstOf(table []part, names []string) string {
	for _, p := range table {
		for _, name := range names {
			if slices.ContainsFunc(p.functions, func(start string) bool { return strings.HasPrefix(name, start) }) {
				return p.name
			}
		}
	}
	return ""
}

// packageOf is the package of the outermost function that is not Go's own or a helper's.
func packageOf(names []string) string {
	for _, name := range slices.Backward(names) {
		name, _, _ = strings.Cut(name, "[") // of type parameters
		folder, last, ok := cutLast(name, "/")
		if !ok || !strings.Contains(folder, ".") || strings.HasPrefix(folder, "golang.org/x") {
			continue
		}
		last, _, _ = strings.Cut(last, ".")
		return "package " + strings.TrimPrefix(folder+"/"+last, module)
	}
	if slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, "main.") }) {
		return "signals and main"
	}
	return unknown
}
