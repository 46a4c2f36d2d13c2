package simdriver

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// The backends of limits of memory by control group: key memacct of a machine.
const (
	Misc = "misc"
	DMem = "dmem"
)

// ErrOutOfMemory is the error of an allocation beyond a limit.
var ErrOutOfMemory = errors.New("out of memory: beyond the limit of a control group")

// limitFunctions are the functions that the library of a driver before 615 does not have.
var limitFunctions = []string{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"}

// hasLimits reports whether a version of the driver has limits of memory.
func hasLimits(version string) bool {
	branch, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(branch)
	return err == nil && n >= 615
}

// withLimits is a library with the functions that one of a version has.
func withLimits(library []byte, version string) []byte {
	for _, name := range limitFunctions {
		is, other := noSymbol(name), symbol(name)
		if hasLimits(version) {
			is, other = other, is
		}
		library = bytes.ReplaceAll(library, other, is)
	}
	return library
}

// WithLimits is the text of a machine with driver 615.71.09, which limits memory by a backend, Misc or DMem, for the control groups at a mount point: that of
// the kernel, or an ordinary folder (MakeGroup). More are lines for its section [machine].
func WithLimits(text, backend, mount string, more ...string) (string, error) {
	c := parseConf(text)
	lines := append([]string{"driver = 615.71.09", "cuda = 13.4", "memacct = " + backend, "cgroup_mount = " + mount}, more...)
	for _, line := range lines {
		key, value, ok := pair(line)
		if !ok {
			return "", fmt.Errorf("%q is not key = value", line)
		}
		if err := c.set("machine", key, value); err != nil {
			return "", err
		}
	}
	return c.String(), nil
}

// MakeGroup makes a control group of an ordinary tree, with the controllers that are on in it, and the groups above it that are missing, in which none is on. It
// has the files of a real one that readers look at. It returns its path.
func MakeGroup(mount, group string, controllers ...string) (path string, err error) {
	at := mount
	for _, name := range append([]string{""}, strings.Split(strings.Trim(group, "/"), "/")...) {
		at = filepath.Join(at, name)
		if _, err := os.Stat(filepath.Join(at, "cgroup.controllers")); err == nil && at != filepath.Join(mount, group) {
			continue
		}
		files := map[string]string{"cgroup.controllers": "", "cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.type": "domain\n", "cgroup.events": "populated 0\nfrozen 0\n"}
		if at == filepath.Join(mount, group) {
			files["cgroup.controllers"] = strings.Join(controllers, " ") + "\n"
		}
		if at == mount { // the root group
			delete(files, "cgroup.type")
			delete(files, "cgroup.events")
			files["cgroup.controllers"] = "cpu memory misc dmem\n"
		}
		if err := makeGroup(filepath.Dir(mount), at, files); err != nil {
			return "", err
		}
	}
	return at, nil
}

// makeGroup makes a folder with files, which a kernel makes at once, so it is made in another folder before. One that is there gets the files.
func makeGroup(other, at string, files map[string]string) error {
	folder := at
	if _, err := os.Stat(at); err != nil {
		if err := os.MkdirAll(other, 0o755); err != nil {
			return err
		}
		if folder, err = os.MkdirTemp(other, "group"); err != nil {
			return err
		}
	}
	err := os.Chmod(folder, 0o755)
	for name, text := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644))
	}
	if folder != at {
		err = errors.Join(err, os.Rename(folder, at))
	}
	return err
}

// Allocation is memory of a GPU that is charged to a control group.
type Allocation struct {
	ID string // "0" = it is charged to none

	m *Machine
}

// Allocate allocates memory of a GPU for a creator in a control group, by its path; "" is a creator that has ended. The rules are those of the library
// (lib/memacct.c). It lasts until Free, or the end of the driver's state of the GPU. The error is ErrOutOfMemory beyond a limit.
func (m *Machine) Allocate(slot int, group string, bytes uint64) (Allocation, error) {
	answer, err := m.memacct.ask(m, "allocate", strconv.Itoa(slot), strconv.FormatUint(bytes, 10), group)
	if err != nil {
		return Allocation{}, err
	}
	if answer == "refused" {
		return Allocation{}, ErrOutOfMemory
	}
	id, ok := strings.CutPrefix(answer, "ok ")
	if !ok {
		return Allocation{}, errors.New(answer)
	}
	return Allocation{id, m}, nil
}

// Import is another client that uses the same memory: it stays charged to the creator's group until both have freed it.
func (a Allocation) Import() error { return a.m.memacct.do(a.m, "import", a.ID) }

// Free frees the memory for one client.
func (a Allocation) Free() error { return a.m.Free(a.ID) }

