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
	path := fmt.Sprintf("/kubepods-test-%x/kubepods/pod%x", b, b) // the mount is that of all tests
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

// limitServer is the component on a machine with eight GPUs.
type limitServer struct {
	*simdriver.Machine
	limitserver.Client
	cmd   *exec.Cmd
	log   bytes.Buffer
	ended chan error
	args  []string
	pod   cgroup.ID
}

func startLimitServer(t *testing.T) *limitServer {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may set limits")
	}
	t.Parallel()
	l := &limitServer{ended: make(chan error, 1)}
	mount, pod := mountGroups(t)
	l.pod = pod
	text, err := os.ReadFile("../../test/simdriver/machines/h100x8.conf")
	check.NoError(t, err)
	config, err := simdriver.WithLimits(string(text), simdriver.Misc, mount)
	check.NoError(t, err)
	file := filepath.Join(t.TempDir(), "machine.conf")
	check.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	l.Machine = simdriver.StartParallel(t, file)
	state := coretest.ShortDir(t)
	l.Client = limitserver.Client{Socket: limitserver.Path(state)}
	l.args = []string{"limit-server", "--state-dir=" + state, "--driver-root=" + l.Root, "--dev-root=" + l.Root, "--sysfs-root=" + l.Root + "/sys", "--procfs-root=" + l.Root + "/proc", "--cgroup-root=" + mount}
	if l.probe(t) == nil {
		t.Error("it is ready before it runs")
	}
	l.cmd = exec.Command(binaries.Path(t, "k8s-gpu"), l.args...)
	l.cmd.Stderr = &l.log
	check.NoError(t, l.cmd.Start())
	go func() { l.ended <- l.cmd.Wait() }()
	t.Cleanup(func() { _ = l.cmd.Process.Kill() })
	check.Until(t, "it listens", func() bool { return l.Ready(t.Context()) == nil })
	return l
}

// probe is that of the kubelet.
func (l *limitServer) probe(t *testing.T) error {
	out, err := exec.CommandContext(t.Context(), binaries.Path(t, "k8s-gpu"), append(l.args, "--ready")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func (l *limitServer) set(t *testing.T, slot int, hard uint64) error {
	return l.SetMemoryLimit(t.Context(), l.pod, gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: gpu.DeviceID(l.UUID(slot))}, Soft: hard, Hard: hard})
}

// The component sets the limit of a pod's group in the driver of a machine, and its probe finds it.
func TestLimitServer(t *testing.T) {
	l := startLimitServer(t)
	check.NoError(t, l.probe(t), l.set(t, 3, 20<<30))
	if err := l.set(t, 3, 1<<50); err == nil || !strings.Contains(err.Error(), "the GPU has 81559") {
		t.Errorf("more than the GPU has: %v", err)
	}
	l.pod.Inode++
	if err := l.set(t, 3, 20<<30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another group: %v", err)
	}
	check.NoError(t, l.cmd.Process.Signal(syscall.SIGTERM), <-l.ended)
	if !strings.Contains(l.log.String(), "limit set") || !strings.Contains(l.log.String(), l.UUID(3)) {
		t.Errorf("log\n%s", &l.log)
	}
}

// A GPU that does not answer takes no limits, and all others do: before a request for it, and after one.
func TestLimitServerWithHungGPU(t *testing.T) {
	l := startLimitServer(t)
	check.NoError(t, l.Hang(simdriver.GPU(1), "nvmlDeviceGetMemoryInfo"), l.set(t, 3, 20<<30))
	for range 2 {
		if err := l.set(t, 1, 20<<30); err == nil || !strings.Contains(err.Error(), "the driver does not answer (nvmlDeviceGetMemoryInfo)") {
			t.Errorf("the GPU that hangs: %v", err)
		}
	}
	check.NoError(t, l.set(t, 3, 10<<30), l.Heal())
	check.Until(t, "it answers", func() bool { return l.set(t, 1, 20<<30) == nil })
	select {
	case err := <-l.ended:
		t.Errorf("it has ended: %v\n%s", err, &l.log)
	default:
	}
}
