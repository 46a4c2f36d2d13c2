package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/limitserver"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// limits is what limits of device memory need of a node. It is read only if the policy has some.
type limits struct {
	NotUnified  error    // why the control groups can't be used
	OwnOnly     bool     // this process sees the control groups of its own container only: the root group has no cgroup.events
	Controllers []string // of the root group
	Capacity    string   // dmem.capacity of the root group
	Mode        string   // RmMemacctMode of the kernel module; "" = its default
	Off         []string // groups of Nomad that do not enable the backend's controller for those below them, as paths of files
	Kernel      map[string]string
	Hook        string // path of NVIDIA's hook program; "" = it was not found
	HookVersion string // "" = unknown
	Setter      error  // of what sets limits, if this process can ask it
	Misspelt    []misspelt
}

// misspelt is a process that has a GPU open, and a variable that looks like one of those for limits.
type misspelt struct {
	Process  gpureset.Client
	Variable string
}

// backend is the controller by which the driver limits memory (RmMemacctMode: 0 off, 1 misc, 2 dmem; memacct.c in open-gpu-kernel-modules 615).
func (l limits) backend() limit.Backend {
	if l.Mode == "0" {
		return limit.NoBackend
	}
	return limit.BackendOf(l.Capacity, l.Controllers)
}

func (o *Options) cgroups() string { return cmp.Or(o.Roots.Cgroup, cgroup.DefaultMount) }

func readLimits(ctx context.Context, o *Options) func(*Facts) {
	if o.Limits == inventory.LimitNone {
		return func(*Facts) {}
	}
	in := func(path string) string { return filepath.Join(o.cgroups(), path) }
	l := limits{
		NotUnified: o.system.unified(o.cgroups()), OwnOnly: exists(in("cgroup.events")), Controllers: strings.Fields(text(in("cgroup.controllers"))),
		Capacity: text(in("dmem.capacity")), Mode: memoryMode(text(o.proc("driver/nvidia/params"))),
		Kernel: kernelSettings(text(o.host("/boot/config-" + text(o.proc("sys/kernel/osrelease"))))),
	}
	for _, group := range cgroup.NomadParents() {
		file := in(filepath.Join(group, "cgroup.subtree_control"))
		if on, err := os.ReadFile(file); err == nil && !o.kubernetes() && !slices.Contains(strings.Fields(string(on)), l.backend().Controller()) {
			l.Off = append(l.Off, file)
		}
	}
	l.Hook, l.HookVersion = hookProgram(o)
	if o.LimitSetter != nil && o.system.uid() == 0 {
		l.Setter = o.LimitSetter(ctx)
	}
	l.Misspelt = misspeltVariables(ctx, o)
	return func(f *Facts) { f.Memory = l }
}

var memoryModes = regexp.MustCompile(`(?m)^RegistryDwords:.*\bRmMemacctMode=(?:0x)?([0-9]+)`)

// memoryMode is the value of RmMemacctMode in the parameters of the kernel module, which it has from NVreg_RegistryDwords; "" = it is not set.
func memoryMode(params string) string {
	if m := memoryModes.FindStringSubmatch(params); m != nil {
		return m[1]
	}
	return ""
}

// kernelSettings are CONFIG_CGROUP_MISC and CONFIG_CGROUP_DMEM in the configuration of a kernel: "y", "n"; without one it is empty.
func kernelSettings(config string) map[string]string {
	if config == "" {
		return nil
	}
	settings := map[string]string{}
	for _, name := range []string{"CONFIG_CGROUP_MISC", "CONFIG_CGROUP_DMEM"} {
		settings[name] = "n"
		if strings.Contains("\n"+config+"\n", "\n"+name+"=y\n") {
			settings[name] = "y"
		}
	}
	return settings
}

