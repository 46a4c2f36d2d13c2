package gpureset_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/test/check"
)

// smi is an nvidia-smi of one GPU. Texts and status are those of NVIDIA's (NVSentinel#1690, gpu-operator#118).
type smi struct {
	persistence string
	calls       []string
	text        string // with which it refuses a reset; "" = it resets
	fails       string // the call that begins with this fails
	hangs       bool   // at the reset
}

const inUse = `The following GPUs could not be reset:
  GPU 00000000:1A:00.0: In use by another client

1 device is currently being used by one or more other processes (e.g. Fabric Manager, CUDA application, graphics application such as an X server, or a
monitoring application such as another instance of nvidia-smi). Please first kill all processes using this device and all compute applications running in the system.
`

func (s *smi) call(ctx context.Context, args ...string) (string, int, error) {
	line := strings.Join(args, " ")
	s.calls = append(s.calls, line)
	switch {
	case s.fails != "" && strings.HasPrefix(line, s.fails):
		return "Unable to set persistence mode: Insufficient Permissions\n", 4, nil
	case args[0] == "--query-gpu=persistence_mode":
		return s.persistence + "\n", 0, nil
	case args[0] == "-pm":
		s.persistence = map[string]string{"0": "Disabled", "1": "Enabled"}[args[1]]
		return "All done.\n", 0, nil
	case s.hangs:
		return "", -1, fmt.Errorf("killed: %w", context.DeadlineExceeded)
	case s.persistence == "Enabled":
		return inUse, 255, nil
	case s.text != "":
		return s.text, 255, nil
	}
	return "GPU 00000000:1A:00.0 was successfully reset.\nAll done.\n", 0, ctx.Err()
}

var device = gpu.Device{At: gpu.WholeGPU("GPU-1"), Minor: 3}

// procfs is one with these processes: of each the paths that it has open.
func procfs(t *testing.T, processes map[int][]string) string {
	t.Helper()
	root := t.TempDir()
	check.NoError(t, os.Mkdir(filepath.Join(root, "self"), 0o755))
	for pid, open := range processes {
		dir := filepath.Join(root, fmt.Sprint(pid))
		check.NoError(t, os.MkdirAll(filepath.Join(dir, "fd"), 0o755))
		for i, path := range open {
			check.NoError(t, os.Symlink(path, filepath.Join(dir, "fd", fmt.Sprint(i))))
		}
		check.NoError(t, os.WriteFile(filepath.Join(dir, "comm"), []byte("python3\n"), 0o600))
		check.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup"), []byte("0::/kubepods/pod7\n"), 0o600))
		check.NoError(t, os.WriteFile(filepath.Join(dir, "maps"), []byte("55d0-55d1 r--p 0 fd:00 1 /usr/bin/python3\n"), 0o600))
	}
	return root
}

