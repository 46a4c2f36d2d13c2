package cdi

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// Nodes of the Direct Rendering Manager are found by the GPU's PCI address; links to them have no root of this process.
func TestDRM(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	devices := coretest.GPUs(2).Devices
	pci := string(devices[0].PCI)
	for _, name := range []string{"card1", "renderD128", "card2-without-node"} {
		check.NoError(t, os.MkdirAll(filepath.Join(n.SysRoot, "bus/pci/devices", pci, "drm", name), 0o755))
	}
	byPath := n.root + "/dev/dri/by-path"
	check.NoError(t, os.MkdirAll(byPath, 0o755))
	for _, name := range []string{"card1", "renderD128"} {
		if err := syscall.Mknod(n.root+"/dev/dri/"+name, syscall.S_IFCHR|0o660, 226<<8|1); err != nil {
			t.Skip("SKIPPED: ", err)
		}
	}
	for link, target := range map[string]string{"pci-" + pci + "-card": "../card1", "pci-" + pci + "-render": "../card7"} {
		check.NoError(t, os.Symlink(target, filepath.Join(byPath, link)))
	}
	got := n.withDefaults().readDRM(devices)
	want := spec.DRM{Nodes: []string{"/dev/dri/card1", "/dev/dri/renderD128"}, Links: []string{"../card1::/dev/dri/by-path/pci-" + pci + "-card"}}
	if one := got[devices[0].PCI]; !slices.Equal(one.Nodes, want.Nodes) || !slices.Equal(one.Links, want.Links) {
		t.Errorf("got %v, want %v", one, want)
	}
	if two := got[devices[1].PCI]; two.Nodes != nil || two.Links != nil {
		t.Errorf("a GPU without DRM: %v", two)
	}
}

// The host's paths, wherever this process has the roots.
func TestOtherRoots(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(inventory.Injection{CDI: inventory.CDIAuto})
	n.DriverRoot, n.DevRoot, n.Auto = "/run/nvidia/driver", "/run/nvidia/driver", true
	n.HookPath = "/run/nvidia/driver/usr/bin/nvidia-ctk"
	n.run(t, m)
	m.read(coretest.GPUs(1))
	s := m.defined(t, ids(0)...)
	if !s.Host.CDI.Usable || !strings.Contains(s.Host.CDI.Reason, n.HookPath) {
		t.Errorf("%+v", s.Host.CDI)
	}
	made := n.spec(t)
	for _, mount := range made.ContainerEdits.Mounts {
		if mount.HostPath != "/run/nvidia/driver"+mount.ContainerPath {
			t.Errorf("mount %+v", mount)
		}
	}
	for _, node := range slices.Concat(made.ContainerEdits.DeviceNodes, deviceOf(t, made, "0").ContainerEdits.DeviceNodes) {
		if node.HostPath != "/run/nvidia/driver"+node.Path {
			t.Errorf("node %+v", node)
		}
	}
	if len(made.ContainerEdits.Hooks) != 2 { // of a program of unknown age
		t.Errorf("hooks %v", made.ContainerEdits.Hooks)
	}
	plan, err := s.Allocatable.Reserve(inventory.UnitID(coretest.GPU(0)))
	if want := vendor + "/gpu=" + string(coretest.GPU(0)); err != nil || !slices.Equal(plan.CDI, []string{want}) {
		t.Errorf("plan %v, %v", plan.CDI, err)
	}
}

// auto without a hook program is not usable, and the listed strategy is, with a warning.
func TestHookProgramMissing(t *testing.T) {
	t.Parallel()
	for _, auto := range []bool{true, false} {
		n, m := newNode(t), newMonitor(inventory.Injection{CDI: inventory.CDIAuto})
		n.Auto, n.HookPath = auto, "/usr/bin/nvidia-cdi-hook"
		w, _ := n.run(t, m)
		m.read(coretest.GPUs(1))
		s := m.defined(t, ids(0)...)
		if s.Host.CDI.Usable == auto || auto && !strings.Contains(s.Host.CDI.Reason, "hook program /usr/bin/nvidia-cdi-hook is not on the host") {
			t.Errorf("auto %v: %+v", auto, s.Host.CDI)
		}
		if lines := problem.Lines(w.Problems()); len(lines) == 0 != auto {
			t.Errorf("auto %v: warnings %q", auto, lines)
		}
		if !auto {
			continue
		}
		plan, err := s.Allocatable.Reserve(inventory.UnitID(coretest.GPU(0)))
		if err != nil || plan.CDI != nil {
			t.Errorf("plan %v, %v", plan.CDI, err)
		}
		write(t, n.root+n.HookPath, "", 0o755) // and a file of its package makes the folder change
		write(t, n.Folder+"/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: all, containerEdits: {env: [A=B]}}]\n", 0o644)
		m.await(t, "usable", func(s core.State) bool { return s.Host.CDI.Usable })
	}
}

