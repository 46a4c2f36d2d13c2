package cgroup_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	uid   = "0e6a0b2c-6f0c-4f5e-9d51-1c2d3e4f5a6b"
	alloc = "5b1f3c58-2f0f-1f7b-9c0e-7ad8a6cf2f7a"
)

// tree makes groups in an ordinary folder.
func tree(t *testing.T, groups ...string) cgroup.FS {
	t.Helper()
	f := cgroup.FS{Mount: filepath.Join(t.TempDir(), "cgroup"), AnyFilesystem: true}
	for _, g := range groups {
		_, err := simdriver.MakeGroup(f.Mount, g, "cpu", "misc")
		check.NoError(t, err)
	}
	return f
}

// fence 20: control groups of version 1, and a hybrid, are none: what NVIDIA's hook looks at is the file system at the mount point.
func TestCheck(t *testing.T) {
	if err := (cgroup.FS{Mount: t.TempDir()}).Check(); !errors.Is(err, cgroup.ErrNotUnified) {
		t.Errorf("another file system: %v", err)
	}
	if err := (cgroup.FS{Mount: "/no/such/folder"}).Check(); !errors.Is(err, cgroup.ErrNotUnified) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
	f := tree(t, "/a")
	check.NoError(t, f.Check())
	check.NoError(t, os.WriteFile(f.Path("/cgroup.procs"), []byte("1\n"), 0o600), os.WriteFile(f.Path("/cgroup.events"), []byte("populated 1\n"), 0o600))
	check.NoError(t, f.Check()) // of a node that is a container
	check.NoError(t, os.WriteFile(f.Path("/cgroup.procs"), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600))
	if err := f.Check(); !errors.Is(err, cgroup.ErrOwnOnly) {
		t.Errorf("a container's own: %v", err)
	}
}

// A group has its inode, controllers and processes. Another one of the same path has another inode.
func TestRead(t *testing.T) {
	f := tree(t, "/a/b")
	g, err := f.Read("/a/b")
	check.NoError(t, err)
	if g.Path != "/a/b" || g.Inode == 0 || !g.Has("misc") || g.Has("dmem") {
		t.Errorf("%+v", g)
	}
	check.NoError(t, os.WriteFile(f.Path("/a/cgroup.procs"), []byte("7\n"), 0o600), os.WriteFile(f.Path("/a/b/cgroup.procs"), []byte("12\n0\n"), 0o600))
	if pids, err := f.ProcessesBelow("/a"); err != nil || !slices.Equal(pids, []int{7, 12, 0}) { // one is of another PID namespace
		t.Errorf("%v %v", pids, err)
	}
	check.NoError(t, os.Rename(f.Path("/a/b/cgroup.procs"), f.Path("/a/procs")), os.Mkdir(f.Path("/a/b/cgroup.procs"), 0o700))
	if pids, err := f.ProcessesBelow("/a"); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v %v, want that the processes can't be read", pids, err)
	}
	check.NoError(t, os.Remove(f.Path("/a/b/cgroup.procs")), os.Rename(f.Path("/a/procs"), f.Path("/a/b/cgroup.procs")))
	check.NoError(t, os.Rename(f.Path("/a/b"), f.Path("/a/gone")))
	if _, err := f.Read("/a/b"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	_, err = simdriver.MakeGroup(f.Mount, "/a/b")
	check.NoError(t, err)
	if again, _ := f.Read("/a/b"); again.ID == g.ID {
		t.Errorf("%+v is another group", again)
	}
}

// fence 23: symbolic links and ".." in the path of a group are refused.
func TestReadRefuses(t *testing.T) {
	f := tree(t, "/a/b")
	check.NoError(t, os.Symlink(f.Path("/a"), f.Path("/link")), os.Symlink(f.Path("/a/b"), f.Path("/a/link")))
	for _, path := range []string{"/link", "/link/b", "/a/link", "/a/../a/b", "/..", "a/b", "/a/", "/a//b", ""} {
		if g, err := f.Read(path); !errors.Is(err, cgroup.ErrPath) {
			t.Errorf("%q: %+v, %v", path, g, err)
		}
	}
}

// A controller is enabled once, and not in a group that has ended.
func TestEnable(t *testing.T) {
	f := tree(t, "/a/b")
	control := f.Path("/a/cgroup.subtree_control")
	check.NoError(t, f.Enable("/a", "misc"))
	if text, _ := os.ReadFile(control); string(text) != "+misc" { // what a kernel gets
		t.Errorf("%q", text)
	}
	check.NoError(t, os.WriteFile(control, []byte("cpu misc\n"), 0o600), f.Enable("/a", "misc"))
	if text, _ := os.ReadFile(control); string(text) != "cpu misc\n" {
		t.Errorf("%q", text)
	}
	if err := f.Enable("/c", "misc"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// The groups of Nomad's tasks are found in both slices, and only those with the form of one.
func TestTasks(t *testing.T) {
	f := tree(t)
	if all, err := f.Tasks(); len(all) > 0 || err != nil {
		t.Errorf("%q %v", all, err)
	}
	share, reserve := "/nomad.slice/share.slice/"+alloc+".main.scope", "/nomad.slice/reserve.slice/"+alloc+".other.scope"
	f = tree(t, share, reserve, "/nomad.slice/share.slice/other", "/nomad.slice/"+alloc+".main.scope")
	if all, err := f.Tasks(); err != nil || !slices.Equal(all, []string{share, reserve}) {
		t.Errorf("%q %v", all, err)
	}
	if w := cgroup.MemberOf(reserve).Work; w != (holders.Work{Orchestrator: holders.Nomad, ID: alloc, Container: "other"}) {
		t.Errorf("%+v", w)
	}
}

// The groups of pods are found with both drivers of the kubelet, in each class of service, and below --cgroup-root; not what a user or a container has made.
func TestPods(t *testing.T) {
	id := func(n int) string { return uid[:len(uid)-1] + fmt.Sprint(n) }
	under := func(n int) string { return strings.ReplaceAll(id(n), "-", "_") }
	want := map[string]string{
		id(0): "/kubepods/pod" + id(0), id(1): "/kubepods/burstable/pod" + id(1), id(2): "/kubepods.slice/kubepods-pod" + under(2) + ".slice",
		id(3): "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + under(3) + ".slice",
		id(4): "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod" + under(4) + ".slice",
		id(5): "/kubelet/kubepods/besteffort/pod" + id(5),
	}
	groups := slices.Collect(maps.Values(want))
	f := tree(t, append(groups, "/user.slice/kubepods/pod"+id(6), "/pod"+id(7), "/kubepods/pod"+id(0)+"/c/kubepods/pod"+id(8), "/a.service/kubepods/pod"+id(9))...)
	got, err := f.Pods()
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v %q", err, got)
	}
	for path, at := range map[string]string{
		"/kubepods/burstable/podX/c": "/kubepods/burstable/podX/c",
		"/../../pod" + id(1) + "/c":  want[id(1)] + "/c",
		"/../kubepods-besteffort-pod" + under(3) + ".slice/cri-containerd-1.scope": want[id(3)] + "/cri-containerd-1.scope",
		"/../../pod" + uid + "/c": "",
		"/../system.slice/x":      "",
		"":                        "",
	} {
		if got := cgroup.Resolve(path, want); got != at {
			t.Errorf("%s: %q, want %q", path, got, at)
		}
	}
}