// Free frees an allocation by its ID, for one client.
func (m *Machine) Free(id string) error { return m.memacct.do(m, "free", id) }

// Limits are the lines of the driver's state of control groups.
func (m *Machine) Limits() ([]string, error) {
	text, err := os.ReadFile(m.path("memacct"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n"), err
}

// ReuseGroup gives a control group the address in the kernel of one that has ended, by its path, and that has an entry in the driver's table (misc): the new
// group has its limit and its charges.
func (m *Machine) ReuseGroup(ended, group string) error {
	return m.memacct.do(m, "reuse", ended, group)
}

// prepareMemacct makes what the library finds of a machine with limits: the state, which processes of every user change, and the size of each GPU where a
// kernel shows it.
func (m *Machine) prepareMemacct(c *conf) error {
	backend, _ := c.get("machine", "memacct")
	if backend == "" || backend == "none" {
		return nil
	}
	state, err := os.OpenFile(m.path("memacct"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	err = errors.Join(state.Chmod(0o666), state.Close())
	mount, _ := c.get("machine", "cgroup_mount")
	if err != nil || backend != DMem || mount == "" || isCgroup2(mount) {
		return err
	}
	var capacity strings.Builder
	for _, slot := range c.slots() {
		if bytes, ok := parseBytes(c.gpuGet(slot, "memory")); ok {
			fmt.Fprintf(&capacity, "nvidia/%s/vidmem %d\n", longPCI(c.gpuGet(slot, "pci")), bytes)
		}
	}
	return errors.Join(os.MkdirAll(mount, 0o755), replace(filepath.Join(mount, "dmem.capacity"), capacity.String()))
}

func isCgroup2(path string) bool {
	var s syscall.Statfs_t
	const magic = 0x63677270 // CGROUP2_SUPER_MAGIC
	return syscall.Statfs(path, &s) == nil && s.Type == magic
}

// longPCI is a PCI address as the driver names the region of a GPU: "00000000:1b:00.0".
func longPCI(pci string) string {
	domain, rest, _ := strings.Cut(pci, ":")
	return fmt.Sprintf("%08s:%s", domain, rest)
}

// parseBytes reads "81559 MiB".
func parseBytes(text string) (uint64, bool) {
	n, unit, _ := strings.Cut(text, " ")
	scale, known := map[string]uint64{"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[strings.TrimSpace(unit)]
	v, err := strconv.ParseUint(n, 0, 64)
	return v * scale, err == nil && known && v > 0
}

var inits atomic.Uint64

// initialised is a line that makes the driver's state of a GPU a new one, on a machine with limits.
func initialised(c *conf) []string {
	if backend, _ := c.get("machine", "memacct"); backend == "" || backend == "none" {
		return nil
	}
	return []string{fmt.Sprintf("memory_inits = %d%06d", os.Getpid(), inits.Add(1))}
}

func (m *Machine) initialised() (lines []string) {
	_ = m.read(func(c *conf) { lines = initialised(c) }) // the change that follows fails
	return lines
}

// controlFile is the program of lib/control in a machine's folder.
const controlFile = ".memacct"

// control is that program while it runs. It ends with this process.
type control struct {
	mu  sync.Mutex
	in  io.WriteCloser
	out *bufio.Reader
	cmd *exec.Cmd
}

// ask sends a command and returns the answer.
func (c *control) ask(m *Machine, words ...string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.start(m); err != nil {
		return "", fmt.Errorf("memacct: %w", err)
	}
	if words[len(words)-1] == "" {
		words = words[:len(words)-1]
	}
	if _, err := io.WriteString(c.in, strings.Join(words, "\t")+"\n"); err != nil {
		return "", fmt.Errorf("memacct: %w", err)
	}
	answer, err := c.out.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("memacct: %w", err)
	}
	return strings.TrimSpace(answer), nil
}

// do is ask for a command that is answered with ok.
func (c *control) do(m *Machine, words ...string) error {
	answer, err := c.ask(m, words...)
	if err == nil && answer != "ok" {
		err = fmt.Errorf("%s: %s", strings.Join(words, " "), answer)
	}
	return err
}

func (c *control) start(m *Machine) (err error) {
	if c.cmd != nil {
		return nil
	}
	cmd := exec.Command(m.path(controlFile), m.Root)
	cmd.Stderr = os.Stderr
	if c.in, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	c.out = bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		return err
	}
	c.cmd = cmd
	return nil
}

// end ends the program.
func (c *control) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cmd != nil {
		_ = c.in.Close()
		_ = c.cmd.Wait()
		c.cmd = nil
	}
}