// hookProgram is NVIDIA's hook program on the host, with its version.
func hookProgram(o *Options) (path, version string) {
	if o.system.container() != "" && o.HostRoot == "" {
		return "", "" // "/" is that of the container
	}
	paths := []string{o.Hook}
	for _, folder := range toolkitFolders {
		paths = append(paths, filepath.Join(folder, "nvidia-cdi-hook"), filepath.Join(folder, "nvidia-ctk"))
	}
	for _, p := range paths {
		if at := o.host(p); p != "" && exists(at) {
			return at, cdi.ToolkitVersion(at)
		}
	}
	return "", ""
}

// likeLimits are names of variables that people write in place of NVIDIA_GPU_MEMORY_LIMIT and NVIDIA_GPU_MEMORY_REQUEST: the plural first of all.
var likeLimits = regexp.MustCompile(`^NVIDIA_.*MEM.*(LIMIT|REQUEST)`)

// misspeltVariables looks at the environment of the processes that have GPUs open. Those of which this process may not read it are left out.
func misspeltVariables(ctx context.Context, o *Options) (all []misspelt) {
	seen := map[int]bool{}
	for _, client := range gpuClients(ctx, o) {
		environment, err := statefile.Read(o.proc(strconv.Itoa(client.PID)+"/environ"), maxText, 0)
		if err != nil || seen[client.PID] {
			continue
		}
		seen[client.PID] = true
		for entry := range strings.SplitSeq(string(environment), "\x00") {
			name, _, _ := strings.Cut(entry, "=")
			if likeLimits.MatchString(name) && name != "NVIDIA_GPU_MEMORY_LIMIT" && name != "NVIDIA_GPU_MEMORY_REQUEST" {
				all = append(all, misspelt{client, name})
			}
		}
	}
	return all
}

// gpuClients are the processes that have GPUs open, as far as they are visible.
func gpuClients(ctx context.Context, o *Options) (all []gpureset.Client) {
	for _, clients := range openByGPU(ctx, o) {
		all = append(all, clients...)
	}
	slices.SortFunc(all, func(a, b gpureset.Client) int { return cmp.Compare(a.PID, b.PID) })
	return all
}

// decideLimits is about what keeps the driver from limiting device memory where the policy asks for it. Without a policy the limits of other programs are the
// only findings.
func decideLimits(f *Facts) []Finding {
	if f.Limits == inventory.LimitNone || f.Late["limits"] {
		return foreignLimits(f)
	}
	unsupported := append(limitDriver(f), limitBackend(f)...)
	off := limitControllers(f)
	if len(unsupported) > 0 {
		f.decided = append(f.decided, problem.LimitUnsupported)
	}
	if len(off) > 0 {
		f.decided = append(f.decided, problem.LimitController)
	}
	findings := slices.Concat(unsupported, off, limitHook(f), limitRuntime(f), limitRecord(f), limitSetter(f), limitVariables(f), limitShares(f), limitSums(f), foreignLimits(f), shortLived(f))
	if Problems(findings)+count(findings, Warning) == 0 && f.Memory.backend() != limit.NoBackend {
		findings = append(findings, Finding{"limits", OK, f.cgroups(), "memory of shares can be limited, by the controller " + f.Memory.backend().Controller(), ""})
	}
	return findings
}

// limitFinding is about something without which no limit holds. A share whose limit is required takes no work then, one of best effort has none.
func limitFinding(f *Facts, place, found, remedy string) Finding {
	severity := Warning
	if f.Limits == inventory.LimitRequired {
		severity = Problem
	}
	return Finding{"limits", severity, place, found, remedy}
}

func limitDriver(f *Facts) []Finding {
	d := f.Offered().Driver
	if b := gpu.Branch(d.Version); d.State != "ready" || b == 0 || b >= gpu.LimitsBranch {
		return nil
	}
	return []Finding{limitFinding(f, "driver "+d.Version, "no share is limited: this driver has no limits of device memory",
		fmt.Sprintf("install driver %d or newer, with CUDA 13.4, or remove limit from the rules", gpu.LimitsBranch))}
}