// A GPU that nobody uses is reset, and its persistence mode is as before.
func TestReset(t *testing.T) {
	for mode, want := range map[string][]string{
		"Disabled": {"--query-gpu=persistence_mode --format=csv,noheader -i GPU-1", "--gpu-reset -i GPU-1"},
		"[N/A]":    {"--query-gpu=persistence_mode --format=csv,noheader -i GPU-1", "--gpu-reset -i GPU-1"},
		"Enabled":  {"--query-gpu=persistence_mode --format=csv,noheader -i GPU-1", "-pm 0 -i GPU-1", "--gpu-reset -i GPU-1", "-pm 1 -i GPU-1"},
	} {
		s := &smi{persistence: mode}
		r := gpureset.Local{Proc: procfs(t, map[int][]string{7: {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia4", "/dev/nvidia33"}}), Call: s.call}
		if err := r.Reset(t.Context(), device); err != nil || !slices.Equal(s.calls, want) || s.persistence != mode {
			t.Errorf("%s: %v, %q, left %s", mode, err, s.calls, s.persistence)
		}
	}
}

// case 18 of the contract: a GPU that is open in a process is not touched, and the process is named.
func TestInUse(t *testing.T) {
	for name, open := range map[string]string{"open": "/dev/nvidia3", "open in a container": "/run/rootfs/dev/nvidia3", "node was removed": "/dev/nvidia3 (deleted)"} {
		s := &smi{persistence: "Enabled"}
		r := gpureset.Local{Proc: procfs(t, map[int][]string{9: {"/dev/null"}, 2114: {"/dev/null", open}}), Call: s.call}
		err := r.Reset(t.Context(), device)
		e, ok := errors.AsType[*gpureset.InUseError](err)
		if !ok || len(s.calls) != 0 || err.Error() != "GPU-1 is open in python3 (pid 2114, control group /kubepods/pod7)" {
			t.Errorf("%s: %v, %q", name, err, s.calls)
		}
		if checked := r.Check(device); ok && checked.Error() != e.Error() {
			t.Errorf("%s: Check: %v", name, checked)
		}
	}
	proc := procfs(t, map[int][]string{7: nil})
	check.NoError(t, os.WriteFile(filepath.Join(proc, "7/maps"), []byte("7f00-7f01 rw-s 0 00:05 9 /dev/nvidia3\n"), 0o600))
	if all, err := gpureset.Clients(proc, 3); err != nil || len(all) != 1 {
		t.Errorf("mapped and closed: %v, %v", all, err)
	}
}

// What can't be read may have the GPU.
func TestUnreadProcess(t *testing.T) {
	proc := procfs(t, map[int][]string{7: nil})
	check.NoError(t, os.RemoveAll(filepath.Join(proc, "7/fd")))
	check.NoError(t, os.WriteFile(filepath.Join(proc, "7/fd"), nil, 0o600))
	s := &smi{}
	r := gpureset.Local{Proc: proc, Call: s.call}
	if err := r.Reset(t.Context(), device); err == nil || !strings.Contains(err.Error(), "process 7") || len(s.calls) != 0 {
		t.Errorf("%v, %q", err, s.calls)
	}
	check.NoError(t, os.Remove(filepath.Join(proc, "7/fd"))) // it has ended
	if err := r.Check(device); err != nil {
		t.Error(err)
	}
	if err := r.Check(gpu.Device{At: device.At, Minor: -1}); err == nil {
		t.Error("a GPU without a device node can be reset")
	}
}

// cases 19 and 21 of the contract: each refusal has its kind, and persistence mode is on again after each.
func TestRefused(t *testing.T) {
	for text, want := range map[string]gpureset.Refusal{
		inUse: gpureset.InUse,
		"GPU 00000000:C1:00.0 is currently in use by another process.\n":                                                   gpureset.InUse,
		"Unable to reset this GPU because it's being used by some other process (e.g. CUDA application)\n":                 gpureset.InUse,
		"Unable to reset GPU 00000000:1A:00.0: Insufficient Permissions\n":                                                 gpureset.NotPermitted,
		"Resetting GPU 00000000:1A:00.0 is not supported.\n":                                                               gpureset.NotSupported,
		"GPU Reset couldn't run because GPU 00000000:1A:00.0 is the primary GPU.\n":                                        gpureset.NotSupported,
		"GPU 00000000:1A:00.0 is connected to other GPUs by NVLink, and they must be reset together\n":                     gpureset.Linked,
		"Unable to determine the device handle for GPU0000:1A:00.0: GPU is lost.  Reboot the system to recover this GPU\n": gpureset.NotFound,
		"No devices were found\n":                                  gpureset.NotFound,
		"GPU 00000000:1A:00.0 could not be reset: Unknown Error\n": gpureset.Other,
		"": gpureset.Other,
	} {
		s := &smi{persistence: "Enabled", text: text}
		if text == "" {
			s.text = "\n"
		}
		err := gpureset.Local{Proc: procfs(t, nil), Call: s.call}.Reset(t.Context(), device)
		e, ok := errors.AsType[*gpureset.RefusedError](err)
		if !ok || e.Refusal != want || s.persistence != "Enabled" || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, left %s", text, err, s.persistence)
		}
	}
}

// Other ends: what is not certain is no success, and a persistence mode that could not be restored is told with its remedy.
func TestUncertain(t *testing.T) {
	s := &smi{persistence: "Enabled", hangs: true}
	err := gpureset.Local{Proc: procfs(t, nil), Call: s.call}.Reset(t.Context(), device)
	if e, ok := errors.AsType[*gpureset.RefusedError](err); !ok || e.Refusal != gpureset.TimedOut || s.persistence != "Enabled" {
		t.Errorf("hung: %v", err)
	}
	s = &smi{persistence: "Enabled", fails: "-pm 1"}
	err = gpureset.Local{Proc: procfs(t, nil), Call: s.call}.Reset(t.Context(), device)
	if e, ok := errors.AsType[*gpureset.PersistenceError](err); !ok || !strings.Contains(e.Error(), "nvidia-smi -pm 1 -i GPU-1") {
		t.Errorf("persistence mode not restored: %v", err)
	}
	s = &smi{persistence: "Enabled", fails: "-pm 0"}
	err = gpureset.Local{Proc: procfs(t, nil), Call: s.call}.Reset(t.Context(), device)
	if e, ok := errors.AsType[*gpureset.RefusedError](err); !ok || e.Refusal != gpureset.NotPermitted || len(s.calls) != 2 {
		t.Errorf("persistence mode can't be changed: %v, %q", err, s.calls)
	}
	s = &smi{persistence: "Unknown Error"}
	if err := (gpureset.Local{Proc: procfs(t, nil), Call: s.call}).Reset(t.Context(), device); err == nil || len(s.calls) != 1 {
		t.Errorf("persistence mode not known: %v, %q", err, s.calls)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s = &smi{}
	if err := (gpureset.Local{Proc: procfs(t, nil), Call: s.call}).Reset(ctx, device); !errors.Is(err, context.Canceled) || len(s.calls) != 0 {
		t.Errorf("ended before: %v, %q", err, s.calls)
	}
	s = &smi{persistence: "Disabled", text: "nothing about a success"}
	r := gpureset.Local{Proc: procfs(t, nil), Call: func(ctx context.Context, args ...string) (string, int, error) {
		printed, _, err := s.call(ctx, args...)
		return printed, 0, err
	}}
	if err := r.Reset(t.Context(), device); err == nil {
		t.Error("status 0 without the text of a success is one")
	}
}
