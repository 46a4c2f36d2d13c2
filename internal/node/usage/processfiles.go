package usage

import (
	"bytes"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// processFiles reads files of processes in procfs, in part: a process decides how large some of them are. It belongs to one goroutine.
type processFiles struct {
	root   string
	buffer []byte // of the latest file
}

const (
	maxFile  = 256 << 10 // bytes that are read of a file
	maxValue = 256       // bytes of a name; longer ones are unknown. Nomad's have 128 at most (structs.validName)
)

// read returns the beginning of a file, valid until the next call, and whether that is all of it. It is nil for a process that has ended, and
// for one that this process may not read.
func (f *processFiles) read(pid int, name string) (text []byte, whole bool) {
	file, err := os.Open(filepath.Join(f.root, strconv.Itoa(pid), name))
	if err != nil {
		return nil, false
	}
	defer func() { _ = file.Close() }()
	if f.buffer == nil {
		f.buffer = make([]byte, maxFile)
	}
	n, err := io.ReadFull(file, f.buffer)
	if err == nil {
		return f.buffer[:n], false
	}
	if err != io.EOF && err != io.ErrUnexpectedEOF { //nolint:errorlint // io.ReadFull does not wrap them
		return nil, false
	}
	return f.buffer[:n], true
}

// name is the name of a process (comm); "" if it can't be read.
func (f *processFiles) name(pid int) string {
	text, _ := f.read(pid, "comm")
	return printable(strings.TrimSuffix(string(text), "\n"))
}

// group is the file cgroup.
func (f *processFiles) group(pid int) (text string, ok bool) {
	b, whole := f.read(pid, "cgroup")
	return string(b), whole && len(b) > 0
}

// parent is the PID of the parent: the fourth field of proc_pid_stat(5), of which the second may contain anything.
func (f *processFiles) parent(pid int) (parent int, ok bool) {
	text, _ := f.read(pid, "stat")
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0, false
	}
	parent, err := strconv.Atoi(string(fields[1]))
	return parent, err == nil
}

// loggedIn reports whether a process descends from a login of a person (pam_loginuid): not from one of su or sudo in a service or a task.
func (f *processFiles) loggedIn(pid int) bool {
	text, _ := f.read(pid, "loginuid")
	id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	return err == nil && id != math.MaxUint32
}

// taskVariables are those of an environment that count.
var taskVariables = []string{allocVariable, namespaceVariable, jobVariable, taskVariable}

// environment is what counts of the environment with which a process was started. Processes of other users show it only with
// CAP_SYS_PTRACE. A process that writes a title for ps over its arguments (setproctitle, as vLLM and Ray do) overwrites it, too.
func (f *processFiles) environment(pid int) map[string]string {
	env := map[string]string{}
	text, _ := f.read(pid, "environ")
	for line := range bytes.SplitSeq(text, []byte{0}) {
		key, value, ok := bytes.Cut(line, []byte{'='})
		if ok && len(value) <= maxValue && slices.Contains(taskVariables, string(key)) {
			env[string(key)] = printable(string(value))
		}
	}
	return env
}

// allocationMount is a mount of the directory that the tasks of an allocation share, as Nomad's drivers for containers make it
// (drivers/docker/driver.go, containerBinds): the fourth and the fifth field of proc_pid_mountinfo(5) are the directory in its file system,
// "DATA_DIR/alloc/ID/alloc", and the mount point.
var allocationMount = regexp.MustCompile(`^\S+ \S+ \S+ \S*/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/alloc /alloc `)

// allocation is the allocation whose directory is mounted where a process is; "" if none is, false if that is not known.
func (f *processFiles) allocation(pid int) (id string, known bool) {
	text, whole := f.read(pid, "mountinfo")
	for line := range bytes.Lines(text) {
		if m := allocationMount.FindSubmatch(line); m != nil {
			return string(m[1]), true
		}
	}
	return "", whole && len(text) > 0
}

// printable is a text that a process chose, with "?" in place of control characters and of what is not UTF-8: the kernel cuts a name within
// a rune, a terminal obeys escape sequences, and Nomad's protocol allows UTF-8 only.
func printable(text string) string {
	return strings.Map(func(c rune) rune {
		if c == utf8.RuneError || !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, text)
}
