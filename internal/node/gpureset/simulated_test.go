package gpureset_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// machine is a simulated one, with its nvidia-smi in this process.
type machine struct {
	*simdriver.Machine
	gpureset.Local
	calls []string
}

func start(t *testing.T, name string) *machine {
	t.Helper()
	m := &machine{Machine: simdriver.StartParallel(t, name)}
	m.Proc = m.Root + "/proc"
	m.Call = func(ctx context.Context, args ...string) (string, int, error) {
		if args[0] == "--gpu-reset" { // not two minutes
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Second)
			defer cancel()
		}
		m.calls = append(m.calls, strings.Join(args[:len(args)-2], " "))
		var printed strings.Builder
		status := m.SMI(ctx, args, &printed)
		if ctx.Err() != nil {
			return printed.String(), -1, ctx.Err()
		}
		return printed.String(), status, nil
	}
	check.NoError(t, m.Set(3, "recovery_action", "1"), m.Set(3, "ecc_uncorrected_volatile", "4"))
	return m
}

func (m *machine) target() gpureset.Target {
	return gpureset.Target{GPU: gpu.DeviceID(m.UUID(3)), Minor: 3}
}

func (m *machine) value(t *testing.T, key string) string {
	t.Helper()
	v, err := m.Get(3, key)
	check.NoError(t, err)
	return v
}

// openNode opens the GPU's device node, as the simulated driver does: no kernel module has it.
func (m *machine) openNode(t *testing.T) *os.File {
	t.Helper()
	path := m.Root + "/dev/nvidia3"
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	check.NoError(t, err)
	return os.NewFile(uintptr(fd), path)
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("nvidia-smi resets GPUs for root only")
	}
}

// Case 19, with nvidia-smi.
func TestMachineIsReset(t *testing.T) {
	needRoot(t)
	for _, mode := range []string{"yes", "no", "none"} {
		m := start(t, "h100x8")
		check.NoError(t, m.SetMIG(3, "1g.10gb"), m.Set(3, "persistence", mode))
		if err := m.Local.Reset(t.Context(), m.target()); err != nil || m.value(t, "persistence") != mode || m.value(t, "recovery_action") != "0" {
			t.Errorf("persistence %s: %v, then %s, action %s", mode, err, m.value(t, "persistence"), m.value(t, "recovery_action"))
		}
		if left, err := m.Instances(3); err != nil || len(left) > 0 || m.value(t, "mig") != "yes" {
			t.Errorf("MIG instances %v, %v", left, err)
		}
		check.NoError(t, m.Local.Reset(t.Context(), gpureset.Target{GPU: gpu.DeviceID(m.UUID(4)), Minor: 4}))
	}
	m := start(t, "h100x8")
	check.NoError(t, m.Set(3, "persistence", "no"))
	if err := m.Local.Restore(t.Context(), m.target().GPU); err != nil || m.value(t, "persistence") != "yes" {
		t.Errorf("restored: %v, %s", err, m.value(t, "persistence"))
	}
}

// Case 18, with nvidia-smi.
func TestMachineInUse(t *testing.T) {
	needRoot(t)
	m := start(t, "h100x8")
	node := m.openNode(t)
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{node}
	check.NoError(t, cmd.Start(), node.Close(), m.ShowProcess(cmd.Process.Pid))
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	err := m.Local.Reset(t.Context(), m.target())
	e, ok := errors.AsType[*gpureset.InUseError](err)
	if !ok || len(e.Clients) != 1 || e.Clients[0].PID != cmd.Process.Pid || e.Clients[0].Name != "sleep" || len(m.calls) > 0 {
		t.Errorf("%v, calls %q", err, m.calls)
	}
	if m.value(t, "recovery_action") != "1" || m.value(t, "persistence") != "yes" {
		t.Error("the GPU was touched")
	}
}

