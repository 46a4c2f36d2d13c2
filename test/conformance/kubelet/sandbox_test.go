// Package kubelet runs the built k8s-gpu under kubelet's own device manager, in process: the code that
// registers plugins, keeps the books and admits pods on a node. It is a module of its own, since
// k8s.io/kubernetes is no library: nothing else of the project builds against it.
//
// The tests are named by the cases of the kubelet contract's checklist. The device manager insists on
// /var/lib/kubelet/device-plugins: the tests run as root, in a mount namespace with an empty folder there.
package kubelet

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

const (
	pluginDir = "/var/lib/kubelet/device-plugins"
	project   = "../../.."                   // the project's module
	inside    = "TANDEM_CONFORMANCE_SANDBOX" // holds the folder of the built programs
)

func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		if err := hideKubelet(); err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	code, err := runInSandbox()
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
	}
	os.Exit(code)
}

// runInSandbox builds the programs and runs this test again in a mount namespace of its own.
func runInSandbox() (int, error) {
	if os.Getuid() != 0 {
		return 1, fmt.Errorf("needs root, for a mount namespace with its own %s", pluginDir)
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

// hideKubelet mounts an empty folder over the node's /var/lib/kubelet, for this process and its children.
func hideKubelet() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	home := filepath.Dir(pluginDir)
	if err := os.MkdirAll(home, 0o755); err != nil {
		return err
	}
	return syscall.Mount("tmpfs", home, "tmpfs", 0, "")
}
