package supervisor

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// process is a process of this PID namespace. The zero value is none.
type process struct {
	PID     int    `json:"pid"`
	Started uint64 `json:"started"` // as procfs has it, because a PID is given out again
}

// processName is how procfs shows the control daemon and the server, cut after 15 bytes (TASK_COMM_LEN).
const processName = "nvidia-cuda-mps"

// errNoProcess is why a daemon that was just started is ended again.
var errNoProcess = errors.New("its process is not found in /proc")

// findDaemon returns the process of the daemon with a pipe directory that this process or an earlier mps-daemon has
// started. It has the name, the user and the mounts of a child of this process, and the directory in its environment.
// The file with the daemon's PID does not count: the clients of the daemon can write it.
func findDaemon(pipe string) (process, bool) {
	mounts, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return process{}, false
	}
	entries, _ := os.ReadDir("/proc") // without it no process is found
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !isDaemon(filepath.Join("/proc", e.Name()), mounts, pipe) {
			continue
		}
		if p, runs := readProcess(pid); runs {
			return p, true
		}
	}
	return process{}, false
}

// isDaemon reports whether a process is the daemon with a pipe directory. Files that a process can keep from being read
// are read last, and not those of a process in a container.
func isDaemon(folder, mounts, pipe string) bool {
	name, err := os.ReadFile(folder + "/comm")
	if err != nil || !bytes.HasPrefix(name, []byte(processName)) {
		return false
	}
	info, err := os.Stat(folder)
	if err != nil || info.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) { //nolint:gosec // a user ID
		return false
	}
	if at, err := os.Readlink(folder + "/ns/mnt"); err != nil || at != mounts {
		return false
	}
	arguments, err := os.ReadFile(folder + "/cmdline")
	program, options, _ := bytes.Cut(arguments, []byte{0})
	// Its server is another program. One without options sends a daemon commands.
	if err != nil || filepath.Base(string(program)) != controlProgram || len(options) == 0 {
		return false
	}
	environment, err := os.ReadFile(folder + "/environ")
	return err == nil && bytes.Contains(append([]byte{0}, environment...), []byte("\x00"+pipeVariable+"="+pipe+"\x00"))
}

// readProcess returns a process by its PID, and whether it runs: by proc_pid_stat(5).
func readProcess(pid int) (p process, runs bool) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return p, false
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:]) // the name before may contain anything
	if len(fields) < 20 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return p, false
	}
	started, err := strconv.ParseUint(string(fields[19]), 10, 64)
	return process{pid, started}, err == nil
}

// runs reports whether a process has not ended.
func (p process) runs() bool {
	now, runs := readProcess(p.PID)
	return runs && now == p
}

// signal sends a signal to this process, and not to another one that has got its PID.
func (p process) signal(signal os.Signal) error {
	handle, err := os.FindProcess(p.PID)
	if err != nil {
		return err
	}
	defer func() { _ = handle.Release() }()
	if !p.runs() {
		return os.ErrProcessDone
	}
	return handle.Signal(signal)
}

// awaitEnd waits until a process that was told to end has ended.
func (p process) awaitEnd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quitAtMost)
	defer cancel()
	for p.runs() {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return &waitError{"it was told to quit, and has not ended", true}
		}
	}
	return nil
}
