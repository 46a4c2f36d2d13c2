// Package sandbox is what the tests of kubelets have in common: a mount namespace with an empty /var/lib/kubelet, the built programs, a
// simulated machine, and agents on it. The kubelet's own code is in the tests' modules.
package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// KubeletHome is a constant of the kubelet: its device manager has a folder there.
const KubeletHome = "/var/lib/kubelet"

const (
	project = "../../.."                   // of a test's folder, the folder of this module
	inside  = "TANDEM_CONFORMANCE_SANDBOX" // the folder of the built programs
)

// Main builds the programs, runs the tests in a mount namespace of its own, and ends the process. setup comes before the tests.
func Main(m *testing.M, setup func()) {
	code, err := run(m, setup)
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
	}
	os.Exit(code)
}

func run(m *testing.M, setup func()) (int, error) {
	if os.Getenv(inside) == "" {
		return outside()
	}
	if err := hideKubelet(); err != nil {
		return 1, err
	}
	setup()
	return m.Run(), nil
}

// outside builds the programs and runs this test again in a mount namespace.
func outside() (int, error) {
	if os.Getuid() != 0 {
		return 1, fmt.Errorf("needs root, for a mount namespace with its own %s", KubeletHome)
	}
	bin, err := os.MkdirTemp("", "conformance")
	if err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(bin) }()
	for _, program := range []string{"./cmd/k8s-gpu", "./test/simdriver/cmd/simctl"} {
		build := exec.Command("go", "build", "-trimpath", "-o", bin+"/", program)
		build.Dir = project
		if out, err := build.CombinedOutput(); err != nil {
			return 1, fmt.Errorf("build %s: %w\n%s", program, err, out)
		}
	}
	self := exec.Command("/proc/self/exe", os.Args[1:]...)
	self.Env = append(os.Environ(), inside+"="+bin)
	self.Stdin, self.Stdout, self.Stderr = os.Stdin, os.Stdout, os.Stderr
	self.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := self.Run(); err != nil {
		return 1, err
	}
	return 0, nil
}

// hideKubelet mounts an empty directory over the node's, for this process and its children.
func hideKubelet() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := os.MkdirAll(KubeletHome, 0o755); err != nil {
		return err
	}
	return syscall.Mount("tmpfs", KubeletHome, "tmpfs", 0, "")
}

// Program is the path of a built program.
func Program(name string) string { return filepath.Join(os.Getenv(inside), name) }
