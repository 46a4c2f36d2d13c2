package supervisor

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/mpscontrol"
)

// modes returns the last compute mode that was set, with its GPUs.
func (h *host) mode() string {
	lines := strings.Split(strings.TrimSpace(h.read(h.programs, mpscontrol.ModesFile)), "\n")
	return lines[len(lines)-1]
}

// replaceControl puts a socket of another process in the place of a daemon's.
func (h *host) replaceControl(pool string) *net.UnixListener {
	h.Helper()
	path := filepath.Join(mps.Pipe(h.root, pool), mps.ControlSocket)
	check.NoError(h.T, os.Remove(path))
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	check.NoError(h.T, err)
	l.SetUnlinkOnClose(false)
	h.Cleanup(func() { _ = l.Close() })
	return l
}

// Whatever a container writes as the PID of the daemon, it is the supervisor's, and is ended with the compute mode of
// its GPUs.
func TestPIDFileOfAContainer(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"a FIFO":          func(path string) error { return syscall.Mkfifo(path, 0o644) },
		"a link":          func(path string) error { return os.Symlink("/dev/zero", path) },
		"a sparse file":   func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, 1<<40)) },
		"another process": func(path string) error { return os.WriteFile(path, []byte("1\n"), 0o644) },
		"nothing":         func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			s := h.supervisor()
			h.offer(nil, pool("gpu.mps", 50, 0))
			h.pass(s)
			file := filepath.Join(mps.Pipe(h.root, "gpu.mps"), mpscontrol.PIDFile)
			check.NoError(t, os.Remove(file))
			check.NoError(t, put(file))
			for range 2 {
				h.pass(s)
			}
			h.want("with the file", "gpu.mps")
			if strings.Contains(h.log.String(), "another program") {
				t.Errorf("it is another program's:\n%s", h.log)
			}
			h.offer(nil)
			h.pass(s)
			h.want("without the pool")
			if want := string(coretest.GPU(0)) + " DEFAULT"; h.mode() != want {
				t.Errorf("compute mode %q, want %q", h.mode(), want)
			}
		})
	}
}

// A container that puts a socket in the place of a daemon's, and does not answer, is asked nothing. The daemon, which
// no client finds, is ended when no work has its GPUs, and another one takes its place.
func TestControlSocketOfAContainer(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	first := s.records()["gpu.mps"].Process
	fake := h.replaceControl("gpu.mps")
	h.use([]gpu.DeviceID{coretest.GPU(0)}, nil)
	h.pass(s)
	if !first.runs() || !strings.Contains(h.log.String(), "no client finds it, and work may have "+string(coretest.GPU(0))) {
		t.Errorf("while work has the GPU: runs = %v\n%s", first.runs(), h.log)
	}
	h.use(nil, nil)
	h.pass(s)
	r := s.records()["gpu.mps"]
	if first.runs() || !r.Process.runs() || r.State != mps.Ready || s.look("gpu.mps", r, true) != serving {
		t.Errorf("without work: the first one runs = %v, the record is %+v\n%s", first.runs(), r, h.log)
	}
	_ = fake.Close()
}

// A socket in the place of a daemon that has ended is not another program's daemon: a pool would be without one, and
// nobody would notice.
func TestSocketAfterTheEndOfADaemon(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	first := s.records()["gpu.mps"].Process
	check.NoError(t, first.signal(syscall.SIGKILL))
	check.NoError(t, first.awaitEnd(t.Context()))
	h.replaceControl("gpu.mps")
	h.pass(s)
	if r := s.records()["gpu.mps"]; !r.Process.runs() || s.look("gpu.mps", r, true) != serving {
		t.Errorf("the record is %+v\n%s", r, h.log)
	}
}

// Folders that lead out of the root are not used: this process is root, and would write where a link leads.
func TestFoldersThatAreLinks(t *testing.T) {
	h := newHost(t)
	outside := t.TempDir()
	check.NoError(t, os.MkdirAll(filepath.Join(h.root, inventory.ResourceDomain), 0o755))
	check.NoError(t, os.Symlink(outside, filepath.Join(h.root, inventory.ResourceDomain, "gpu.mps")))
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0), pool("few", 50, 1))
	h.pass(s)
	h.want("beside a link", "few")
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("%d files outside, %v", len(entries), err)
	}
}

// Nothing is mounted where a link leads.
func TestShmThatIsALink(t *testing.T) {
	root := t.TempDir()
	check.NoError(t, os.Symlink(t.TempDir(), filepath.Join(root, "shm")))
	if err := MountShm(root, ""); err == nil || !strings.HasSuffix(err.Error(), "is no folder") {
		t.Error(err)
	}
}

// What a program prints is bounded.
func TestOutputIsBounded(t *testing.T) {
	_, err := output(t.Context(), "", nil, "/bin/sh", "-c", "while :; do echo 4711; done")
	if err == nil || len(err.Error()) > 5<<10 {
		t.Errorf("%d bytes: %.100v", len(err.Error()), err)
	}
}

// A daemon whose supervisor was killed before it had recorded its process is ended, as it may have no limits.
func TestSupervisorKilledBeforeTheRecord(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	r := s.records()["gpu.mps"]
	first := r.Process
	r.Record, r.Process = mps.Record{State: mps.Starting}, process{}
	check.NoError(t, s.write(r))
	h.pass(h.supervisor())
	if r := s.records()["gpu.mps"]; first.runs() || !r.Process.runs() || r.State != mps.Ready {
		t.Errorf("the first one runs = %v, the record is %+v\n%s", first.runs(), r, h.log)
	}
}

// The program that sends a daemon a command, such as that of an operator, is no daemon.
func TestCommandIsNoDaemon(t *testing.T) {
	h := newHost(t)
	pipe := mps.Pipe(h.root, "gpu.mps")
	command := exec.Command(filepath.Join(h.programs, "nvidia-cuda-mps-control"))
	command.Env = append(os.Environ(), pipeVariable+"="+pipe)
	stdin, err := command.StdinPipe()
	check.NoError(t, err)
	check.NoError(t, command.Start())
	defer func() { _, _ = stdin.Close(), command.Wait() }()
	check.Until(t, "it runs", func() bool {
		name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(command.Process.Pid), "comm"))
		return err == nil && strings.HasPrefix(string(name), processName)
	})
	if p, found := findDaemon(pipe); found {
		t.Errorf("found %+v", p)
	}
}

// A PID that was given out again is another process.
func TestProcessesAreToldApart(t *testing.T) {
	own, ok := readProcess(os.Getpid())
	if !ok || !own.runs() {
		t.Fatalf("%+v, %v", own, ok)
	}
	other := own
	other.Started--
	if other.runs() || (process{}).runs() {
		t.Error("another process runs")
	}
	if err := other.signal(syscall.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	if p, found := findDaemon("/" + strconv.Itoa(os.Getpid())); found {
		t.Errorf("found %+v", p)
	}
}
