package proofcommand

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/util/filelock"
)

// searchPath is the PATH of the command: not that of the agent, so that a run by hand with it is the same.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// child is the command of a run. Each step is a channel that is closed.
type child struct {
	runner    runner
	proof     Proof
	processes processes
	output    *output
	files     files

	started  chan struct{} // the process runs
	exited   chan struct{} // it has ended, or could not be started
	released chan struct{} // what it has started was ended, as far as possible
	reaped   chan struct{} // the process is gone, and err and cmd are final
	err      error         // of the start
	cmd      *exec.Cmd
}

func newChild(r runner, p Proof) *child {
	name := newName()
	return &child{runner: r, proof: p, processes: processes{name: name, group: groupPath(r.groups(), name)}, files: files{folder: p.Folder, name: name},
		output:  newOutput(),
		started: make(chan struct{}), exited: make(chan struct{}), released: make(chan struct{}), reaped: make(chan struct{})}
}

// live starts the command and waits for its end, on one thread: PDEATHSIG ends a process when the thread ends that started it
// (PR_SET_PDEATHSIG(2const)). It ends with the process: after follow if that can't be killed.
func (c *child) live() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(c.reaped)
	defer func() { c.files.remove(c.processes.removeGroup()) }()
	if c.err = c.start(); c.err != nil {
		close(c.exited)
		return
	}
	c.processes.leader.Store(int64(c.cmd.Process.Pid))
	close(c.started)
	if isClosed(c.released) {
		c.runner.kill(&c.processes)
	}
	awaitExit(c.cmd.Process.Pid)
	close(c.exited)
	<-c.released
	_ = c.cmd.Wait() // the exit status is in ProcessState
}

// awaitExit waits until a child has ended, and leaves it to be reaped: until then no other process gets its PID.
func awaitExit(pid int) {
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// start starts the command: in a control group of its own where that is possible.
func (c *child) start() error {
	if err := errors.Join(c.runner.check(c.proof.Command), CheckLibraryPath(c.proof.LibraryPath)); err != nil {
		return err
	}
	if err := c.files.make(); err != nil {
		return err
	}
	if isClosed(c.released) { // a file system hung until now
		return errTimeout
	}
	CloseOnExec()
	group, err := c.processes.makeGroup()
	if err == nil {
		defer func() { _ = group.Close() }()
		c.cmd = c.command()
		c.cmd.SysProcAttr.UseCgroupFD, c.cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
		if c.cmd.Start() == nil {
			return nil
		}
		_ = c.processes.removeGroup()
	}
	c.cmd = c.command() // a container's seccomp profile can refuse clone3(2), which a control group needs
	return c.cmd.Start()
}

func (c *child) command() *exec.Cmd {
	p := c.proof
	cmd := exec.Command(p.Command[0], p.Command[1:]...) //nolint:noctx // follow ends all of its processes, not only the first one
	cmd.Dir = c.files.work()
	cmd.Env = []string{"PATH=" + searchPath, "LANG=C.UTF-8", "HOME=" + cmd.Dir, "TMPDIR=" + cmd.Dir, "CUDA_DEVICE_ORDER=PCI_BUS_ID",
		"CUDA_VISIBLE_DEVICES=" + string(p.GPU), "NVIDIA_VISIBLE_DEVICES=" + string(p.GPU), "TANDEM_PROOF_REASON=" + p.Reason}
	if p.LibraryPath != "" {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+p.LibraryPath)
	}
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&c.output.both, &c.output.stdout), &c.output.both
	cmd.WaitDelay = c.runner.outputMax
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// CloseOnExec keeps the open files of the agent from the programs that it starts: a library in C, as the driver's, can have opened some without O_CLOEXEC.
func CloseOnExec() {
	open, _ := os.ReadDir("/proc/self/fd")
	for _, e := range open {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

// files are the working folder of a run and a file that is locked while the run lasts. The file is made first and removed last: CleanUp finds by
// it what an agent that was killed has left.
type files struct {
	folder, name string
	lock         *os.File
}

const lockSuffix = ".lock"

func (f *files) work() string     { return filepath.Join(f.folder, f.name) }
func (f *files) lockPath() string { return f.work() + lockSuffix }

func (f *files) make() (err error) {
	if err = os.MkdirAll(f.folder, 0o700); err != nil {
		return err
	}
	if f.lock, err = filelock.Take(f.lockPath()); err != nil {
		return err
	}
	return os.Mkdir(f.work(), 0o700)
}

// remove removes the files, and leaves the lock file for CleanUp if something else is left.
func (f *files) remove(left error) {
	if f.lock == nil {
		return
	}
	if left = errors.Join(left, os.RemoveAll(f.work())); left != nil {
		_ = f.lock.Close()
		return
	}
	filelock.Release(f.lock, f.lockPath())
}
