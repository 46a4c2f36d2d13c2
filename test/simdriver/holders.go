package simdriver

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// InUseError has the processes because of which the kernel module can not be unloaded.
type InUseError struct {
	PIDs []int // ascending
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("module nvidia is in use by pid %s", strings.Trim(fmt.Sprint(e.PIDs), "[]"))
}

// TryUnload is rmmod: an InUseError while a process has a device node open, else Unload. A process that opens one at
// the same moment may lose it nevertheless; a kernel is more exact.
func (m *Machine) TryUnload() error {
	pids, err := m.Holders()
	if err != nil {
		return err
	}
	if len(pids) > 0 {
		return &InUseError{PIDs: pids}
	}
	return m.Unload()
}

// Holders are the processes that have a device node of the machine open, ascending, as the kernel shows
// them under /proc: this process is one of them while it has an NVML session. Processes whose descriptors this one has
// no permission to read are left out. A node that was removed meanwhile counts too.
func (m *Machine) Holders() ([]int, error) {
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("processes that use the driver: %w", err)
	}
	nodes, err := m.nodes()
	if err != nil {
		return nil, fmt.Errorf("processes that use the driver: %w", err)
	}
	var pids []int
	for _, p := range processes {
		if pid, err := strconv.Atoi(p.Name()); err == nil && len(m.heldBy(pid, nodes)) > 0 {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// HeldBy are the device nodes of the machine that a process has open, by the paths that /proc shows,
// sorted: a node as often as it is open.
func (m *Machine) HeldBy(pid int) ([]string, error) {
	nodes, err := m.nodes()
	if err != nil {
		return nil, fmt.Errorf("device nodes of pid %d: %w", pid, err)
	}
	return m.heldBy(pid, nodes), nil
}

// nodes are the machine's device nodes at present.
func (m *Machine) nodes() ([]os.FileInfo, error) {
	var nodes []os.FileInfo
	for _, pattern := range []string{"dev/nvidia*", "dev/nvidia-caps/nvidia*"} {
		paths, err := filepath.Glob(m.path(pattern))
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			if info, err := os.Stat(path); err == nil && !info.IsDir() {
				nodes = append(nodes, info)
			}
		}
	}
	return nodes, nil
}

// heldBy identifies a node as the same file: a process in a container sees the machine elsewhere. One that was removed since is known by its path. A
// process that ends meanwhile holds nothing.
func (m *Machine) heldBy(pid int, nodes []os.FileInfo) []string {
	var held []string
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	descriptors, _ := os.ReadDir(dir)
	for _, fd := range descriptors {
		link := filepath.Join(dir, fd.Name())
		path, err := os.Readlink(link)
		if err != nil || !strings.Contains(path, "/nvidia") {
			continue
		}
		ours := strings.HasPrefix(path, m.path("dev")+"/nvidia")
		if info, err := os.Stat(link); err == nil && !strings.HasSuffix(path, " (deleted)") { // another machine is at the same path in another container
			ours = slices.ContainsFunc(nodes, func(node os.FileInfo) bool { return os.SameFile(node, info) })
		}
		if ours {
			held = append(held, path)
		}
	}
	slices.Sort(held)
	return held
}
