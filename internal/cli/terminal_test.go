package cli_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// startAgent starts k8s-gpu on a machine, and returns its state directory and a function that ends it. Nomad starts the other agent.
func startAgent(t *testing.T, m *simdriver.Machine, flags ...string) (stateDir string, end func()) {
	t.Helper()
	stateDir = coretest.ShortDir(t)
	agent := exec.CommandContext(t.Context(), binaries.Path(t, "k8s-gpu"), append([]string{
		"--state-dir=" + stateDir, "--driver-root=" + m.Root, "--sysfs-root=" + m.Root + "/sys", "--procfs-root=" + m.Root + "/proc",
		"--cdi-dir=" + stateDir + "/cdi", "--kubelet-socket=", "--pod-resources-socket=", "--http-address=", "--kernel-log=off",
	}, flags...)...)
	check.NoError(t, agent.Start())
	end = sync.OnceFunc(func() {
		_ = agent.Process.Kill()
		_ = agent.Wait()
	})
	t.Cleanup(end)
	check.Until(t, "the agent answers", func() bool {
		_, out, _ := run(t, "k8s-gpu", "inspect", "--state-dir="+stateDir)
		return strings.Contains(out, "driver ready") && !strings.Contains(out, "no agent") && !strings.Contains(out, "OVERLAP")
	})
	return stateDir, end
}

// screen is a terminal, on which a program runs.
type screen struct {
	*os.File // its other side
	cmd      *exec.Cmd
	ended    chan struct{}

	mu   sync.Mutex
	text bytes.Buffer
}

// openScreen starts a program on a new terminal (pty(7)).
func openScreen(t *testing.T, columns, rows uint16, cmd *exec.Cmd) *screen {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudoterminal: ", err)
	}
	s := &screen{File: master, cmd: cmd, ended: make(chan struct{})}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	check.NoError(t, err)
	s.resize(t, columns, rows)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	check.NoError(t, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	check.NoError(t, cmd.Start())
	_ = slave.Close()
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = master.Close() })
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, err := master.Read(buffer)
			s.mu.Lock()
			s.text.Write(buffer[:n])
			s.mu.Unlock()
			if err != nil { // EIO: the program has ended
				_ = cmd.Wait()
				close(s.ended)
				return
			}
		}
	}()
	return s
}

func (s *screen) resize(t *testing.T, columns, rows uint16) {
	t.Helper()
	check.NoError(t, unix.IoctlSetWinsize(int(s.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}))
}

// shown is what was written so far, from a byte on.
func (s *screen) shown(from int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.text.Bytes()[min(from, s.text.Len()):])
}

// await waits until text is written after a byte, and returns the number of bytes then.
func (s *screen) await(t *testing.T, from int, text string) int {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(s.shown(from), text); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %q in %q", text, s.shown(from))
		}
	}
	return len(s.shown(0))
}

// On a terminal, top fits its size, also when that changes; it shows when the agent has ended, and Ctrl-C leaves the terminal as it was.
func TestTop(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	state, end := startAgent(t, m)
	code, out, errs := run(t, "k8s-gpu", "top", "--state-dir="+state, "--driver-root="+m.Root)
	if code != 0 || errs != "" || strings.Count(out, "H100 80GB HBM3  healthy") != 8 || strings.Contains(out, "\x1b") || !strings.Contains(out, "8 devices: 8 healthy  ") {
		t.Errorf("to a pipe: %d, %s%s", code, out, errs)
	}
	s := openScreen(t, 60, 6, exec.Command(binaries.Path(t, "k8s-gpu"), "top", "--interval=200ms", "--state-dir="+state, "--driver-root="+m.Root))
	read := s.await(t, 0, "6 more: 6 healthy")
	if !strings.HasPrefix(s.shown(0), "\x1b[?1049h\x1b[?25l") {
		t.Errorf("the beginning is %q", s.shown(0))
	}
	s.resize(t, 150, 40)
	s.await(t, read, "H100 80GB HBM3  healthy     0    0.5/79.6   70/700      31")
	check.NoError(t, m.XID(3, 95))
	read = s.await(t, read, "unhealthy XID_95")
	end()
	read = s.await(t, read, "no agent is running")
	if _, err := s.Write([]byte{3}); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	s.await(t, read-1, "\x1b[?25h\x1b[?1049l")
	select {
	case <-s.ended:
	case <-time.After(20 * time.Second):
		t.Fatal("it does not end")
	}
	if code := s.cmd.ProcessState.ExitCode(); code != 0 || !strings.HasSuffix(s.shown(0), "\x1b[?25h\x1b[?1049l") {
		t.Errorf("exit code %d, the end is %q", code, s.shown(read))
	}

	for _, program := range programs {
		if code, out, errs := run(t, program, "top", "--state-dir="+state, "--driver-root="+m.Root); code != 0 || errs != "" || !strings.Contains(out, program+" (not running)") || !strings.Contains(out, "70/700") {
			t.Errorf("%s without an agent: %d, %s%s", program, code, out, errs)
		}
		if code, out, errs := run(t, program, "top", "--state-dir="+state, "--driver-root=/nowhere"); code != 1 || out != "" || !strings.Contains(errs, "no agent is running") || !strings.Contains(errs, "driver absent: ") {
			t.Errorf("%s without an agent and a driver: %d, %s%s", program, code, out, errs)
		}
		if code, _, errs := run(t, program, "top", "--interval=1ms"); code != 2 || errs != program+": top: --interval = \"1ms\": want a duration of 100ms or more, such as 2s\n" {
			t.Errorf("%s: %d, %s", program, code, errs)
		}
	}
}
