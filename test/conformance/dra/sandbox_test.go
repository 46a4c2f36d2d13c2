package dra

import (
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"k8s.io/klog/v2"
)

const (
	kubeletHome = "/var/lib/kubelet"
	project     = "../../.."                   // the project's module
	inside      = "TANDEM_CONFORMANCE_SANDBOX" // the directory of the built programs
)

// TestMain builds the programs and runs the tests in a mount namespace with an empty /var/lib/kubelet: the device manager has a constant
// directory there.
func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		code, err := runInSandbox()
		if err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
		}
		os.Exit(code)
	}
	if err := hideKubelet(); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
	if os.Getenv("TANDEM_CONFORMANCE_KLOG") == "" {
		quiet := flag.NewFlagSet("", flag.ContinueOnError)
		klog.InitFlags(quiet)
		_ = quiet.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"})
		klog.SetOutput(io.Discard)
	}
	// The tests wait most of the time, among others for the second between two looks of a kubelet at its folder. Linux allows 128 inotify
	// instances by default, an agent has nine, and a kubelet without one finds no driver.
	_ = flag.Set("test.parallel", "6")
	flag.Parse()
	os.Exit(m.Run())
}

func runInSandbox() (int, error) {
	if os.Getuid() != 0 {
		return 1, fmt.Errorf("needs root, for a mount namespace with its own %s", kubeletHome)
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

func hideKubelet() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := os.MkdirAll(kubeletHome, 0o755); err != nil {
		return err
	}
	return syscall.Mount("tmpfs", kubeletHome, "tmpfs", 0, "")
}

// program is the path of a built program.
func program(name string) string { return filepath.Join(os.Getenv(inside), name) }