// shortLived is about the first branch with limits, which gets no fixes for long.
func shortLived(f *Facts) []Finding {
	d := f.Offered().Driver
	if d.State != "ready" || gpu.Branch(d.Version) != gpu.LimitsBranch {
		return nil
	}
	return []Finding{{"limits", Note, "driver " + d.Version, fmt.Sprintf("R%d, the first branch with limits of device memory, is a short-lived one: it gets no fixes when the next one is there", gpu.LimitsBranch), ""}}
}

// limitBackend is about the control groups and the kernel.
func limitBackend(f *Facts) []Finding {
	l, mount := f.Memory, f.cgroups()
	switch {
	case l.NotUnified != nil:
		return []Finding{limitFinding(f, mount, "no share is limited: "+l.NotUnified.Error()+"; with control groups of version 1, also beside those of version 2, NVIDIA's driver and hook limit nothing",
			"boot with systemd.unified_cgroup_hierarchy=1")}
	case l.OwnOnly:
		return []Finding{limitFinding(f, mount, "no limit can be read: this process has the control groups of its own container, and not those of the node",
			"add the component deploy/limits-reader, which mounts the node's /sys/fs/cgroup for reading and sets hostPID (memoryLimits.read in the chart); run doctor in the agent's container")}
	case l.Mode == "0":
		return []Finding{limitFinding(f, f.proc("driver/nvidia/params"), "no share is limited: limits are switched off in the kernel module (RmMemacctMode=0)",
			"remove RmMemacctMode=0 from NVreg_RegistryDwords in /etc/modprobe.d, and load the module again")}
	case l.backend() == limit.NoBackend:
		found := "no share is limited: the kernel " + f.Module.Release + " has neither the controller misc nor GPUs in dmem"
		for _, name := range []string{"CONFIG_CGROUP_MISC", "CONFIG_CGROUP_DMEM"} {
			if l.Kernel[name] == "n" {
				found += "; " + name + " is not set"
			}
		}
		return []Finding{limitFinding(f, mount+"/cgroup.controllers", found,
			"run a kernel with CONFIG_CGROUP_DMEM=y (6.14 or newer) or CONFIG_CGROUP_MISC=y (5.13 or newer), without cgroup_disable=misc, then load the driver's module again")}
	}
	return nil
}

// limitControllers is about the groups of Nomad's tasks: Nomad enables neither misc nor dmem in them, the agent does where it has the rights.
func limitControllers(f *Facts) []Finding {
	backend := f.Memory.backend()
	if backend == limit.NoBackend || f.Memory.NotUnified != nil || len(f.Memory.Off) == 0 {
		return nil
	}
	found := fmt.Sprintf("the controller %s is off in groups of Nomad's tasks, where the driver then counts nothing", backend.Controller())
	command := fmt.Sprintf("for f in %s; do echo +%s > $f; done", strings.Join(f.Memory.Off, " "), backend.Controller())
	if !f.Agent.Running {
		return []Finding{{"limits", Note, f.Memory.Off[0], found + "; the agent enables it when it starts as root", "nothing; by hand: " + command}}
	}
	return []Finding{limitFinding(f, f.Memory.Off[0], string(problem.LimitController)+": "+found, "as root: "+command)}
}

// byHook reports whether containers get limits by NVIDIA's hook: those of the device plugin, and of Nomad's docker driver.
func byHook(f *Facts) bool {
	if !f.kubernetes() {
		return len(f.Running("dockerd")) > 0
	}
	return slices.ContainsFunc(f.Offered().Devices, func(d report.Device) bool { return d.MemoryLimit != "" && d.API != string(inventory.DRA) })
}

