package gpureset_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

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
	hides       string // is printed in place of the persistence mode; "" = the mode is
	warns       bool   // of a corrupted infoROM, beside each answer
	daemon      func() // nvidia-persistenced closes the GPU
}

const inUse = `The following GPUs could not be reset:
  GPU 00000000:1A:00.0: In use by another client

1 device is currently being used by one or more other processes (e.g. Fabric Manager, CUDA application, graphics application such as an X server, or a
monitoring application such as another instance of nvidia-smi). Please first kill all processes using this device and all compute applications running in the system.
`

func (s *smi) call(ctx context.Context, args ...string) (string, int, error) {
	printed, status, err := s.answer(ctx, args...)
	if s.warns && status == 0 {
		return printed + "WARNING: infoROM is corrupted at gpu 0000:1A:00.0\n", 14, err
	}
	return printed, status, err
}

func (s *smi) answer(ctx context.Context, args ...string) (string, int, error) {
	line := strings.Join(args, " ")
	s.calls = append(s.calls, line)
	switch {
	case s.fails != "" && strings.HasPrefix(line, s.fails):
		return "Unable to set persistence mode: Insufficient Permissions\n", 4, nil
	case args[0] == "--query-gpu=persistence_mode" && s.hides != "":
		return s.hides + "\n", 0, nil
	case args[0] == "--query-gpu=persistence_mode":
		return s.persistence + "\n", 0, nil
	case args[0] == "-pm":
		s.persistence = map[string]string{"0": "Disabled", "1": "Enabled"}[args[1]]
		if s.daemon != nil {
			s.daemon()
		}
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

var device = gpureset.Target{GPU: "GPU-1", Minor: 3}

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
	}
	return root
}

// Case 18.
func TestResetIsRefusedWhileAProcessHasTheGPUOpen(t *testing.T) {
	for name, open := range map[string]string{"open": "/dev/nvidia3", "open in a container": "/run/rootfs/dev/nvidia3", "node was removed": "/dev/nvidia3 (deleted)"} {
		s := &smi{persistence: "Enabled"}
		r := gpureset.Local{Proc: procfs(t, map[int][]string{9: {"/dev/null"}, 2114: {"/dev/null", open}}), Call: s.call}
		err := r.Reset(t.Context(), device)
		_, ok := errors.AsType[*gpureset.InUseError](err)
		if !ok || len(s.calls) != 0 || err.Error() != "GPU-1 is open in python3 (pid 2114, control group /kubepods/pod7)" {
			t.Errorf("%s: %v, %q", name, err, s.calls)
		}
		look, err := r.Look(t.Context(), device)
		if err != nil || !slices.Equal(look.Clients, []gpureset.Client{{PID: 2114, Name: "python3", Group: "/kubepods/pod7"}}) || len(s.calls) != 0 {
			t.Errorf("%s: Look: %+v, %v, %q", name, look, err, s.calls)
		}
	}
}

// This process is a client like others: an agent that has not closed the driver.
func TestOwnProcessIsAClient(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the files of other users' processes can't be read")
	}
	dir := t.TempDir()
	check.NoError(t, os.Mkdir(dir+"/dev", 0o755), os.WriteFile(dir+"/dev/nvidia3", nil, 0o600))
	f, err := os.Open(dir + "/dev/nvidia3")
	check.NoError(t, err)
	all, err := gpureset.Clients("/proc", 3)
	check.NoError(t, err, f.Close())
	if !slices.ContainsFunc(all, func(c gpureset.Client) bool { return c.PID == os.Getpid() && c.Name != "" }) {
		t.Errorf("%v", all)
	}
}