// Each refusal of nvidia-smi has its kind, and the machine is as before.
func TestMachineRefuses(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct {
		machine string
		breaks  func(t *testing.T, m *machine) error
		want    gpureset.Refusal
	}{
		"a process that the driver lists": {"h100x8", func(_ *testing.T, m *machine) error { return m.StartProcess(3, 9999, 100) }, gpureset.InUse},
		// Case 21: between the last look and the reset.
		"a process that has it open": {"h100x8", func(t *testing.T, m *machine) error {
			f := m.openNode(t)
			t.Cleanup(func() { _ = f.Close() })
			return nil
		}, gpureset.InUse},
		"a kernel module": {"h100x8", func(_ *testing.T, m *machine) error {
			return m.Fail(simdriver.GPU(3), simdriver.SMIReset, "IN_USE", simdriver.Always)
		}, gpureset.InUse},
		"not supported": {"h100x8", func(_ *testing.T, m *machine) error {
			return m.Fail(simdriver.GPU(3), simdriver.SMIReset, "NOT_SUPPORTED", simdriver.Always)
		}, gpureset.NotSupported},
		"in a guest":           {"h100x8", func(_ *testing.T, m *machine) error { return m.Set(3, "virtualization", "vgpu") }, gpureset.NotSupported},
		"of the display":       {"h100x8", func(_ *testing.T, m *machine) error { return m.Set(3, "display_active", "yes") }, gpureset.NotSupported},
		"NVLinks of Volta":     {"dgx1", func(*testing.T, *machine) error { return nil }, gpureset.Linked},
		"NVLinks, no switches": {"a100-islands", func(*testing.T, *machine) error { return nil }, gpureset.Linked},
		"not permitted": {"h100x8", func(_ *testing.T, m *machine) error {
			return m.Fail(simdriver.GPU(3), simdriver.SMIReset, "NO_PERMISSION", simdriver.Always)
		}, gpureset.NotPermitted},
		"persistence mode not permitted": {"h100x8", func(_ *testing.T, m *machine) error {
			return m.Fail(simdriver.GPU(3), simdriver.SMIPersistence, "NO_PERMISSION", simdriver.Always)
		}, gpureset.NotPermitted},
		"lost":      {"h100x8", func(_ *testing.T, m *machine) error { return m.Lose(3) }, gpureset.NotFound},
		"not there": {"h100x8", func(_ *testing.T, m *machine) error { return m.Remove(3) }, gpureset.NotFound},
		"no driver": {"h100x8", func(_ *testing.T, m *machine) error { return m.Unload() }, gpureset.NotFound},
		"unknown error": {"h100x8", func(_ *testing.T, m *machine) error {
			return m.Fail(simdriver.All, simdriver.SMIReset, "UNKNOWN", simdriver.Always)
		}, gpureset.Other},
		"it hangs": {"h100x8", func(_ *testing.T, m *machine) error { return m.Hang(simdriver.GPU(3), simdriver.SMIReset) }, gpureset.TimedOut},
	} {
		t.Run(name, func(t *testing.T) {
			m := start(t, c.machine)
			target := m.target()
			check.NoError(t, c.breaks(t, m))
			err := m.Local.Reset(t.Context(), target)
			e, ok := errors.AsType[*gpureset.RefusedError](err)
			if !ok || e.Refusal != c.want || e.Text == "" {
				t.Fatalf("%v, calls %q", err, m.calls)
			}
			if slots, err := m.Slots(); err != nil || slices.Contains(slots, 3) && (m.value(t, "persistence") != "yes" || m.value(t, "recovery_action") != "1") {
				t.Errorf("the machine is not as before: %v", err)
			}
		})
	}
}

// A GPU that does not tell its persistence mode is reset, if that is off.
func TestMachineWithoutAnAnswer(t *testing.T) {
	needRoot(t)
	m := start(t, "h100x8")
	check.NoError(t, m.Fail(simdriver.GPU(3), simdriver.SMIQuery, "RESET_REQUIRED", simdriver.Always))
	e, ok := errors.AsType[*gpureset.RefusedError](m.Local.Reset(t.Context(), m.target()))
	if !ok || e.Refusal != gpureset.InUse {
		t.Errorf("with persistence mode: %v", e)
	}
	check.NoError(t, m.Set(3, "persistence", "no"), m.Local.Reset(t.Context(), m.target()))
}

// Case 20: nvidia-smi has reset the GPU, and the driver still asks for a reset.
func TestMachineKeepsItsFault(t *testing.T) {
	needRoot(t)
	m := start(t, "h100x8")
	check.NoError(t, m.Set(3, "reset_keeps_fault", "yes"), m.Local.Reset(t.Context(), m.target()))
	if m.value(t, "recovery_action") != "1" || m.value(t, "ecc_uncorrected_volatile") != "0" {
		t.Errorf("recovery action %s, errors %s", m.value(t, "recovery_action"), m.value(t, "ecc_uncorrected_volatile"))
	}
}

// The same as a program, which no other user can replace.
func TestMachineByTheProgram(t *testing.T) {
	needRoot(t)
	cache, err := os.UserCacheDir()
	check.NoError(t, err, os.MkdirAll(cache, 0o755))
	dir, err := os.MkdirTemp(cache, "nvidia-smi-")
	check.NoError(t, err, os.Chmod(dir, 0o755))
	t.Cleanup(func() { check.NoError(t, os.RemoveAll(dir)) })
	m := start(t, "h100x8")
	program := gpureset.Program{Path: filepath.Join(dir, "nvidia-smi"), Root: m.Root, Libraries: []string{"usr/lib/x86_64-linux-gnu"}}
	check.NoError(t, m.InstallSMI(t.Context(), program.Path))
	if err := program.Check(); err != nil {
		t.Skipf("no folder that only root can write: %v", err)
	}
	r := gpureset.Local{Proc: m.Proc, Program: program}
	look, err := r.Look(t.Context(), m.target())
	if err != nil || len(look.Clients) > 0 || !look.Persistence {
		t.Errorf("%+v, %v", look, err)
	}
	check.NoError(t, r.Reset(t.Context(), m.target()))
	if m.value(t, "recovery_action") != "0" || m.value(t, "persistence") != "yes" {
		t.Errorf("action %s, persistence %s", m.value(t, "recovery_action"), m.value(t, "persistence"))
	}
	check.NoError(t, m.Lose(3))
	if e, ok := errors.AsType[*gpureset.RefusedError](r.Reset(t.Context(), m.target())); !ok || e.Refusal != gpureset.NotFound {
		t.Errorf("%v", e)
	}
}
