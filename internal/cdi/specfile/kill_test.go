package specfile

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/test/check"
)

// writerEnv is the file that a process writes instead of running tests.
const writerEnv = "TANDEM_TEST_WRITE"

func init() {
	if os.Getenv(writerEnv) != "" {
		runtime.LockOSThread() // the main goroutine stays on the main thread, which is the one that is traced
	}
}

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		writerProcess(path)
		return
	}
	os.Exit(m.Run())
}

// writerProcess stops before and after it replaces the file.
func writerProcess(path string) {
	f := File{Path: path}
	text, err := Marshal(example(2))
	stop := func() { _ = unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP) }
	stop()
	if err == nil {
		f.Check()
		err = f.Replace(text, 1)
	}
	stop()
	if err != nil {
		panic(err)
	}
}

// killAt starts a writer and kills it at the n-th time that it enters or leaves a system call. It reports false if the writer was done
// before.
func killAt(t *testing.T, path, tmpdir string, n int) bool {
	t.Helper()
	runtime.LockOSThread() // of the tracer
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = []string{writerEnv + "=" + path, "TMPDIR=" + tmpdir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := cmd.Start(); err != nil {
		t.Skip("SKIPPED: no process can be traced here: ", err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	pid, counting, signal := cmd.Process.Pid, false, 0
	for calls := 0; ; {
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(pid, &status, syscall.WALL, nil); err != nil || !status.Stopped() {
			t.Fatalf("the writer ended: %v, status %d", err, status)
		}
		switch stopped := status.StopSignal(); {
		case stopped == syscall.SIGTRAP|0x80:
			signal = 0
			if calls++; calls == n {
				return true
			}
		case stopped == syscall.SIGSTOP && counting:
			return false
		case stopped == syscall.SIGSTOP:
			counting, signal = true, 0
			check.NoError(t, syscall.PtraceSetOptions(pid, syscall.PTRACE_O_TRACESYSGOOD))
		case stopped == syscall.SIGTRAP: // after exec
			signal = 0
		default: // of Go's runtime
			signal = int(stopped)
		}
		resume := syscall.PtraceCont
		if counting {
			resume = syscall.PtraceSyscall
		}
		check.NoError(t, resume(pid, signal))
	}
}

// A writer that is killed at any system call leaves the old file or the new one, complete and with its mode, and at most
// a temporary file beside it, which no runtime reads and the next start removes. $TMPDIR is not used.
func TestKilledAtEachStep(t *testing.T) {
	before, err := Marshal(example(1))
	check.NoError(t, err)
	after, err := Marshal(example(2))
	check.NoError(t, err)
	tmpdir := t.TempDir()
	for _, existed := range []bool{true, false} {
		var olds, news, temporaries, n int
		for n = 1; ; n++ {
			folder := t.TempDir()
			path := filepath.Join(folder, "vendor.example-gpu.json")
			if existed {
				check.NoError(t, os.WriteFile(path, before, 0o644))
			}
			killed := killAt(t, path, tmpdir, n)
			for _, name := range namesIn(t, folder) {
				if name != filepath.Base(path) {
					temporaries++
					if !strings.HasPrefix(name, ".") || IsSpec(name) {
						t.Errorf("step %d: a file that runtimes may read: %s", n, name)
					}
				}
			}
			text, err := os.ReadFile(path)
			switch {
			case bytes.Equal(text, after):
				news++
			case existed && bytes.Equal(text, before), !existed && os.IsNotExist(err):
				olds++
			default:
				t.Errorf("step %d: neither the old nor the new file: %v, %d bytes", n, err, len(text))
			}
			if err == nil {
				if info, _ := os.Stat(path); info.Mode() != 0o644 {
					t.Errorf("step %d: mode %v", n, info.Mode())
				}
				if _, err := cdi.ReadSpec(path, 0); err != nil {
					t.Errorf("step %d: %v", n, err)
				}
			}
			(&File{Path: path}).Sweep()
			if left := namesIn(t, folder); len(left) > 1 || len(left) == 1 && left[0] != filepath.Base(path) {
				t.Errorf("step %d: left after a new start: %v", n, left)
			}
			if !killed {
				break
			}
		}
		t.Logf("file there before: %v. %d steps: %d times the old, %d times the new file, %d temporary files", existed, n-1, olds, news, temporaries)
		if olds < 10 || news < 2 || temporaries < 8 {
			t.Errorf("too few steps: %d old, %d new, %d temporary files", olds, news, temporaries)
		}
	}
	if left := namesIn(t, tmpdir); len(left) > 0 {
		t.Errorf("files in TMPDIR: %v", left)
	}
}

func namesIn(t *testing.T, folder string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	check.NoError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
