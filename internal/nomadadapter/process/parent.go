package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/node/history"
)

// ErrOrphaned is why a plugin ends whose Nomad agent has ended.
var ErrOrphaned = errors.New("the Nomad agent has ended")

// parentInterval is how often the parent process is checked where the kernel does not report its end.
const parentInterval = time.Second

// WatchParent calls end with ErrOrphaned when this process has another parent than at its start: a Nomad agent that is killed does not stop its
// plugins, and a -dev agent does not reattach to them. It returns when ctx ends.
//
// PR_SET_PDEATHSIG is no alternative: it fires when the thread that started this process exits, and the agent's Go runtime
// chooses that thread. The parent is compared with the first one, not with 1, because in a container the agent may be process 1.
func WatchParent(ctx context.Context, parent int, end context.CancelCauseFunc) {
	watchParent(ctx, parent, openPidfd, end)
}

// watchParent waits for the end of the parent with the file that open returns for it. If that fails, it polls.
func watchParent(ctx context.Context, parent int, open func(pid int) (*os.File, error), end context.CancelCauseFunc) {
	f, err := open(parent)
	if err == nil {
		if os.Getppid() == parent { // else the file may be that of another process
			err = awaitReadable(ctx, f)
		}
		_ = f.Close() // nothing was written
	}
	if ctx.Err() != nil {
		return
	}
	if err == nil && os.Getppid() != parent {
		end(ErrOrphaned)
		return
	}
	pollParent(ctx, parent, end)
}

// openPidfd opens a file that is readable when a process has ended. It fails before Linux 5.3, for a process outside this PID
// namespace, and where a seccomp profile does not allow pidfd_open(2).
func openPidfd(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // or os.NewFile does not register it with the runtime's poller
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// awaitReadable returns nil when the file is readable, or an error when ctx ends or if that can't be awaited.
func awaitReadable(ctx context.Context, f *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // which ends Read
	defer stop()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var pollErr error
	err = conn.Read(func(fd uintptr) (done bool) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		pollErr = os.NewSyscallError("poll", err)
		return err != nil || n > 0
	})
	return errors.Join(err, pollErr)
}

// pollParent calls end with ErrOrphaned when this process has another parent, unless ctx ends before.
func pollParent(ctx context.Context, parent int, end context.CancelCauseFunc) {
	t := time.NewTicker(parentInterval)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		if os.Getppid() != parent {
			end(ErrOrphaned)
			return
		}
	}
}

// Incarnation distinguishes a process from others with the same number, by its start time (proc(5), field 22 of stat) and the
// boot; "" if they can't be read.
func Incarnation(pid int) string {
	boot, err := history.BootID("/proc")
	stat, errStat := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, ok := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
	if fields := strings.Fields(rest); err == nil && errStat == nil && ok && len(fields) >= 20 {
		return fmt.Sprintf("agent %d, begun at %s, boot %s", pid, fields[19], boot)
	}
	return ""
}
