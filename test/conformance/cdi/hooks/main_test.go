package hooks

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/test/binaries"
)

const (
	hierarchy = "/sys/fs/cgroup"
	inside    = "TANDEM_CONFORMANCE_HOOKS"   // the folder for k8s-gpu, in the process that runs the tests
	skipped   = "TANDEM_CONFORMANCE_SKIPPED" // a file for the reason why nothing was tested: test/conformance/run prints it
)

// ownGroup is the group above those of all containers of this run: the folder of inside has a name that no other run has, unlike a process ID in a namespace.
var ownGroup = "tandem-" + filepath.Base(os.Getenv(inside))

// missingError is what a node lacks for these tests.
type missingError string

func (e missingError) Error() string { return string(e) }

// TestMain runs the tests as process 1 of namespaces of their own, whose end is that of all containers. /sys/fs/cgroup has control groups of version 2 there, as
// NVIDIA's hook wants it, also on a node with both versions.
func TestMain(m *testing.M) {
	step := outside
	switch {
	case os.Getenv(asRunc) != "":
		step = runcWithoutResources
	case os.Getenv(inside) != "":
		step = func() (int, error) { return within(m) }
	}
	code, err := step()
	if lacks := missingError(""); errors.As(err, &lacks) {
		fmt.Fprintln(os.Stderr, "SKIPPED:", err)
		if path := os.Getenv(skipped); path != "" {
			err = os.WriteFile(path, fmt.Appendf(nil, "conformance: no test with NVIDIA's hook program: %v\n", lacks), 0o644)
		} else {
			err = nil
		}
	}
	if err != nil {
		code = 1
		fmt.Fprintln(os.Stderr, "hooks:", err)
	}
	os.Exit(code)
}

// outside builds the programs and runs this test again in namespaces.
func outside() (int, error) {
	if os.Getuid() != 0 {
		return 0, missingError("containers and control groups need root")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		return 0, missingError("runc is not installed")
	}
	path, err := output(exec.Command("../../../e2e/orchestrators", "containerd", "toolkit", "hooks"))
	if err != nil {
		return 1, err
	}
	bin, err := os.MkdirTemp("", "hooks")
	if err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(bin) }()
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends that started a process
	self := exec.Command("/proc/self/exe", os.Args[1:]...)
	self.Env = append(os.Environ(), inside+"="+bin, "PATH="+path+":"+os.Getenv("PATH"))
	self.Stdin, self.Stdout, self.Stderr = os.Stdin, os.Stdout, os.Stderr
	self.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	if err := self.Start(); err != nil {
		return 0, missingError("no namespaces: " + err.Error())
	}
	_ = self.Wait() // its status shows how it ended
	return self.ProcessState.ExitCode(), nil
}

// output runs a command, and returns what it writes to its standard output.
func output(cmd *exec.Cmd) (string, error) {
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd, err, &log)
	}
	return strings.TrimSpace(string(out)), nil
}

// within makes the mounts, and runs the tests.
func within(m *testing.M) (int, error) {
	if err := mounts(); err != nil {
		return 1, err
	}
	if controller() == "" {
		return 0, missingError("the control groups of version 2 have neither the controller misc nor hugetlb, which can stand in for it")
	}
	if err := buildAgent(); err != nil {
		return 1, err
	}
	code := m.Run()
	removeGroups(filepath.Join(hierarchy, ownGroup))
	return code, nil
}

// buildAgent builds a k8s-gpu that takes controller() for misc.
func buildAgent() error {
	flags := binaries.Flags()
	flags[len(flags)-1] += " -X github.com/tandem-gpu/tandem/internal/core/limit.MiscController=" + controller()
	build := exec.Command("go", slices.Concat([]string{"build"}, flags, []string{"-o", os.Getenv(inside) + "/", "./cmd/k8s-gpu"})...)
	build.Dir = "../../../.."
	_, err := output(build)
	return err
}

// mounts gives this process a /proc of its namespace, an empty /run, and control groups of version 2.
func mounts() error {
	const cgroup2 = 0x63677270 // CGROUP2_SUPER_MAGIC
	err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
		syscall.Mount("proc", "/proc", "proc", 0, ""),
		syscall.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"))
	var have syscall.Statfs_t
	if err != nil || syscall.Statfs(hierarchy, &have) == nil && have.Type == cgroup2 {
		return err
	}
	if err := syscall.Mount("cgroup2", hierarchy, "cgroup2", 0, ""); err != nil {
		return missingError("no control groups of version 2: " + err.Error())
	}
	return nil
}

// controller is that of the limits: misc, or, on a kernel without it, hugetlb, which container runtimes turn on for the groups of containers, too.
func controller() string {
	have, _ := os.ReadFile(filepath.Join(hierarchy, "cgroup.controllers"))
	for _, name := range []string{"misc", "hugetlb"} {
		if slices.Contains(strings.Fields(string(have)), name) {
			return name
		}
	}
	return ""
}

// removeGroups removes a group with those below, which have no process any more.
func removeGroups(path string) {
	var groups []string
	_ = filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			groups = append(groups, path)
		}
		return nil
	})
	for _, g := range slices.Backward(groups) {
		_ = syscall.Rmdir(g)
	}
}
