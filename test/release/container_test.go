//go:build release

package release

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// checkRuns runs the image as a container would: its own root, read-only, no network, no capability; on the other architecture under QEMU.
// Without a GPU, then with a simulated driver that was compiled for that architecture.
func (i image) checkRuns(t *testing.T) {
	for _, folder := range []string{"proc", "sys", "dev", "machine", "var/lib/tandem"} { // a runtime makes its mount points, too
		if err := os.MkdirAll(filepath.Join(i.root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var prefix []string
	if i.arch != runtime.GOARCH {
		name := map[string]string{"amd64": "qemu-x86_64-static", "arm64": "qemu-aarch64-static"}[i.arch]
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatalf("%v: apt-get install qemu-user-static", err)
		}
		if err := os.WriteFile(i.root+"/qemu", []byte(read(t, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		prefix = []string{"/qemu"}
	}
	c := container{root: i.root, argv: append(prefix, i.config.Config.Entrypoint...)}
	if out := c.run(t, "--version"); !strings.Contains(out, makeVersion(t)) {
		t.Errorf("--version: %s", out)
	}
	if i.binary != "k8s-gpu" {
		return
	}
	if out := c.run(t, "inspect"); !strings.Contains(out, "libnvidia-ml.so.1") || !strings.Contains(out, "NVML_UNAVAILABLE") {
		t.Errorf("inspect without a driver: %s", out)
	}
	c.machine = crossMachine(t, i.arch)
	out := c.run(t, "inspect", "--driver-root=/machine", "--sysfs-root=/machine/sys", "--procfs-root=/machine/proc")
	if gpus := strings.Count(out, "GPU-"); gpus < 8 || strings.Contains(out, "NVML_UNAVAILABLE") {
		t.Errorf("inspect with eight GPUs: %s", out)
	}
}

// crossMachine lays out a machine whose driver library is compiled for an architecture.
func crossMachine(t *testing.T, arch string) string {
	t.Helper()
	cache, err := exec.CommandContext(t.Context(), "go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	compiler := strings.TrimSpace(command(t, root+"tools/release/cc", arch))
	path, err := exec.LookPath(compiler)
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.Symlink(path, bin+"/cc"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOCACHE", strings.TrimSpace(string(cache)))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("XDG_CACHE_HOME", t.TempDir()) // the compiled library of this machine's architecture is in the usual one
	m, err := simdriver.Install(t.Context(), t.TempDir(), "h100x8")
	if err != nil {
		t.Fatal(err)
	}
	return m.Root
}

// container is a root file system and the program in it.
type container struct {
	root, machine string
	argv          []string
}

func (c container) run(t *testing.T, args ...string) string {
	t.Helper()
	type result struct {
		out []byte
		err error
	}
	done := make(chan result)
	go func() {
		// The thread ends with the goroutine, as it is never unlocked: its namespaces and its bounding set are no other's.
		runtime.LockOSThread()
		out, err := c.confined(t.Context(), args)
		done <- result{out, err}
	}()
	r := <-done
	if r.err != nil {
		t.Fatalf("%q: %v: %s", args, r.err, r.out)
	}
	return string(r.out)
}

// confined runs the program from a thread that has a mount namespace of its own and loses all capabilities with the next program.
func (c container) confined(ctx context.Context, args []string) ([]byte, error) {
	if err := syscall.Unshare(syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_FS); err != nil {
		return nil, fmt.Errorf("unshare: %w", err)
	}
	err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
		syscall.Mount(c.root, c.root, "", syscall.MS_BIND, ""),
		syscall.Mount("", c.root, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY|syscall.MS_NOSUID, ""),
		syscall.Mount("proc", c.root+"/proc", "proc", syscall.MS_RDONLY|syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""),
	)
	if c.machine != "" {
		err = errors.Join(err, syscall.Mount(c.machine, c.root+"/machine", "", syscall.MS_BIND, ""))
	}
	for capability := 0; err == nil && capability <= unix.CAP_LAST_CAP; capability++ {
		if e := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(capability), 0, 0, 0); e != nil && !errors.Is(e, unix.EINVAL) {
			err = fmt.Errorf("drop capability %d: %w", capability, e)
		}
	}
	if err == nil {
		err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.argv[0], append(c.argv[1:len(c.argv):len(c.argv)], args...)...)
	cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/bin", "SIMDRIVER_MACHINE=/machine"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: c.root}
	return cmd.CombinedOutput()
}
