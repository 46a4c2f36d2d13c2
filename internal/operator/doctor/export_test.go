package doctor

import (
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/operator/report"
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
	NotUnified     error
}

func (s FakeSystem) uid() int                      { return s.UID }
func (s FakeSystem) container() string             { return s.Container }
func (s FakeSystem) unsynchronised() (bool, error) { return s.Unsynchronised, nil }
func (s FakeSystem) inotify() error                { return s.Inotify }

func (s FakeSystem) unified(string) error { return s.NotUnified }

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

// HookFindings are what is found about a hook program of a version, where the device plugin's containers need it for limits.
func HookFindings(version string, mode inventory.LimitMode) []Finding {
	f := Facts{Options: Options{Program: "k8s-gpu", Limits: mode}, Memory: limits{Hook: "/usr/bin/nvidia-ctk", HookVersion: version}}
	f.Driver.Devices = []report.Device{{MemoryLimit: mode.String(), API: string(inventory.DevicePlugin)}}
	return limitHook(&f)
}