// A device that is offered to claims takes none while the hook program is missing, since no container would start, with the reason; and again as soon as
// it is back. That is not so if the program can't be seen from here, and for other APIs, for which an operator has chosen CDI.
func TestClaimsNeedTheHookProgram(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		api  inventory.API
		path string
		why  string
	}{
		"DRA":                        {inventory.DRA, "/usr/bin/nvidia-cdi-hook", "hook program /usr/bin/nvidia-cdi-hook is not on the host"},
		"DRA, a part that is hidden": {inventory.DRA, "/snap/bin/nvidia-cdi-hook", ""},
		"device plugin":              {inventory.DevicePlugin, "/usr/bin/nvidia-cdi-hook", ""},
	} {
		n, m := newNode(t), newMonitor(required())
		m.cfg.API, n.HookPath = c.api, c.path
		n.run(t, m)
		m.read(coretest.GPUs(1))
		m.defined(t, ids(0)...)
		healthOf := func(s core.State) health.Health {
			u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(0)))
			return u.Health
		}
		if h := healthOf(m.State()); h.Schedulable() != (c.why == "") || !strings.Contains(h.Detail, c.why) {
			t.Errorf("%s: %s", name, h)
		}
		if c.why == "" {
			continue
		}
		tolerant := func(inventory.Unit, health.Health) bool { return true }
		if _, err := m.State().Allocatable.ReserveTolerated(tolerant, inventory.UnitID(coretest.GPU(0))); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: work that tolerates everything: %v", name, err)
		}
		write(t, n.root+n.HookPath, "", 0o755)
		m.await(t, "healthy", func(s core.State) bool { return healthOf(s).Schedulable() })
	}
}

// Without hooks, the libraries are mounted under the names by which programs load them.
func TestWithoutHooks(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.DisabledHooks = []string{"all"}
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	e := n.spec(t).ContainerEdits
	var targets []string
	for _, mount := range e.Mounts {
		targets = append(targets, filepath.Base(mount.ContainerPath))
	}
	for _, want := range []string{"libcuda.so", "libcuda.so.1", "libcuda.so." + version, "libnvidia-ml.so.1"} {
		if !slices.Contains(targets, want) {
			t.Errorf("no %s in %v", want, targets)
		}
	}
	if len(e.Hooks) > 0 {
		t.Errorf("hooks %v", e.Hooks)
	}
}

// Other devices have files of their own, if the node has the devices; the order of names is that of NVIDIA's plugin.
func TestOtherDevices(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.GDS, n.MOFED, n.GDRCopy, n.IMEXChannels = true, true, true, []int{0}
	w, _ := n.run(t, m)
	stale := filepath.Join(n.Folder, vendor+"-gds.json")
	write(t, stale, "{}", 0o644)
	m.read(coretest.GPUs(1))
	s := m.defined(t, ids(0)...)
	if len(s.Host.CDI.Others) > 0 || len(problem.Lines(w.Problems())) > 0 {
		t.Errorf("%v, %q", s.Host.CDI.Others, problem.Lines(w.Problems()))
	}
	if _, err := os.Stat(stale); err == nil {
		t.Error("the file of devices that are not there remains")
	}
	for _, name := range []string{"nvidia-fs0", "infiniband/uverbs0", "gdrdrv"} {
		path := filepath.Join(n.root, "dev", name)
		check.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
			t.Skip("SKIPPED: ", err)
		}
	}
	reading := coretest.GPUs(1)
	reading.Nodes = append(reading.Nodes, gpu.IMEXChannelNode)
	m.read(gpu.NewSnapshot(reading))
	s = m.await(t, "a channel", func(s core.State) bool { return len(s.Host.CDI.Others) == 4 })
	want := []string{vendor + "/imex-channel=0", vendor + "/gdrcopy=all", vendor + "/gds=all", vendor + "/mofed=all"}
	if !slices.Equal(s.Host.CDI.Others, want) {
		t.Errorf("%v", s.Host.CDI.Others)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.Folder), cdi.WithAutoRefresh(false))
	check.NoError(t, err)
	for _, name := range want {
		if cache.GetDevice(name) == nil {
			t.Errorf("%s is not defined", name)
		}
	}
	if imex := cache.GetDevice(want[0]).GetSpec(); len(imex.ContainerEdits.Env) > 0 || imex.Version != "0.5.0" {
		t.Errorf("IMEX: %+v", imex.Spec)
	}
}