// docker run --device=/dev/nvidia3:/dev/nvidia0 makes a node of another name.
func TestClientsAreFoundByTheNumberOfTheDevice(t *testing.T) {
	dir := t.TempDir()
	check.NoError(t, os.Mkdir(dir+"/dev", 0o755))
	if err := unix.Mknod(dir+"/dev/nvidia0", unix.S_IFCHR|0o600, int(unix.Mkdev(195, 3))); err != nil {
		t.Skipf("no device node: %v", err)
	}
	proc := procfs(t, map[int][]string{7: {dir + "/dev/nvidia0"}})
	for minor, want := range map[int]int{0: 0, 3: 1} {
		if all, err := gpureset.Clients(proc, minor); err != nil || len(all) != want {
			t.Errorf("GPU %d: %v, %v", minor, all, err)
		}
	}
}

// The first thread of a process can end before the others.
func TestClientWithoutItsFirstThread(t *testing.T) {
	proc := procfs(t, map[int][]string{7: nil})
	check.NoError(t, os.MkdirAll(proc+"/7/task/8/fd", 0o755), os.Symlink("/dev/nvidia3", proc+"/7/task/8/fd/4"), os.MkdirAll(proc+"/7/task/7", 0o755))
	if all, err := gpureset.Clients(proc, 3); err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
}

// nvidia-persistenced has a GPU open while its persistence mode is on.
func TestPersistenceDaemon(t *testing.T) {
	daemon := func(closes bool, others map[int][]string) (string, *smi) {
		others[5] = []string{"/dev/nvidia3"}
		proc := procfs(t, others)
		check.NoError(t, os.WriteFile(proc+"/5/comm", []byte("nvidia-persiste\n"), 0o600))
		return proc, &smi{persistence: "Enabled", daemon: func() {
			if closes {
				check.NoError(t, os.RemoveAll(proc+"/5"))
			}
		}}
	}
	proc, s := daemon(true, map[int][]string{})
	look, err := (gpureset.Local{Proc: proc, Call: s.call}).Look(t.Context(), device)
	if err != nil || len(look.Clients) > 0 || !look.Persistence {
		t.Errorf("%+v, %v", look, err)
	}
	if err := (gpureset.Local{Proc: proc, Call: s.call}).Reset(t.Context(), device); err != nil || s.persistence != "Enabled" {
		t.Errorf("%v, %q", err, s.calls)
	}
	proc, s = daemon(false, map[int][]string{})
	err = gpureset.Local{Proc: proc, Call: s.call}.Reset(t.Context(), device)
	if _, ok := errors.AsType[*gpureset.InUseError](err); !ok || s.persistence != "Enabled" || slices.ContainsFunc(s.calls, isReset) {
		t.Errorf("it keeps the GPU open: %v, %q", err, s.calls)
	}
	proc, s = daemon(true, map[int][]string{})
	s.persistence = "Disabled"
	if _, ok := errors.AsType[*gpureset.InUseError](gpureset.Local{Proc: proc, Call: s.call}.Reset(t.Context(), device)); !ok || len(s.calls) != 1 {
		t.Errorf("it has the GPU open without the mode: %q", s.calls)
	}
	proc, s = daemon(true, map[int][]string{6: {"/dev/nvidia3"}})
	look, err = gpureset.Local{Proc: proc, Call: s.call}.Look(t.Context(), device)
	if err != nil || len(look.Clients) != 2 || len(s.calls) > 0 {
		t.Errorf("beside another process: %+v, %v", look, err)
	}
}

