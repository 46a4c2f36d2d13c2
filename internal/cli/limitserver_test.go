package cli_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/limitserver"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// mountGroups mounts the control groups of version 2, and makes the group of a pod.
func mountGroups(t *testing.T) (mount string, pod cgroup.ID) {
	t.Helper()
	mount = t.TempDir()
	if err := syscall.Mount("none", mount, "cgroup2", 0, ""); err != nil {
		t.Skipf("no control groups of version 2 can be mounted: %v", err)
	}
	t.Cleanup(func() { check.NoError(t, syscall.Unmount(mount, 0)) })
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	path := fmt.Sprintf("/kubepods-test-%d/kubepods/pod%x", os.Getpid(), b)
	check.NoError(t, os.MkdirAll(mount+path, 0o755))
	t.Cleanup(func() {
		for at := path; at != "/"; at = filepath.Dir(at) {
			check.NoError(t, os.Remove(mount+at))
		}
	})
	g, err := cgroup.FS{Mount: mount}.Read(path)
	check.NoError(t, err)
	return mount, g.ID
}

// The component sets the limit of a pod's group in the driver of a machine, and its probe finds it.
func TestLimitServer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may set limits")
	}
	t.Parallel()
	mount, pod := mountGroups(t)
	text, err := os.ReadFile("../../test/simdriver/machines/h100x8.conf")
	check.NoError(t, err)
	config, err := simdriver.WithLimits(string(text), simdriver.Misc, mount)
	check.NoError(t, err)
	file := filepath.Join(t.TempDir(), "machine.conf")
	check.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	m := simdriver.StartParallel(t, file)
	state := coretest.ShortDir(t)
	args := []string{"limit-server", "--state-dir=" + state, "--driver-root=" + m.Root, "--dev-root=" + m.Root, "--sysfs-root=" + m.Root + "/sys", "--procfs-root=" + m.Root + "/proc", "--cgroup-root=" + mount}
	probe := func() error {
		out, err := exec.CommandContext(t.Context(), binaries.Path(t, "k8s-gpu"), append(args, "--ready")...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	if probe() == nil {
		t.Error("it is ready before it runs")
	}
	cmd := exec.Command(binaries.Path(t, "k8s-gpu"), args...)
	var log bytes.Buffer
	cmd.Stderr = &log
	check.NoError(t, cmd.Start())
	client := limitserver.Client{Socket: limitserver.Path(state)}
	check.Until(t, "it listens", func() bool { return client.Ready(t.Context()) == nil })
	check.NoError(t, probe())
	set := func(id string, hard uint64) error {
		return client.SetMemoryLimit(t.Context(), pod, gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: gpu.DeviceID(id)}, Soft: hard, Hard: hard})
	}
	check.NoError(t, set(m.UUID(3), 20<<30))
	if err := set(m.UUID(3), 1<<50); err == nil || !strings.Contains(err.Error(), "the GPU has 81559") {
		t.Errorf("more than the GPU has: %v", err)
	}
	pod.Inode++
	if err := set(m.UUID(3), 20<<30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another group: %v", err)
	}
	check.NoError(t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
	if !strings.Contains(log.String(), "limit set") || !strings.Contains(log.String(), m.UUID(3)) {
		t.Errorf("log\n%s", &log)
	}
}
