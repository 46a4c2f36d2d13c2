package doctor

import (
	"syscall"
	"time"
)

// FakeSystem is an operating system for tests. The zero value is in order.
type FakeSystem struct {
	UID            int
	Container      string
	Unsynchronised bool
	Now            time.Time
	Inotify        error
	Full           bool
	Denied         bool // device nodes, by the device cgroup
}

func (s FakeSystem) uid() int                      { return s.UID }
func (s FakeSystem) container() string             { return s.Container }
func (s FakeSystem) unsynchronised() (bool, error) { return s.Unsynchronised, nil }
func (s FakeSystem) inotify() error                { return s.Inotify }

func (s FakeSystem) now() time.Time {
	if s.Now.IsZero() {
		return time.Date(2026, 11, 20, 10, 30, 0, 0, time.UTC)
	}
	return s.Now
}

func (s FakeSystem) free(string) (bytes, inodes uint64, err error) {
	if s.Full {
		return 4096, 1000, nil
	}
	return 1 << 30, 1 << 20, nil
}

func (s FakeSystem) open(string) error {
	if s.Denied {
		return syscall.EPERM
	}
	return nil
}

// WithSystem returns options with another operating system.
func (o Options) WithSystem(s FakeSystem) Options {
	o.system = s
	return o
}
