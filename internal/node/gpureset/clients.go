package gpureset

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Client is a process that has the device node of a GPU open.
type Client struct {
	PID   int
	Name  string // of the program, as /proc/PID/comm has it
	Group string // control group, as /proc/PID/cgroup has it; "" = not known
}

// String is a client in some words: "python3 (pid 2114, control group /kubepods/...)".
func (c Client) String() string {
	text := fmt.Sprintf("%s (pid %d", cmp.Or(c.Name, "process"), c.PID)
	if c.Group != "" {
		text += ", control group " + c.Group
	}
	return text + ")"
}

// Clients returns the processes that have /dev/nvidiaN open or mapped, by PID. /dev/nvidiactl and /dev/nvidia-uvm are of no GPU. A process whose
// files can't be read is an error: it may have the GPU. proc is where procfs is mounted, and it must show all processes of the node.
func Clients(proc string, minor int) (all []Client, err error) {
	if minor < 0 {
		return nil, errors.New("the number of the GPU's device node is not known")
	}
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, fmt.Errorf("read the processes: %w", err)
	}
	node := "/dev/nvidia" + strconv.Itoa(minor)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join(proc, e.Name())
		switch open, err := opens(dir, node); {
		case errors.Is(err, fs.ErrNotExist): // it has ended
		case err != nil:
			return nil, fmt.Errorf("read the open files of process %d: %w", pid, err)
		case open:
			all = append(all, Client{PID: pid, Name: line(filepath.Join(dir, "comm")), Group: group(filepath.Join(dir, "cgroup"))})
		}
	}
	slices.SortFunc(all, func(a, b Client) int { return cmp.Compare(a.PID, b.PID) })
	return all, nil
}

// opens reports whether the process of a folder of procfs has a file open, or mapped: a mapping holds the device after its descriptor was closed.
func opens(dir, file string) (bool, error) {
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return false, err
	}
	for _, fd := range fds {
		// A file that was closed meanwhile has no link. The path is of the process's own mount namespace, as in containers.
		if target, err := os.Readlink(filepath.Join(dir, "fd", fd.Name())); err == nil && isFile(target, file) {
			return true, nil
		}
	}
	maps, err := os.ReadFile(filepath.Join(dir, "maps"))
	if err != nil {
		return false, err
	}
	for text := range strings.Lines(string(maps)) {
		if at := strings.IndexByte(text, '/'); at >= 0 && isFile(strings.TrimSpace(text[at:]), file) {
			return true, nil
		}
	}
	return false, nil
}

// isFile reports whether a path of procfs is a file. Below another root the path has that before it.
func isFile(path, file string) bool {
	path = strings.TrimSuffix(path, " (deleted)")
	return path == file || strings.HasSuffix(path, file)
}

func line(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "" // it has ended
	}
	return strings.TrimSpace(string(text))
}

// group returns the control group of a process: that of version 2, or else the first one that is not the root.
func group(path string) string {
	for text := range strings.Lines(line(path) + "\n") {
		if parts := strings.SplitN(strings.TrimSpace(text), ":", 3); len(parts) == 3 && parts[2] != "/" {
			return parts[2]
		}
	}
	return ""
}
