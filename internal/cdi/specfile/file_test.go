package specfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/check"
)

const kind = "vendor.example/gpu"

// example is a specification of n GPUs.
func example(n int) *specs.Spec {
	s := coretest.GPUs(n)
	return spec.Build(spec.Input{Kind: kind, Devices: s.Devices, Nodes: s.Nodes}).Spec
}

func TestMarshalRefusesWhatRuntimesRefuse(t *testing.T) {
	for name, change := range map[string]func(*specs.Spec){
		"no devices":           func(s *specs.Spec) { s.Devices = nil },
		"a device twice":       func(s *specs.Spec) { s.Devices = append(s.Devices, s.Devices[0]) },
		"a device without use": func(s *specs.Spec) { s.Devices[0].ContainerEdits = specs.ContainerEdits{} },
		"a slash in a name":    func(s *specs.Spec) { s.Devices[0].Name = "MIG-GPU-1/7/0" },
		"a class that is none": func(s *specs.Spec) { s.Kind = "vendor.example/1" },
		"a low version":        func(s *specs.Spec) { s.Version = "0.2.0"; s.ContainerEdits.AdditionalGIDs = []uint32{44} },
	} {
		s := example(2)
		if _, err := Marshal(s); err != nil {
			t.Fatal(err)
		}
		if change(s); name == "" {
			continue
		}
		if _, err := Marshal(s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// What is at the path, after what happened to it.
func TestCheck(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vendor.example-gpu.json")
	one, err := Marshal(example(1))
	check.NoError(t, err)
	two, err := Marshal(example(2))
	check.NoError(t, err)
	f := File{Path: path}
	state := func(want State) {
		t.Helper()
		if got, _ := f.Check(); got != want {
			t.Errorf("state %d, want %d", got, want)
		}
	}
	state(Missing)
	check.NoError(t, os.WriteFile(path, one, 0o600))
	state(Foreign) // another process wrote the same: this one has not
	check.NoError(t, f.Replace(one, 1))
	state(Ours)
	if !f.Holds(one, 1) || f.Holds(one, 2) || f.Holds(two, 1) || !f.Written(1) || f.Written(2) {
		t.Error("what was written, and for which incarnation")
	}
	check.NoError(t, os.WriteFile(path+"2", one, 0o644))
	check.NoError(t, os.Rename(path+"2", path))
	state(Ours) // another file with the same text
	check.NoError(t, os.WriteFile(path, two, 0o644))
	if got, text := f.Check(); got != Foreign || !slices.Contains(Names(text), string(coretest.GPU(1))) {
		t.Errorf("state %d, %s", got, text)
	}
	check.NoError(t, os.Remove(path))
	state(Missing)
	check.NoError(t, syscall.Mkfifo(path, 0o644))
	state(Foreign) // and does not block
	check.NoError(t, f.Replace(two, 2))
	state(Ours)
	if removed, err := f.Remove(); !removed || err != nil || f.Written(2) {
		t.Errorf("removed %v, %v", removed, err)
	}
	if removed, err := f.Remove(); removed || err != nil {
		t.Errorf("removed %v, %v", removed, err)
	}
}

func TestFolder(t *testing.T) {
	base := t.TempDir()
	check.NoError(t, os.WriteFile(base+"/file", nil, 0o644))
	check.NoError(t, os.Symlink(base+"/new", base+"/link"))
	check.NoError(t, MakeFolder(base+"/new"))
	check.NoError(t, MakeFolder(base+"/new"))
	check.NoError(t, MakeFolder(base+"/link"))
	if info, err := os.Stat(base + "/new"); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", info, err)
	}
	for folder, want := range map[string]string{base + "/file": "not a folder", base + "/missing/cdi": "no such file or directory", "/proc/cdi": "no such file or directory"} {
		err := MakeFolder(folder)
		if e, ok := errors.AsType[*FolderError](err); !ok || e.Folder != folder || !strings.Contains(e.Reason, want) {
			t.Errorf("%s: %v", folder, err)
		}
	}
	// As in a container, whose mount is of a folder that was removed on the host.
	removed := base + "/removed"
	check.NoError(t, os.Mkdir(removed, 0o755))
	dir, err := os.Open(removed)
	check.NoError(t, err)
	defer func() { _ = dir.Close() }()
	check.NoError(t, os.Remove(removed))
	if err := CheckFolder(fmt.Sprintf("/proc/self/fd/%d", dir.Fd())); err == nil || !strings.Contains(err.Error(), "removed on the host") {
		t.Errorf("a removed folder: %v", err)
	}
}

// Files are read as runtimes read them, and again only when they change.
func TestScan(t *testing.T) {
	folder, other := t.TempDir(), t.TempDir()
	text, err := Marshal(example(1))
	check.NoError(t, err)
	for name, content := range map[string]string{
		"a.json": string(text), "b.yaml": "cdiVersion: 0.5.0\nkind: x.example/y\ndevices: [{name: z, containerEdits: {env: [A=B]}}]\n",
		"c.json": "{", "d.json": `{"cdiVersion": "0.5.0", "kind": "vendor.example/gpu", "unknown": 1}`, ".e.json123": string(text), "f.yml": string(text),
	} {
		check.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(content), 0o644))
	}
	check.NoError(t, os.Mkdir(folder+"/g.json", 0o755))
	check.NoError(t, syscall.Mkfifo(folder+"/h.json", 0o644))
	check.NoError(t, os.Symlink(folder+"/nowhere", folder+"/i.json"))
	check.NoError(t, os.WriteFile(other+"/a.json", text, 0o644))
	var s Scanner
	got := s.Scan(folder, other, "/nowhere")
	var summary []string
	for _, e := range got {
		line := filepath.Base(e.Path) + " " + e.Kind + " " + strings.Join(e.Devices, ",")
		if e.Problem != "" {
			line += "problem"
		}
		summary = append(summary, line)
	}
	devices := "0," + string(coretest.GPU(0)) + ",all"
	if want := []string{"a.json vendor.example/gpu " + devices, "b.yaml x.example/y z", "c.json  problem", "d.json  problem", "h.json  problem", "a.json vendor.example/gpu " + devices}; !slices.Equal(summary, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(summary, "\n"), strings.Join(want, "\n"))
	}
	before := s.files[folder+"/a.json"]
	check.NoError(t, os.WriteFile(folder+"/b.yaml", []byte("{"), 0o644))
	check.NoError(t, os.Remove(folder+"/c.json"))
	s.Scan(folder)
	if len(s.files) != 4 || s.files[folder+"/b.yaml"].Problem == "" || &before.Devices[0] != &s.files[folder+"/a.json"].Devices[0] {
		t.Errorf("after changes: %v", s.files)
	}
}