// Containers get the hook that sets their memory limits while the host's hook program has it: with each change of the program, at once. It is
// that of NVIDIA's library, for full GPUs only.
func TestMemoryLimitsHook(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.HookPath = "/usr/bin/nvidia-cdi-hook"
	program := n.root + n.HookPath
	buildHookProgram(t, program, toolkitVersion("1.20.1")...)
	buildHookProgram(t, n.root+"/1.20.0", toolkitVersion("1.20.0")...)
	buildHookProgram(t, n.root+"/1.20.2", toolkitVersion("1.20.2")...)
	n.run(t, m)
	s := coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb")
	m.read(s)
	full := slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool { return d.MIG || d.Profile != "" })
	if len(full) != 2 || len(s.Devices) != 4 {
		t.Fatalf("%d full GPUs of %d devices", len(full), len(s.Devices))
	}
	limits := func() (hooks []string) {
		text, _ := os.ReadFile(n.file()) // none before it is written
		made, err := cdi.ParseSpec(text)
		if err != nil || made == nil {
			return nil
		}
		for _, d := range made.Devices {
			for _, h := range d.ContainerEdits.Hooks {
				hooks = append(hooks, strings.Join(slices.Concat([]string{d.Name, h.HookName, h.Path}, h.Args, h.Env), " "))
			}
		}
		return hooks
	}
	await := func(what string, want []string) {
		t.Helper()
		check.Until(t, what, func() bool { return slices.Equal(limits(), want) })
	}
	var want, all []string
	for _, d := range full {
		args := " createRuntime /usr/bin/nvidia-cdi-hook nvidia-cdi-hook apply-cuda-memory-limits --driver-root / --gpu-id " + string(d.ID) + " NVIDIA_CTK_DEBUG=false"
		want, all = append(want, d.CurrentIndex().String()+args, string(d.ID)+args), append(all, "all"+args)
	}
	want = append(want, all...)
	slices.SortStableFunc(want, func(x, y string) int { return strings.Compare(strings.Fields(x)[0], strings.Fields(y)[0]) })
	await("with a program of version 1.20.1", want)
	check.NoError(t, os.Rename(n.root+"/1.20.0", program))
	await("with a program of version 1.20.0", nil)

	// From 1.20.2 on a mount tells NVIDIA's runtime to add no device, beside the variable; before, it would be the name of one.
	void := func() bool {
		text, err := os.ReadFile(n.file())
		check.NoError(t, err)
		return strings.Contains(string(text), "/var/run/nvidia-container-devices/void")
	}
	if void() {
		t.Error("a mount for no device with a program of version 1.20.0")
	}
	check.NoError(t, os.Rename(n.root+"/1.20.2", program))
	await("with a program of version 1.20.2", want)
	if !void() {
		t.Error("no mount for no device with a program of version 1.20.2")
	}
}

// A specification that set memory limits is not replaced by one that does not without a word.
func TestReplacedLimitsAreLogged(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	write(t, n.file(), `{"cdiVersion": "0.5.0", "kind": "`+vendor+`/gpu", "devices": [{"name": "0", "containerEdits": {"hooks": [{"hookName": "createRuntime",
		"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", "/", "--gpu-id", "GPU-1"]}]}}]}`, 0o644)
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	if log := n.log.String(); strings.Count(log, "the specification that is replaced set memory limits") != 1 {
		t.Error(log)
	}
}
