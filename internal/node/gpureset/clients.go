package gpureset

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
)

// Client is a process that has the device node of a GPU open.
type Client struct {
	PID   int    `json:"pid"`
	Name  string `json:"name,omitempty"`  // of the program, as /proc/PID/comm has it
	Group string `json:"group,omitempty"` // control group, as /proc/PID/cgroup has it; "" = not known
}

// maxClientText is the longest text of a client: a control group has 4096 bytes at most.
const maxClientText = 500

// String is a client in some words: "python3 (pid 2114, control group /kubepods/...)". A process chooses its name, and
// may choose that of its control group: a terminal shows the text and obeys nothing in it.
func (c Client) String() string {
	text := fmt.Sprintf("%s (pid %d", cmp.Or(c.Name, "process"), c.PID)
	if c.Group != "" {
		text += ", control group " + c.Group
	}
	return proofcommand.Line(text+")", maxClientText)
}

// hostPIDNamespace is what procfs shows as the host's PID namespace (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h).
const hostPIDNamespace = "pid:[4026531836]"

// SeesProcesses reports whether this process sees those of the node, in procfs at proc and in what the driver lists: it is in the host's PID namespace, or that
// is not known.
func SeesProcesses(proc string) bool {
	namespace, err := os.Readlink(filepath.Join(proc, "self/ns/pid"))
	return err != nil || namespace == hostPIDNamespace
}

// Clients returns the processes that have /dev/nvidiaN open, by PID: this process counts like others. /dev/nvidiactl and /dev/nvidia-uvm are of no GPU. A
// process whose files can't be read is an error: it may have the GPU. proc is where procfs is mounted, and it must show all processes of the node.
//
// It reads no memory map: that waits for a process that hangs. A process that has closed the GPU and still has it mapped keeps nvidia-smi from resetting it.
func Clients(proc string, minor int) (all []Client, err error) {
	if minor < 0 {
		return nil, errors.New("the number of the GPU's device node is not known")
	}
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, fmt.Errorf("read the processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join(proc, e.Name())
		switch open, err := opens(dir, minor); {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH): // it has ended
		case err != nil:
			return nil, fmt.Errorf("read the open files of process %d: %w", pid, err)
		case open:
			all = append(all, Client{PID: pid, Name: line(filepath.Join(dir, "comm")), Group: group(filepath.Join(dir, "cgroup"))})
		}
	}
	slices.SortFunc(all, func(a, b Client) int { return cmp.Compare(a.PID, b.PID) })
	return all, nil
}

// opens reports whether the process of a folder of procfs has a GPU open. Its first thread can end before the others, and shows no files then.
func opens(dir string, minor int) (bool, error) {
	open, files, err := opensIn(filepath.Join(dir, "fd"), minor)
	if err != nil || files {
		return open, err
	}
	threads, _ := os.ReadDir(filepath.Join(dir, "task"))
	for _, t := range threads {
		open, _, err := opensIn(filepath.Join(dir, "task", t.Name(), "fd"), minor)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
			return false, err
		}
		if open {
			return true, nil
		}
	}
	return false, nil
}

// filesAtOnce is how many open files of a process are held in memory: a process can have millions.
const filesAtOnce = 1000

// opensIn reports whether a GPU is among the open files of a folder of procfs, and whether there are any.
func opensIn(folder string, minor int) (open, files bool, err error) {
	f, err := os.Open(folder)
	if err != nil {
		return false, false, err
	}
	defer func() { _ = f.Close() }() // opened for reading only
	for {
		names, err := f.Readdirnames(filesAtOnce)
		files = files || len(names) > 0
		if slices.ContainsFunc(names, func(fd string) bool { return isNode(filepath.Join(folder, fd), minor) }) {
			return true, true, nil
		}
		if errors.Is(err, io.EOF) {
			return false, files, nil
		}
		if err != nil {
			return false, files, err
		}
	}
}

// majorGPU is the number of NVIDIA's character devices (the kernel's devices.txt).
const majorGPU = 195

// isNode reports whether an open file is the device node of a GPU: by its number, because a container can have the node under another name (docker run
// --device=/dev/nvidia3:/dev/nvidia0). What is no device, as the nodes of a simulated machine, is known by its path.
func isNode(fd string, minor int) bool {
	var stat unix.Statx_t
	// No file system is asked over a network: it can hang.
	err := unix.Statx(unix.AT_FDCWD, fd, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &stat)
	if err == nil && stat.Mode&unix.S_IFMT == unix.S_IFCHR {
		return stat.Rdev_major == majorGPU && int64(stat.Rdev_minor) == int64(minor)
	}
	path, err := os.Readlink(fd) // it fails if the file was closed meanwhile
	return err == nil && strings.HasSuffix(strings.TrimSuffix(path, " (deleted)"), "/dev/nvidia"+strconv.Itoa(minor))
}

// line returns the first line of a file; "" if the process has ended.
func line(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
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
