package spec

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const kind = "k8s.device-plugin.nvidia.com/gpu"

func input(s gpu.Snapshot) Input {
	return Input{
		Kind: kind, Devices: s.Devices, Nodes: s.Nodes, DevRoot: "/",
		Common:   specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}},
		Symlinks: func(links []string) *specs.Hook { return &specs.Hook{HookName: "createContainer", Args: links} },
	}
}

// text is a specification as "name: node node" a line; nodes of the host elsewhere are "path<host path".
func text(r Result) string {
	if r.Spec == nil {
		return "none"
	}
	var b strings.Builder
	for _, d := range append(slices.Clone(r.Spec.Devices), specs.Device{Name: "*", ContainerEdits: r.Spec.ContainerEdits}) {
		b.WriteString(strings.ReplaceAll(d.Name, "-00000000-0000-4000-8000-", "~") + ":")
		for _, n := range d.ContainerEdits.DeviceNodes {
			b.WriteString(" " + strings.TrimPrefix(n.Path, "/dev/"))
			if n.HostPath != "" {
				b.WriteString("<" + n.HostPath)
			}
			if n.Permissions != "rw" || n.Type != "" || n.Major != 0 || n.FileMode != nil || n.GID != nil {
				fmt.Fprintf(&b, " with %+v", n)
			}
		}
		for _, h := range d.ContainerEdits.Hooks {
			fmt.Fprintf(&b, " %s", h.Args)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// Which names there are, which nodes they have, and which devices are defined.
func TestBuild(t *testing.T) {
	const control = "*: nvidia-uvm nvidia-uvm-tools nvidiactl\n"
	without := func(s gpu.Snapshot, paths ...string) gpu.Snapshot {
		s.Nodes = slices.DeleteFunc(slices.Clone(s.Nodes), func(n string) bool { return slices.Contains(paths, n) })
		return s
	}
	two, mig := coretest.GPUs(2), coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb", "1g.24gb+gfx")
	legacy := coretest.WithMIG(coretest.GPUs(1), 0, "1g.5gb")
	legacy.Devices[1].ID = "MIG-GPU-00000000-0000-4000-8000-000000000000/7/0"
	swapped := coretest.GPUs(2) // GPU 0 is lost; the driver was loaded again and gave its index and number to GPU 1
	swapped.Devices[1].Index, swapped.Devices[1].Minor = 0, 0
	same := coretest.GPUs(2)
	same.Devices[1].Index = 0
	unknown := coretest.GPUs(2)
	unknown.Devices[1].Minor = -1
	drm := map[gpu.PCIAddress]DRM{
		"0000:10:00.0": {Nodes: []string{"/dev/dri/card1", "/dev/dri/renderD128"}, Links: []string{"../card1::/dev/dri/by-path/pci-0000:10:00.0-card"}},
	}
	lost := map[gpu.DeviceID]bool{coretest.GPU(0): true}

	for name, tc := range map[string]struct {
		snapshot  gpu.Snapshot
		change    func(*Input)
		want      string
		version   string
		undefined []string // reasons
		notes     int
	}{
		"two GPUs": {snapshot: two, version: "0.5.0",
			want: "0: nvidia0\n1: nvidia1\nGPU~000000000000: nvidia0\nGPU~000000000001: nvidia1\nall: nvidia0 nvidia1\n" + control},
		"no GPU": {snapshot: gpu.Snapshot{Driver: two.Driver, Nodes: two.Nodes}, want: "none"},
		"modeset": {snapshot: gpu.Snapshot{Driver: two.Driver, Devices: coretest.GPUs(1).Devices, Nodes: append([]string{"/dev/nvidia-modeset"}, coretest.GPUs(1).Nodes...)},
			change: func(in *Input) { slices.Sort(in.Nodes) }, version: "0.5.0",
			want: "0: nvidia0\nGPU~000000000000: nvidia0\nall: nvidia0\n*: nvidia-modeset nvidia-uvm nvidia-uvm-tools nvidiactl\n"},
		"MIG": {snapshot: mig, change: func(in *Input) { in.DRM = drm }, version: "0.5.0",
			want: "0: dri/card1 dri/renderD128 nvidia0 [../card1::/dev/dri/by-path/pci-0000:10:00.0-card]\n" +
				"0:0: nvidia-caps/nvidia-cap100 nvidia-caps/nvidia-cap101 nvidia0\n" +
				"0:1: dri/card1 dri/renderD128 nvidia-caps/nvidia-cap110 nvidia-caps/nvidia-cap111 nvidia0 [../card1::/dev/dri/by-path/pci-0000:10:00.0-card]\n" +
				"GPU~000000000000: dri/card1 dri/renderD128 nvidia0 [../card1::/dev/dri/by-path/pci-0000:10:00.0-card]\n" +
				"MIG~000000000000: nvidia-caps/nvidia-cap100 nvidia-caps/nvidia-cap101 nvidia0\n" +
				"MIG~000000000001: dri/card1 dri/renderD128 nvidia-caps/nvidia-cap110 nvidia-caps/nvidia-cap111 nvidia0 [../card1::/dev/dri/by-path/pci-0000:10:00.0-card]\n" +
				"all: dri/card1 dri/renderD128 nvidia-caps/nvidia-cap100 nvidia-caps/nvidia-cap101 nvidia-caps/nvidia-cap110 nvidia-caps/nvidia-cap111 nvidia0 [../card1::/dev/dri/by-path/pci-0000:10:00.0-card]\n" + control},
		"links are disabled": {snapshot: coretest.GPUs(1), version: "0.5.0",
			change: func(in *Input) { in.DRM, in.Symlinks = drm, func([]string) *specs.Hook { return nil } },
			want:   "0: dri/card1 dri/renderD128 nvidia0\nGPU~000000000000: dri/card1 dri/renderD128 nvidia0\nall: dri/card1 dri/renderD128 nvidia0\n" + control},
		"a UUID with slashes": {snapshot: legacy, version: "0.5.0", notes: 1, undefined: []string{"its UUID can't be the name of a CDI device"},
			want: "0: nvidia0\n0:0: nvidia-caps/nvidia-cap100 nvidia-caps/nvidia-cap101 nvidia0\nGPU~000000000000: nvidia0\nall: nvidia-caps/nvidia-cap100 nvidia-caps/nvidia-cap101 nvidia0\n" + control},
		"a GPU is lost": {snapshot: two, change: func(in *Input) { in.Lost = lost }, version: "0.5.0",
			want: "1: nvidia1\nGPU~000000000000: nvidia0\nGPU~000000000001: nvidia1\nall: nvidia1\n" + control},
		"a GPU is lost, and its number is another's": {snapshot: swapped, change: func(in *Input) { in.Lost = lost }, version: "0.5.0",
			want: "0: nvidia0\nGPU~000000000001: nvidia0\nall: nvidia0\n" + control, undefined: []string{"lost, and its device node belongs to another GPU"}},
		"an index twice": {snapshot: same, version: "0.3.0", notes: 1,
			want: "GPU~000000000000: nvidia0\nGPU~000000000001: nvidia1\nall: nvidia0 nvidia1\n" + control},
		"an index twice, by which containers get devices": {snapshot: same, change: func(in *Input) { in.Indices = true }, version: "0.3.0", notes: 1,
			undefined: []string{"its index 0 is that of another device, too", "its index 0 is that of another device, too"},
			want:      "GPU~000000000000: nvidia0\nGPU~000000000001: nvidia1\nall: nvidia0 nvidia1\n" + control},
		"a number is unknown": {snapshot: unknown, version: "0.5.0", undefined: []string{"its device node is not known"},
			want: "0: nvidia0\nGPU~000000000000: nvidia0\nall: nvidia0\n" + control},
		"a GPU's node is missing": {snapshot: without(two, "/dev/nvidia1"), version: "0.5.0",
			want:      "0: nvidia0\n1: nvidia1\nGPU~000000000000: nvidia0\nGPU~000000000001: nvidia1\nall: nvidia0 nvidia1\n" + control,
			undefined: []string{"device node /dev/nvidia1 is missing: run nvidia-modprobe -c1"}},
		"a capability's node is missing": {snapshot: without(mig, "/dev/nvidia-caps/nvidia-cap101"), version: "0.5.0",
			undefined: []string{"device node /dev/nvidia-caps/nvidia-cap101 is missing: run nvidia-modprobe -f /proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access"}},
		"nvidia-uvm is missing": {snapshot: without(coretest.GPUs(1), "/dev/nvidia-uvm"), version: "0.5.0",
			want:      "0: nvidia0\nGPU~000000000000: nvidia0\nall: nvidia0\n*: nvidia-uvm-tools nvidiactl\n",
			undefined: []string{"device node /dev/nvidia-uvm is missing: run nvidia-modprobe -c0 -u"}},
		"no node is visible": {snapshot: without(coretest.GPUs(1), coretest.GPUs(1).Nodes...), version: "0.5.0",
			want:      "0: nvidia0\nGPU~000000000000: nvidia0\nall: nvidia0\n*:\n",
			undefined: []string{"the host's device nodes are not visible to this process: mount the host's /dev"}},
		"nodes elsewhere on the host": {snapshot: coretest.GPUs(1), change: func(in *Input) { in.DevRoot = "/run/nvidia/driver" }, version: "0.5.0",
			want: strings.NewReplacer("@", "</run/nvidia/driver/dev/").Replace(
				"0: nvidia0@nvidia0\nGPU~000000000000: nvidia0@nvidia0\nall: nvidia0@nvidia0\n*: nvidia-uvm@nvidia-uvm nvidia-uvm-tools@nvidia-uvm-tools nvidiactl@nvidiactl\n")},
	} {
		t.Run(name, func(t *testing.T) {
			in := input(tc.snapshot)
			if tc.change != nil {
				tc.change(&in)
			}
			r := Build(in)
			if got := text(r); tc.want != "" && got != tc.want {
				t.Errorf("got\n%swant\n%s", got, tc.want)
			}
			if r.Spec != nil && r.Spec.Version != tc.version {
				t.Errorf("version %s, want %s", r.Spec.Version, tc.version)
			}
			var reasons []string
			for _, u := range r.Undefined {
				reasons = append(reasons, u.Reason)
			}
			if !slices.Equal(reasons, tc.undefined) || len(r.Notes) != tc.notes {
				t.Errorf("not defined: %q, want %q; notes %q", reasons, tc.undefined, r.Notes)
			}
			if len(r.Defined)+len(r.Undefined) != len(in.Devices) || !slices.IsSorted(r.Defined) {
				t.Errorf("%d devices: %v defined", len(in.Devices), r.Defined)
			}
		})
	}
}

// The order of the input does not matter: equal readings give equal files.
func TestOrder(t *testing.T) {
	in := input(coretest.WithMIG(coretest.GPUs(4), 2, "3g.40gb", "1g.10gb"))
	want := Build(in)
	slices.Reverse(in.Devices)
	got := Build(in)
	if text(got) != text(want) {
		t.Errorf("got\n%swant\n%s", text(got), text(want))
	}
	if !slices.Equal(got.Defined, want.Defined) || !slices.IsSorted(got.Defined) { // which the inventory searches
		t.Errorf("defined %v, want %v", got.Defined, want.Defined)
	}
}

func TestBelow(t *testing.T) {
	for _, tc := range []struct {
		root, path, want string
		ok               bool
	}{
		{"/", "/usr/lib", "/usr/lib", true}, {"", "/usr/lib", "/usr/lib", true}, {"/driver-root", "/driver-root/usr", "/usr", true},
		{"/driver-root", "/driver-root-2/usr", "-2/usr", false}, {"/driver-root", "/usr", "/usr", false}, {"/driver-root/", "/driver-root/../usr", "/usr", false},
	} {
		if got, ok := Below(tc.root, tc.path); ok != tc.ok || ok && got != tc.want {
			t.Errorf("Below(%q, %q) = %q, %v", tc.root, tc.path, got, ok)
		}
	}
}

func TestMounts(t *testing.T) {
	e := specs.ContainerEdits{Mounts: []*specs.Mount{
		{HostPath: "/h/b", ContainerPath: "/b", Options: []string{"ro"}}, {HostPath: "/h/a", ContainerPath: "/a", Options: []string{"noexec"}},
	}}
	got := Mounts(e, inventory.Mount{HostPath: "/other", ContainerPath: "/a"}, inventory.Mount{HostPath: "/h/b", ContainerPath: "/aa", ReadOnly: true})
	want := []inventory.Mount{{HostPath: "/h/a", ContainerPath: "/a"}, {HostPath: "/h/b", ContainerPath: "/aa", ReadOnly: true}, {HostPath: "/h/b", ContainerPath: "/b", ReadOnly: true}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if more := WithMounts(e, want[1:2]); len(more.Mounts) != 3 || len(e.Mounts) != 2 || more.Mounts[2].ContainerPath != "/aa" {
		t.Errorf("with one more: %v", more.Mounts)
	}
}

// Each full GPU has its own hook for memory limits, and the device of all GPUs has one for each. A MIG instance has none, nor a GPU in MIG mode.
func TestMemoryLimits(t *testing.T) {
	in := input(coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb"))
	in.MemoryLimits = func(id gpu.DeviceID) *specs.Hook {
		return &specs.Hook{HookName: "createRuntime", Args: []string{string(id)}}
	}
	hooks := map[string][]string{}
	for _, d := range Build(in).Spec.Devices {
		for _, h := range d.ContainerEdits.Hooks {
			hooks[d.Name] = append(hooks[d.Name], h.Args...)
		}
	}
	zero, one := string(coretest.GPU(0)), string(coretest.GPU(1))
	want := map[string][]string{"0": {zero}, zero: {zero}, "1": {one}, one: {one}, "all": {zero, one}}
	if !maps.EqualFunc(hooks, want, slices.Equal) {
		t.Errorf("hooks %v, want %v", hooks, want)
	}
	in.MemoryLimits = func(gpu.DeviceID) *specs.Hook { return nil }
	for _, d := range Build(in).Spec.Devices {
		if len(d.ContainerEdits.Hooks) > 0 {
			t.Errorf("%s has hooks %v", d.Name, d.ContainerEdits.Hooks)
		}
	}
}
