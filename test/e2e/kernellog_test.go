//go:build e2e

package e2e

import (
	encoding "encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kernelLog is the log of a simulated kernel: no process can write a record of the real one. It is a file in the form of /dev/kmsg, and what
// syslog(2) returns in containers with the seccomp profile kernel-log.
type kernelLog struct {
	path    string // of the file
	profile string // of the containers

	mu    sync.Mutex
	lines []string // as syslog(2) has them
	err   error    // the last one of an answer
}

// newKernelLog serves the profile, until the test ends. The container runtime sends the descriptor of each filter that it installs.
func newKernelLog(t *testing.T) *kernelLog {
	t.Helper()
	l := &kernelLog{path: filepath.Join(stateDir(), "kmsg")}
	write(t, "kmsg", nil)
	render(t, "parts/kernel-log/kustomization.yaml", nil)
	socket := filepath.Join(stateDir(), "seccomp.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.profile = `{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "` + socket + `", "syscalls": [{"names": ["syslog"], "action": "SCMP_ACT_NOTIFY"}]}`
	var answering sync.WaitGroup
	answering.Go(func() {
		for {
			conn, err := listener.AcceptUnix()
			if err != nil {
				return
			}
			filter, err := receiveDescriptor(conn)
			if err != nil {
				l.note(err)
				continue
			}
			answering.Go(func() { l.note(l.answer(t, filter)) })
		}
	})
	t.Cleanup(func() {
		if err := listener.Close(); err != nil || l.err != nil {
			t.Error(err, l.err)
		}
		answering.Wait()
	})
	return l
}

// setKernelLog gives the containers of a node the profile kernel-log.
func (n *kubeNode) setKernelLog(t *testing.T, profile string) {
	t.Helper()
	folder := n.path("/var/lib/kubelet/seccomp")
	if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, "kernel-log.json"), []byte(profile), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// xid logs an XID as the driver does.
func (l *kernelLog) xid(pci string, xid int) error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return err
	}
	micros := now.Nano() / 1000
	message := fmt.Sprintf("NVRM: Xid (PCI:%s): %d, pid='<unknown>', name=<unknown>, Timeout after 6s of waiting for RPC response from GPU", pci, xid)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("<3>[%5d.%06d] %s\n", micros/1e6, micros%1e6, message))
	file, err := os.OpenFile(l.path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(file, "3,%d,%d,-;%s\n", len(l.lines), micros, message)
	return errors.Join(err, file.Close())
}

func (l *kernelLog) note(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = errors.Join(l.err, err)
}

// latest is as much of the end of the log as fits in n bytes, in whole lines.
func (l *kernelLog) latest(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	first, size := len(l.lines), 0
	for ; first > 0 && size+len(l.lines[first-1]) <= n; first-- {
		size += len(l.lines[first-1])
	}
	return strings.Join(l.lines[first:], "")
}

// answer answers the calls of the processes of a filter (seccomp_unotify(2)), until they or the test have ended.
func (l *kernelLog) answer(t *testing.T, filter int) error {
	defer func() { _ = unix.Close(filter) }()
	for t.Context().Err() == nil {
		ready := []unix.PollFd{{Fd: int32(filter), Events: unix.POLLIN}}
		if _, err := unix.Poll(ready, int((100 * time.Millisecond).Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll of a seccomp filter: %w", err)
		}
		if ready[0].Revents&unix.POLLHUP != 0 {
			return nil
		}
		if ready[0].Revents&unix.POLLIN == 0 {
			continue
		}
		if err := l.answerOne(filter); err != nil && !errors.Is(err, unix.ENOENT) { // ENOENT: the process has ended
			return err
		}
	}
	return nil
}

func (l *kernelLog) answerOne(filter int) error {
	var call struct { // struct seccomp_notif
		ID              uint64
		PID, Flags      uint32
		Number          int32
		Arch            uint32
		Instruction     uint64
		Type, To, Bytes uint64
		_               [3]uint64
	}
	request := make([]byte, encoding.Size(call))
	if err := ioctl(filter, unix.SECCOMP_IOCTL_NOTIF_RECV, request); err != nil {
		return fmt.Errorf("receive a call: %w", err)
	}
	if _, err := encoding.Decode(request, encoding.NativeEndian, &call); err != nil {
		return err
	}
	var answer struct { // struct seccomp_notif_resp
		ID           uint64
		Value        int64
		Error, Flags int32
	}
	answer.ID = call.ID
	if call.Type == unix.SYSLOG_ACTION_READ_ALL {
		text := l.latest(int(call.Bytes))
		memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", call.PID), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = memory.WriteAt([]byte(text), int64(call.To))
		if err = errors.Join(err, memory.Close()); err != nil {
			return err
		}
		answer.Value = int64(len(text))
	} else {
		answer.Error = -int32(unix.EPERM)
	}
	response, err := encoding.Append(nil, encoding.NativeEndian, answer)
	if err != nil {
		return err
	}
	return ioctl(filter, unix.SECCOMP_IOCTL_NOTIF_SEND, response)
}

// ioctl calls ioctl(2) with a structure.
func ioctl(fd int, request uintptr, structure []byte) error {
	if _, _, err := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&structure[0]))); err != 0 {
		return err
	}
	return nil
}

func receiveDescriptor(conn *net.UnixConn) (int, error) {
	defer func() { _ = conn.Close() }()
	state, rights := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(state, rights)
	if err != nil {
		return 0, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return 0, fmt.Errorf("%d messages with a descriptor: %w", len(messages), err)
	}
	descriptors, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(descriptors) != 1 {
		return 0, fmt.Errorf("%d descriptors: %w", len(descriptors), err)
	}
	return descriptors[0], nil
}