// limitHook is about a hook program that is too old for limits.
func limitHook(f *Facts) []Finding {
	l := f.Memory
	const install = "install nvidia-container-toolkit 1.20.1 or newer"
	switch {
	case l.Hook == "" || !byHook(f) || l.HookVersion == "" || cdi.AtLeast(l.HookVersion, 1, 20, 1):
		return nil
	case !cdi.AtLeast(l.HookVersion, 1, 18, 0):
		return []Finding{limitFinding(f, l.Hook, "version "+l.HookVersion+" refuses the hook that sets limits: containers with a limit do not start", install)}
	}
	return []Finding{limitFinding(f, l.Hook, "version "+l.HookVersion+" ignores the hook that sets limits: containers start without a limit, and nothing reports it", install)}
}

// limitRuntime is about the mode of NVIDIA's runtime that runs no hook of CDI.
func limitRuntime(f *Facts) []Finding {
	if f.Toolkit.Runtime == "" || f.Toolkit.Settings["nvidia-container-runtime.mode"] != "legacy" || !byHook(f) {
		return nil
	}
	return []Finding{limitFinding(f, f.Toolkit.Config, "NVIDIA's runtime in mode legacy does not run the hook that sets limits: containers start without a limit, and nothing reports it",
		`set mode = "auto" in [nvidia-container-runtime], or give containers their devices by CDI`)}
}

// limitRecord is about what keeps the agent from knowing which work has a share, by the settings or because the orchestrator does not show it.
func limitRecord(f *Facts) (findings []Finding) {
	for _, p := range f.LimitSettings {
		findings = append(findings, limitFinding(f, "configuration", "no limit is known to hold: "+p.Text, p.Remedy))
	}
	if u := f.Agent.Report.OwnersUnknown; u != nil && u.Remedy != "" && len(findings) == 0 {
		findings = append(findings, limitFinding(f, "the agent's record of work", "no limit is known to hold: it is not known which work has the devices: "+cmp.Or(u.Reason, "not read"), u.Remedy))
	}
	return findings
}

// limitSetter is about what sets limits of claims, and corrects those that NVIDIA's hook sets for containers of the device plugin.
func limitSetter(f *Facts) []Finding {
	if f.Memory.Setter == nil {
		return nil
	}
	text, remedy := f.Memory.Setter.Error(), "see docs/sharing.md"
	if e, ok := errors.AsType[*limitserver.UnavailableError](f.Memory.Setter); ok {
		text, remedy = e.Err.Error(), e.Remedy
	}
	const place = "what sets limits"
	if !slices.ContainsFunc(f.Offered().Devices, func(d report.Device) bool { return d.MemoryLimit != "" && d.API == string(inventory.DRA) }) {
		return []Finding{{"limits", Note, place, "NVIDIA's hook sets the limits of containers, and one that a container has overridden is reported and not corrected: " + text, remedy}}
	}
	return []Finding{limitFinding(f, place, "limits can't be set: "+text, remedy)}
}

// limitVariables is about variables that nothing reads.
func limitVariables(f *Facts) (findings []Finding) {
	for _, m := range f.Memory.Misspelt {
		findings = append(findings, Finding{"limits", Warning, f.proc(strconv.Itoa(m.Process.PID) + "/environ"), m.Variable + " of " + m.Process.String() + " has no effect: the names are NVIDIA_GPU_MEMORY_LIMIT and NVIDIA_GPU_MEMORY_REQUEST",
			"remove it from the job or the image: the policy sets the limit"})
	}
	return findings
}

// contextBytes is more than the CUDA contexts of a process have, which the driver may not count.
const contextBytes = 1 << 30