// A GPU that needs a reset does not show its persistence mode. nvidia-persistenced, or what the driver reported before,
// shows that it is on.
func TestHiddenPersistenceModeOfAGPUThatNeedsAReset(t *testing.T) {
	for _, hidden := range []string{"[GPU requires reset]", "[N/A]", "[Unknown Error]"} {
		proc := procfs(t, map[int][]string{5: {"/dev/nvidia3"}})
		check.NoError(t, os.WriteFile(proc+"/5/comm", []byte("nvidia-persiste\n"), 0o600))
		s := &smi{persistence: "Enabled", hides: hidden, daemon: func() { check.NoError(t, os.RemoveAll(proc+"/5")) }}
		r := gpureset.Local{Proc: proc, Call: s.call}
		if look, err := r.Look(t.Context(), device); err != nil || len(look.Clients) > 0 || !look.Persistence {
			t.Errorf("%s: %+v, %v", hidden, look, err)
		}
		if err := r.Reset(t.Context(), device); err != nil || s.persistence != "Enabled" {
			t.Errorf("%s: %v, %q, left %s", hidden, err, s.calls, s.persistence)
		}

		before := device
		before.Persistence = true // and no daemon: the kernel module keeps the GPU open
		s = &smi{persistence: "Enabled", hides: hidden}
		r = gpureset.Local{Proc: procfs(t, nil), Call: s.call}
		if err := r.Reset(t.Context(), before); err != nil || s.persistence != "Enabled" {
			t.Errorf("%s, on before: %v, %q, left %s", hidden, err, s.calls, s.persistence)
		}

		// It refuses to change the mode, too: the daemon that has it open is named.
		proc = procfs(t, map[int][]string{5: {"/dev/nvidia3"}})
		check.NoError(t, os.WriteFile(proc+"/5/comm", []byte("nvidia-persiste\n"), 0o600))
		s = &smi{persistence: "Enabled", hides: hidden, fails: "-pm"}
		err := gpureset.Local{Proc: proc, Call: s.call}.Reset(t.Context(), device)
		if e, ok := errors.AsType[*gpureset.InUseError](err); !ok || e.Clients[0].Name != "nvidia-persiste" || slices.ContainsFunc(s.calls, isReset) {
			t.Errorf("%s, refused: %v, %q", hidden, err, s.calls)
		}
	}
}

// A corrupted infoROM is a warning beside the answer, with an exit status of its own.
func TestWarningBesideTheAnswer(t *testing.T) {
	for _, mode := range []string{"Enabled", "Disabled"} {
		s := &smi{persistence: mode, warns: true}
		r := gpureset.Local{Proc: procfs(t, nil), Call: s.call}
		if look, err := r.Look(t.Context(), device); err != nil || look.Persistence != (mode == "Enabled") {
			t.Errorf("%s: %+v, %v", mode, look, err)
		}
		if err := r.Reset(t.Context(), device); err != nil || s.persistence != mode {
			t.Errorf("%s: %v, %q, left %s", mode, err, s.calls, s.persistence)
		}
	}
	s := &smi{hides: "Enabled\nDisabled"} // two answers are none
	if err := (gpureset.Local{Proc: procfs(t, nil), Call: s.call}).Reset(t.Context(), device); err == nil || len(s.calls) != 1 {
		t.Errorf("two answers: %v, %q", err, s.calls)
	}
}

func isReset(call string) bool { return strings.HasPrefix(call, "--gpu-reset") }

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
	s.persistence = "Disabled"
	if _, err := r.Look(t.Context(), device); err != nil {
		t.Error(err)
	}
	if _, err := r.Look(t.Context(), gpureset.Target{GPU: device.GPU, Minor: -1}); err == nil {
		t.Error("a GPU without a device node can be reset")
	}
}

