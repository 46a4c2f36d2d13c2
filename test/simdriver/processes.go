package simdriver

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
)

// starts counts the processes that were started, so that each has another start time.
var starts atomic.Uint64

// NoMemory is the memory of a process that the driver does not report (NVML_VALUE_NOT_AVAILABLE).
const NoMemory = -1

// StartProcess starts a process that uses memory of a GPU in MiB, or of an instance of it: the driver lists it, and procfs
// shows it. A process that exists already uses memory of this GPU, too.
func (m *Machine) StartProcess(slot, pid, mib int, at ...At) error {
	memory := "N/A"
	if mib != NoMemory {
		memory = fmt.Sprintf("%dMiB", mib)
	}
	line := fmt.Sprintf("%d %s", pid, memory)
	if len(at) > 0 {
		line += fmt.Sprintf(" %d %d", at[0].GI, at[0].CI)
	}
	return m.edit(func(c *conf) error {
		if _, err := os.Stat(m.path("proc", strconv.Itoa(pid))); err != nil {
			if err := m.showProcess(pid); err != nil {
				return err
			}
		}
		return c.setAll(gpuHead(slot), "process", append(c.all(gpuHead(slot), "process"), line))
	})
}

// UseProcess makes a process of this node, such as the task of a job, one that uses memory of a GPU in MiB: the driver lists it until
// EndProcess, and procfs shows it and its ancestors for as long as they run, in their control groups.
func (m *Machine) UseProcess(slot, pid, mib int) error {
	if err := m.ShowProcess(pid); err != nil {
		return err
	}
	return m.edit(func(c *conf) error {
		return c.setAll(gpuHead(slot), "process", append(c.all(gpuHead(slot), "process"), fmt.Sprintf("%d %dMiB", pid, mib)))
	})
}

// ShowProcess makes procfs show a process of this node and its ancestors for as long as they run, with the files that it has open. The driver does not list it.
func (m *Machine) ShowProcess(pid int) error {
	for at := pid; at > 0; {
		link := m.path("proc", strconv.Itoa(at))
		if err := os.Symlink("/proc/"+strconv.Itoa(at), link); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		var err error
		if at, err = parentOf(at); err != nil {
			return err
		}
	}
	return nil
}

// parentOf is the PID of a process's parent: the fourth field of proc_pid_stat(5), of which the second may contain anything. 0 = it has none here.
func parentOf(pid int) (parent int, err error) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, err
	}
	_, err = fmt.Sscan(string(stat[bytes.LastIndexByte(stat, ')')+len(") S "):]), &parent)
	return parent, err
}

// EndProcess ends a simulated process, or the use of a GPU by one of this node: procfs does not show it any more, and the driver does not list it.
func (m *Machine) EndProcess(pid int) error {
	return m.edit(func(c *conf) error {
		for _, slot := range c.slots() {
			var others []string
			for _, line := range c.all(gpuHead(slot), "process") {
				if !strings.HasPrefix(line, strconv.Itoa(pid)+" ") {
					others = append(others, line)
				}
			}
			if err := c.setAll(gpuHead(slot), "process", others); err != nil {
				return err
			}
		}
		return os.RemoveAll(m.path("proc", strconv.Itoa(pid)))
	})
}

// Zombie ends a process for which its parent does not wait. The driver lists it until EndProcess, as in the moment before it
// notices the end.
func (m *Machine) Zombie(pid int) error {
	path := m.path("proc", strconv.Itoa(pid), "stat")
	stat, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, bytes.Replace(stat, []byte(") S "), []byte(") Z "), 1), 0o644)
}

// showProcess has procfs show a process (proc_pid_stat(5)), started now.
func (m *Machine) showProcess(pid int) error {
	dir := m.path("proc", strconv.Itoa(pid))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	name := "a (b) c" // a name may contain anything
	stat := fmt.Sprintf("%d (%s) S 1 %d %d 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", pid, name, pid, pid, 1000+starts.Add(1))
	return os.WriteFile(dir+"/stat", []byte(stat), 0o644)
}