// limitShares is about work that the running agent reports without the limit of its policy, and about work of which the driver counts nothing.
func limitShares(f *Facts) (findings []Finding) {
	r := f.Agent.Report
	if r.MemoryLimits == nil {
		return nil
	}
	for _, s := range r.MemoryLimits.Shares {
		switch name := s.Work.String() + " on " + string(s.GPU); {
		case s.Lacks():
			findings = append(findings, Finding{"limits", Warning, "the agent's memory limits", strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", name, stateText(s.State), s.Reason), ": "), "see docs/sharing.md, What each state means"})
		case s.State == string(limit.Limited) && s.UsedBytes != nil && *s.UsedBytes == 0 && processBytes(r, s) > contextBytes:
			findings = append(findings, limitFinding(f, "the agent's memory limits", "the limit of "+name+" has no effect: its processes have memory of the GPU, and the driver has counted none",
				"look at cgroup.controllers and cgroup.procs of "+s.ControlGroup+", and restart the work"))
		}
	}
	return findings
}

// limitSums is about GPUs whose running work may have more memory than they have: its limits are of a policy with more or larger shares than the present one.
func limitSums(f *Facts) (findings []Finding) {
	for _, d := range f.Offered().Devices {
		if d.MemoryLimitBytes == 0 || f.Agent.Report.MemoryLimits == nil {
			continue
		}
		groups := map[string]uint64{} // a pod with several containers is in the table once for each
		for _, s := range f.Agent.Report.MemoryLimits.Shares {
			if s.GPU == d.GPU && s.WantBytes > 0 && s.HardBytes != nil {
				groups[s.ControlGroup] = *s.HardBytes
			}
		}
		var sum uint64
		for _, hard := range groups {
			sum += hard
		}
		if most := max(d.MemoryBytes, uint64(d.Replicas)*d.MemoryLimitBytes); sum > most { //nolint:gosec // from 1
			findings = append(findings, Finding{"limits", Warning, "the agent's memory limits", fmt.Sprintf("the limits of the work on GPU %d are %d MiB together, of %d MiB that the GPU has: the policy had other shares when some of it began",
				d.Index, sum>>20, d.MemoryBytes>>20), "drain the GPU, or end the work of before: docs/policy.md, Limits of memory"})
		}
	}
	return findings
}

// stateText is a state in a sentence: "not limited", "limited late", "in an unknown state".
func stateText(state string) string {
	switch limit.State(state) {
	case limit.Late:
		return "limited late"
	case limit.Unlimited:
		return "not limited"
	case limit.Limited, limit.Foreign, limit.Unknown:
	}
	return "perhaps not limited"
}

// processBytes is the memory of a GPU that the processes of a share's work have.
func processBytes(r report.Report, s report.MemoryLimit) (sum uint64) {
	for _, d := range r.Devices {
		for _, p := range d.Processes {
			if d.ID == s.GPU && p.Owner != nil && p.MemoryBytes != nil && p.Owner.ID == s.Work.ID && (s.Work.Container == "" || p.Owner.Container == s.Work.Container) {
				sum += *p.MemoryBytes
			}
		}
	}
	return sum
}

// foreignLimits is about limits that other programs have set, and which the agent leaves as they are.
func foreignLimits(f *Facts) []Finding {
	if f.Agent.Report.MemoryLimits == nil {
		return nil
	}
	var works []string
	for _, s := range f.Agent.Report.MemoryLimits.Shares {
		if s.State == string(limit.Foreign) {
			works = append(works, s.Work.String())
		}
	}
	if len(works) == 0 {
		return nil
	}
	return []Finding{{"limits", Note, "the agent's memory limits", "another program has limited the memory of " + list(works), ""}}
}

// openByGPU has the processes that have each listed GPU open, by its PCI address, as far as they are visible: some may be hidden, and doctor does not need all.
func openByGPU(ctx context.Context, o *Options) map[gpu.PCIAddress][]gpureset.Client {
	open := map[gpu.PCIAddress][]gpureset.Client{}
	listed, _ := os.ReadDir(o.proc("driver/nvidia/gpus")) // missing without the module
	for _, e := range listed {
		minor, err := strconv.Atoi(parseInformation(text(o.proc("driver/nvidia/gpus/" + e.Name() + "/information"))).Minor)
		if err != nil || ctx.Err() != nil {
			continue
		}
		open[gpu.PCIAddress(e.Name())], _ = gpureset.Clients(o.proc(""), minor)
	}
	return open
}
