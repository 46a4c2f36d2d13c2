package cli_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// reset has the running agent reset a GPU by the component of the node, and waits for the end. The agent has nvidia-smi's work done by another process, and
// closes the driver for it.
func TestReset(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may reset GPUs")
	}
	t.Parallel()
	m, dir := simdriver.StartParallel(t, "h100x8"), coretest.ShortDir(t)
	check.NoError(t, m.Set(3, "recovery_action", "1"))
	kubelet := kubelettest.New(dir)
	check.NoError(t, kubelet.Start())
	t.Cleanup(kubelet.Stop)
	pods, err := kubelettest.ServePodResources(filepath.Join(dir, "pod-resources/kubelet.sock"))
	check.NoError(t, err)
	t.Cleanup(pods.Close)
	state, _ := startAgent(t, m, "--kubelet-socket="+kubelet.Socket(), "--pod-resources-socket="+dir+"/pod-resources/kubelet.sock", "--occupancy=report")
	server := exec.CommandContext(t.Context(), binaries.Path(t, "k8s-gpu"), "reset-server", "--state-dir="+state, "--driver-root="+m.Root, "--procfs-root="+m.Root+"/proc",
		"--program="+installSMI(t, m))
	check.NoError(t, server.Start())
	t.Cleanup(func() { _, _ = server.Process.Kill(), server.Wait() })
	args := []string{"reset", "--state-dir=" + state, "3"}
	var last string
	check.Until(t, "nothing keeps it from beginning", func() bool {
		code, out, errs := run(t, "k8s-gpu", append(args, "--dry-run")...)
		last = out + errs
		return code == 0
	})
	if !strings.HasSuffix(last, "nothing keeps it from beginning now; nothing was done\n") {
		t.Error(last)
	}
	code, out, errs := run(t, "k8s-gpu", args...)
	for _, line := range []string{"taking " + m.UUID(3) + " from every API", "closing the driver", "resetting it by nvidia-smi", "opening the driver", m.UUID(3) + " was reset"} {
		if !strings.Contains(out, line) {
			t.Errorf("no %q", line)
		}
	}
	action, err := m.Get(3, "recovery_action")
	mode, err2 := m.Get(3, "persistence")
	if check.NoError(t, err, err2); code != 0 || errs != "" || action != "0" || mode != "yes" {
		t.Errorf("%d, %s%s; recovery action %s, persistence mode %s", code, out, errs, action, mode)
	}
	t.Log(out)
}

// The dry run prints the steps, and the act refuses with the same reasons and exit code.
func TestResetRefused(t *testing.T) {
	m := simdriver.StartParallel(t, "h100x8")
	state, _ := startAgent(t, m)
	at := "--state-dir=" + state
	for _, program := range programs {
		if code, out, errs := run(t, program, "reset", at); code != 2 || out != "" || !strings.HasPrefix(errs, program+": reset: want a GPU") {
			t.Errorf("%s without a GPU: %d, %s%s", program, code, out, errs)
		}
	}
	if code, out, errs := run(t, "k8s-gpu", "reset", at, "99"); code != 1 || out != "" || !strings.HasPrefix(errs, `k8s-gpu: gpu = "99": no such GPU`) {
		t.Errorf("unknown: %d, %s%s", code, out, errs)
	}
	if code, _, errs := run(t, "k8s-gpu", "reset", "--state-dir=/nowhere", "3"); code != 1 || !strings.Contains(errs, "no agent is running") {
		t.Errorf("no agent: %d, %s", code, errs)
	}
	code, out, reasons := run(t, "k8s-gpu", "reset", at, "3", "--dry-run")
	if code != 1 || !strings.Contains(out, "nvidia-smi --gpu-reset -i "+m.UUID(3)) || !strings.Contains(reasons, "can't begin now") || !strings.Contains(reasons, "CANNOT: ") {
		t.Errorf("dry run: %d, %s%s", code, out, reasons)
	}
	if code, _, errs := run(t, "k8s-gpu", "reset", at, m.UUID(3)[:8]); code != 1 || errs != reasons {
		t.Errorf("%d, %s, want %s", code, errs, reasons)
	}
	t.Log(reasons)
}
