package cli_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/node/resetserver"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// installSMI returns the path of the nvidia-smi of a machine, which only root can replace.
func installSMI(t *testing.T, m *simdriver.Machine) (program string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	check.NoError(t, err, os.MkdirAll(cache, 0o755))
	dir, err := os.MkdirTemp(cache, "nvidia-smi-") // not in /tmp, where every user can write
	check.NoError(t, err, os.Chmod(dir, 0o755))
	t.Cleanup(func() { check.NoError(t, os.RemoveAll(dir)) })
	program = filepath.Join(dir, "nvidia-smi")
	check.NoError(t, m.InstallSMI(t.Context(), program))
	if err := (gpureset.Program{Path: program}).Check(); err != nil {
		t.Skipf("no folder that only root can write: %v", err)
	}
	return program
}

// The component resets a GPU of a machine by its nvidia-smi, for an agent that has taken it.
func TestResetServer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may reset GPUs")
	}
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	program := installSMI(t, m)
	check.NoError(t, m.Set(3, "recovery_action", "1"))
	state := coretest.ShortDir(t)
	cmd := exec.Command(binaries.Path(t, "k8s-gpu"), "reset-server", "--state-dir="+state, "--driver-root="+m.Root, "--procfs-root="+m.Root+"/proc", "--program="+program)
	var log bytes.Buffer
	cmd.Stderr = &log
	check.NoError(t, cmd.Start())
	client := resetserver.Client{Socket: resetserver.Path(state)}
	check.Until(t, "it listens", func() bool { return client.Ready(t.Context()) == nil })
	target := gpureset.Target{GPU: gpu.DeviceID(m.UUID(3)), Minor: 3}
	if _, ok := errors.AsType[*gpureset.UnavailableError](client.Reset(t.Context(), target)); !ok {
		t.Error("a GPU is reset that no agent has taken")
	}
	check.NoError(t, ownership.Write(state, ownership.File{Taken: map[gpu.DeviceID]ownership.Mark{target.GPU: {Agent: ownership.Agents()[0], Purpose: inventory.Reset}}}))
	look, err := client.Look(t.Context(), target)
	if err != nil || !look.Persistence {
		t.Errorf("%+v, %v", look, err)
	}
	check.NoError(t, client.Reset(t.Context(), target))
	action, err := m.Get(3, "recovery_action")
	mode, err2 := m.Get(3, "persistence")
	if check.NoError(t, err, err2); action != "0" || mode != "yes" {
		t.Errorf("recovery action %s, persistence mode %s", action, mode)
	}
	check.NoError(t, m.StartProcess(3, 9999, 100))
	if e, ok := errors.AsType[*gpureset.RefusedError](client.Reset(t.Context(), target)); !ok || e.Refusal != gpureset.InUse {
		t.Errorf("%v", e)
	}
	check.NoError(t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
	for _, line := range []string{"GPU was reset", "In use by another client", m.UUID(3)} {
		if !strings.Contains(log.String(), line) {
			t.Errorf("no %q in the log\n%s", line, &log)
		}
	}
	if _, err := os.Lstat(client.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}
