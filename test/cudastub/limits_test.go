package cudastub_test

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/cudastub"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// leaking is a leak in a control group.
type leaking struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.Closer
	lines *bufio.Scanner
}

func leak(t *testing.T, program, library, gpu, group, most string) leaking {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, library, "256", most)
	cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+gpu, "SIMDRIVER_CGROUP="+group)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	check.NoError(t, err)
	out, err := cmd.StdoutPipe()
	check.NoError(t, err)
	check.NoError(t, cmd.Start())
	return leaking{t, cmd, in, bufio.NewScanner(out)}
}

func (l leaking) prints(want ...string) {
	l.t.Helper()
	for _, line := range want {
		if !l.lines.Scan() || l.lines.Text() != line {
			l.t.Errorf("%q, want %q", l.lines.Text(), line)
		}
	}
}

// A task that leaks gets CUDA_ERROR_OUT_OF_MEMORY at its limit and sees that as the total; its neighbours have all of theirs. What it had is free when it ends,
// also if it is killed.
func TestLeakEndsAtTheLimit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root may set limits")
	}
	text, err := simdriver.Text("t4")
	check.NoError(t, err)
	mount := filepath.Join(t.TempDir(), "cgroup")
	text, err = simdriver.WithLimits(text, simdriver.Misc, mount)
	check.NoError(t, err)
	m := simdriver.StartText(t, text)
	library, program := cudastub.Build(t, simdriver.LibraryDir(m.Root)), cudastub.BuildLeak(t, t.TempDir())
	var groups []string
	for _, name := range []string{"/a", "/b", "/free"} {
		group, err := simdriver.MakeGroup(mount, name, simdriver.Misc)
		check.NoError(t, err)
		groups = append(groups, group)
	}
	lib := nvml.New(nvml.WithLibraryPath(m.Library))
	is := func(what string, got nvml.Return) {
		t.Helper()
		if got != nvml.SUCCESS {
			t.Fatal(what, got)
		}
	}
	is("init", lib.Init())
	defer func() { is("shutdown", lib.Shutdown()) }()
	gpu, ret := lib.DeviceGetHandleByIndex(0)
	is("handle", ret)
	is("Set", gpu.SetMemoryLimits_v1(groups[0], 0, 1<<30))
	is("Set", gpu.SetMemoryLimits_v1(groups[1], 0, 2<<30))
	used := func(group string) uint64 {
		t.Helper()
		limits, ret := gpu.GetMemoryLimits_v1(group)
		is("Get", ret)
		return limits.CurrentUsed >> 20
	}

	id := m.UUID(0)
	b := leak(t, program, library, id, "/b", "2048")
	a := leak(t, program, library, id, "/a", "100000")
	free := leak(t, program, library, id, "/free", "8192")
	a.prints("total 1024 MiB", "has 1024 MiB, result 2")
	b.prints("total 2048 MiB", "has 2048 MiB, result 0")
	free.prints("total 15360 MiB", "has 8192 MiB, result 0")
	if used(groups[0]) != 1024 || used(groups[1]) != 2048 {
		t.Error(used(groups[0]), used(groups[1]))
	}
	check.NoError(t, a.cmd.Process.Kill())
	if err := a.cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Error(err)
	}
	if now := used(groups[0]); now != 0 {
		t.Errorf("%d MiB are used after the end", now)
	}
	for _, l := range []leaking{b, free} {
		check.NoError(t, l.in.Close())
		check.NoError(t, l.cmd.Wait())
	}
	if used(groups[1]) != 0 {
		t.Error("memory of the neighbour stays")
	}
}
