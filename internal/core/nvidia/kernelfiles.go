package nvidia

import (
	"cmp"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// nodeFolders are the folders of NVIDIA's device nodes under /dev, with the pattern of their names. Of up to 2,048 IMEX channels
// only the one that containers can get is listed.
var nodeFolders = [...]struct{ path, names string }{
	{".", "nvidia*"}, {"nvidia-caps", "nvidia-cap*"}, {path.Dir(imexChannel), path.Base(imexChannel)},
}

// imexChannel is gpu.IMEXChannelNode under /dev.
var imexChannel = strings.TrimPrefix(gpu.IMEXChannelNode, "/dev/")

// mtimeGranularity is how far a folder's modification time may lag behind a change, with a margin: the kernel takes the
// time from a clock that advances with its timer interrupt, every 1 to 10 ms (current_time in fs/inode.c).
const mtimeGranularity = time.Second

// nodeList is the list of device nodes as it was read last. It is valid while the modification times of the folders,
// which change with every node that is created or removed, are the same: a check costs three stat calls and lists no
// folder, of which /dev has hundreds of names. The zero value was never read.
type nodeList struct {
	mu          sync.Mutex
	nodes       []string
	read        bool
	mtimes      mtimes    // from before the list was read
	relistUntil time.Time // until then mtimes may not show a change, and every check lists the folders
}

// mtimes are the modification times of nodeFolders in nanoseconds since 1970; 0 = no such folder.
type mtimes [len(nodeFolders)]int64

// Nodes returns NVIDIA's device nodes by their paths in a container ("/dev/nvidia0"), sorted. It makes no driver call
// and is safe for concurrent use. The caller must not change the slice.
func (s *Session) Nodes() []string { return s.nodes.current(s.dev) }

// NodesChanged receives when the list of Nodes may be another one. It is nil without inotify. It is safe for concurrent use.
func (s *Session) NodesChanged() <-chan struct{} {
	if s.nodeWatch == nil {
		return nil
	}
	return s.nodeWatch.changed
}

// devFolder is the host's /dev.
func devFolder(r core.Roots) string { return filepath.Join(cmp.Or(r.Dev, "/"), "dev") }

// current is the list, read again if a folder has changed.
func (l *nodeList) current(dev fs.FS) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := readMTimes(dev); !l.read || now != l.mtimes || time.Now().Before(l.relistUntil) {
		l.list(dev, now)
	}
	return l.nodes
}

// relist reads the list in any case: on a file system without modification times it is as old as the latest Snapshot.
func (l *nodeList) relist(dev fs.FS) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list(dev, readMTimes(dev))
	return l.nodes
}

func (l *nodeList) list(dev fs.FS, now mtimes) {
	l.read, l.mtimes, l.nodes = true, now, nil
	l.relistUntil = time.Unix(0, slices.Max(now[:])).Add(mtimeGranularity)
	for _, folder := range nodeFolders {
		names, _ := fs.Glob(dev, path.Join(folder.path, folder.names)) // fails only for a malformed pattern
		for _, name := range names {
			if info, err := fs.Stat(dev, name); err == nil && !info.IsDir() && (name != imexChannel || info.Mode()&fs.ModeCharDevice != 0) {
				l.nodes = append(l.nodes, "/dev/"+name)
			}
		}
	}
	slices.Sort(l.nodes)
}

func readMTimes(dev fs.FS) (m mtimes) {
	for i, folder := range nodeFolders {
		if info, err := fs.Stat(dev, folder.path); err == nil {
			m[i] = info.ModTime().UnixNano()
		}
	}
	return m
}

// migCapability is the permission to use a GPU instance (ci is gpu.Whole) or a compute instance of the GPU with a
// minor number.
type migCapability struct {
	minor  int
	gi, ci uint32
}

// migCapabilities maps each to N of /dev/nvidia-caps/nvidia-capN.
type migCapabilities map[migCapability]int

// of returns the numbers for an instance, 0 where the kernel module lists none.
func (m migCapabilities) of(minor int, at gpu.Placement) (gi, ci int) {
	return m[migCapability{minor, at.GI, gpu.Whole}], m[migCapability{minor, at.GI, at.CI}]
}

// capabilities is the kernel module's list. The list has every possible instance from when the module is loaded, so a
// session reads it once.
func (s *Session) capabilities() migCapabilities {
	if s.capabilityList == nil {
		if text, err := fs.ReadFile(s.proc, "driver/nvidia-caps/mig-minors"); err == nil {
			s.capabilityList = parseMIGMinors(string(text))
		}
	}
	return s.capabilityList
}