// Case 19: the persistence mode is off for a reset, and on again after it, whatever became of it, and after a process that was killed.
func TestPersistenceModeIsAsBefore(t *testing.T) {
	const query, off, reset, on = "--query-gpu=persistence_mode --format=csv,noheader -i GPU-1", "-pm 0 -i GPU-1", "--gpu-reset -i GPU-1", "-pm 1 -i GPU-1"
	for name, c := range map[string]struct {
		smi   *smi
		calls []string
		fails bool
	}{
		"off":             {&smi{persistence: "Disabled"}, []string{query, reset}, false},
		"not supported":   {&smi{persistence: "[N/A]"}, []string{query, reset}, false},
		"not readable":    {&smi{persistence: "[GPU requires reset]"}, []string{query, reset}, false},
		"on":              {&smi{persistence: "Enabled"}, []string{query, off, reset, on}, false},
		"the reset fails": {&smi{persistence: "Enabled", text: "GPU 00000000:1A:00.0: Unknown Error\n"}, []string{query, off, reset, on}, true},
		"the reset hangs": {&smi{persistence: "Enabled", hangs: true}, []string{query, off, reset, on}, true},
	} {
		before := c.smi.persistence
		err := gpureset.Local{Proc: procfs(t, nil), Call: c.smi.call}.Reset(t.Context(), device)
		if (err != nil) != c.fails || !slices.Equal(c.smi.calls, c.calls) || c.smi.persistence != before {
			t.Errorf("%s: %v, %q, left %s", name, err, c.smi.calls, c.smi.persistence)
		}
	}
	s := &smi{persistence: "Disabled"} // killed between: the shell has it on disk that the mode was on
	if err := (gpureset.Local{Call: s.call}).Restore(t.Context(), "GPU-1"); err != nil || s.persistence != "Enabled" || !slices.Equal(s.calls, []string{on}) {
		t.Errorf("%v, %q", err, s.calls)
	}
	s.fails = "-pm 1"
	err := gpureset.Local{Call: s.call}.Restore(t.Context(), "GPU-1")
	if e, ok := errors.AsType[*gpureset.PersistenceError](err); !ok || e.GPU != "GPU-1" {
		t.Errorf("%v", err)
	}
}

// Case 21: each refusal has its kind. A process that starts between the last look and the reset is one of them.
func TestRefused(t *testing.T) {
	for text, want := range map[string]gpureset.Refusal{
		inUse: gpureset.InUse,
		"GPU 00000000:C1:00.0 is currently in use by another process.\n\n1 device is currently being used by one or more other processes":                 gpureset.InUse,
		"Unable to reset this GPU because it's being used by some other process (e.g. CUDA application, \ngraphics application like X server, monitoring": gpureset.InUse,
		"Unable to reset GPU 00000000:18:00.0 because it's being used by some other process (e.g. CUDA application).\nSome GPUs could not be reset.":      gpureset.InUse,
		"Unable to reset GPU 00000000:1A:00.0: Insufficient Permissions\n":                                                                                gpureset.NotPermitted,
		"Resetting GPU 00000000:1A:00.0 is not supported.\n":                                                                                              gpureset.NotSupported,
		"The following GPUs could not be reset:\n  GPU 00000000:8B:00.0: Not Supported\n":                                                                 gpureset.NotSupported,
		"GPU Reset couldn't run because GPU 00000000:1A:00.0 is the primary GPU.\n":                                                                       gpureset.NotSupported,
		"GPU 00000000:1A:00.0 has NVLink peers that must also be reset: GPU 00000000:1B:00.0\n":                                                           gpureset.Linked,
		"Unable to determine the device handle for GPU0000:1A:00.0: GPU is lost.  Reboot the system to recover this GPU\n":                                gpureset.NotFound,
		"No devices were found\n": gpureset.NotFound,
		"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n\n": gpureset.NotFound,
		"Failed to initialize NVML: Driver/library version mismatch\n":                                                                                        gpureset.NotFound,
		"GPU 00000000:1A:00.0 could not be reset: Unknown Error\n":                                                                                            gpureset.Other,
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

// A process with many open files is read in parts, and each file counts.
func TestClientsWithManyFiles(t *testing.T) {
	proc := t.TempDir()
	for pid, device := range map[string]string{"7": "/dev/nvidia3", "8": "/dev/nvidia4"} {
		fds := filepath.Join(proc, pid, "fd")
		check.NoError(t, os.MkdirAll(fds, 0o755))
		for n := range 3000 {
			check.NoError(t, os.Symlink("/dev/null", filepath.Join(fds, strconv.Itoa(n))))
		}
		check.NoError(t, os.Symlink("/somewhere"+device, filepath.Join(fds, "99999")))
	}
	all, err := gpureset.Clients(proc, 3)
	if err != nil || len(all) != 1 || all[0].PID != 7 {
		t.Errorf("%+v, %v", all, err)
	}
}