// parseMIGMinors parses /proc/driver/nvidia-caps/mig-minors:
//
//	config 1
//	gpu0/gi1/access 12
//	gpu0/gi1/ci0/access 13
//
// It ignores lines of any other form (config, monitor, later additions).
func parseMIGMinors(text string) migCapabilities {
	all := migCapabilities{}
	for line := range strings.Lines(text) {
		path, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseUint(number, 10, 20) // Linux has 20 bits of minor number
		capability, ok := parseCapability(path)
		if err == nil && ok {
			all[capability] = int(n)
		}
	}
	return all
}

func parseCapability(path string) (migCapability, bool) {
	parts := strings.Split(path, "/")
	if n := len(parts); n < 3 || n > 4 || parts[n-1] != "access" {
		return migCapability{}, false
	}
	ok := true
	number := func(part, prefix string) uint32 {
		digits, found := strings.CutPrefix(part, prefix)
		n, err := strconv.ParseUint(digits, 10, 16)
		ok = ok && found && err == nil
		return uint32(n)
	}
	c := migCapability{minor: int(number(parts[0], "gpu")), gi: number(parts[1], "gi"), ci: gpu.Whole}
	if len(parts) == 4 {
		c.ci = number(parts[2], "ci")
	}
	return c, ok
}

// procfsWatch detects added and removed GPUs and MIG instances by the folders that the kernel module has for them under
// /proc (nv-procfs.c, nv-caps.c). Not every driver raises an event for a changed MIG layout (nvmlEventMigConfigChange),
// or for a GPU that it was bound to. Listing the folders makes no NVML call, takes 0.1 ms and can't hang; procfs has no
// inotify events. In a container without these folders nothing is detected, and only the periodic Snapshot shows
// changes.
type procfsWatch struct {
	names []string // nil = not listed yet
	at    time.Time
}

// procfsInterval is the least time between two listings.
const procfsInterval = time.Second

// changed reports whether GPUs or instances were added or removed since the last listing.
func (w *procfsWatch) changed(proc fs.FS) bool {
	if w.names != nil && time.Since(w.at) < procfsInterval {
		return false
	}
	now := append([]string{}, namesIn(proc, "driver/nvidia/gpus", "")...)
	for _, gpu := range namesIn(proc, "driver/nvidia/capabilities", "gpu") {
		for _, gi := range namesIn(proc, gpu+"/mig", "gi") {
			now = append(append(now, gi), namesIn(proc, gi, "ci")...)
		}
	}
	before := w.names
	w.names, w.at = now, time.Now()
	return before != nil && !slices.Equal(before, now)
}

// namesIn are the paths in a folder whose names have a prefix, sorted; none if there is no such folder.
func namesIn(proc fs.FS, folder, prefix string) (paths []string) {
	entries, _ := fs.ReadDir(proc, folder)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			paths = append(paths, path.Join(folder, e.Name()))
		}
	}
	return paths
}

// numaNode is the NUMA node nearest to a PCI function by sysfs (numa_node); -1 if it has none.
func (s *Session) numaNode(pci gpu.PCIAddress) int {
	text, err := fs.ReadFile(s.sys, path.Join("bus/pci/devices", string(pci), "numa_node"))
	if err != nil {
		return -1
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return max(node, -1)
}

// pcieRoot is the PCIe root complex of a PCI function: the first folder below /sys/devices in its path, which sysfs has as a link
// (/sys/bus/pci/devices/0000:04:1f.0 -> ../../../devices/pci0000:00/.../0000:04:1f.0). It is "" if that can't be read. The name is that
// of the attribute resource.kubernetes.io/pcieRoot of Kubernetes, by which a request gets a GPU and a network card on the same root.
func (s *Session) pcieRoot(pci gpu.PCIAddress) string {
	link, err := fs.ReadLink(s.sys, path.Join("bus/pci/devices", string(pci)))
	if err != nil {
		return ""
	}
	root, rest, _ := strings.Cut(strings.TrimPrefix(path.Join("bus/pci/devices", link), "devices/"), "/")
	if !strings.HasPrefix(root, "pci") || path.Base(rest) != string(pci) {
		return ""
	}
	return root
}

// isTegra reports whether the GPU is a part of an NVIDIA system on chip.
func isTegra(sys fs.FS) bool {
	family, _ := fs.ReadFile(sys, "devices/soc0/family") // missing on other nodes
	return strings.HasPrefix(strings.ToLower(string(family)), "tegra")
}
