package doctor

import (
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// node is a device node that programs need.
type node struct {
	Path         string // of the host: "/dev/nvidiactl"
	Exists       bool
	Character    bool
	Major, Minor uint32
	WantMajor    uint32 // as /proc/devices lists it; 0 = unknown
	Access       error  // of reading and writing by its permissions; nil = allowed
}

// nodes are the device nodes of the host.
type nodes struct {
	All    []node
	Folder bool // the folder dev is visible
}

// ofNode are the names of a driver in /proc/devices: since 550 the first is "nvidia", before it was "nvidia-frontend".
var ofNode = map[string][]string{"nvidia-uvm": {"nvidia-uvm"}, "": {"nvidia", "nvidia-frontend", "nvidiactl"}}

func readNodes(_ context.Context, o *Options) func(*Facts) {
	majors := readMajors(o.proc("devices"))
	want := []string{"nvidiactl", "nvidia-uvm"}
	folder := o.proc("driver/nvidia/gpus")
	gpus, _ := os.ReadDir(folder)
	for _, g := range gpus {
		information := parseInformation(text(filepath.Join(folder, g.Name(), "information")))
		if _, err := strconv.Atoi(information.Minor); err == nil && !information.Excluded {
			want = append(want, "nvidia"+information.Minor)
		}
	}
	slices.Sort(want[2:])
	n := nodes{Folder: exists(o.dev(""))}
	for _, name := range want {
		at := inspectNode(o.dev(name), "/dev/"+name)
		names, special := ofNode[name]
		if !special {
			names = ofNode[""]
		}
		for _, driver := range names {
			if major, ok := majors[driver]; ok {
				at.WantMajor = major
				break
			}
		}
		n.All = append(n.All, at)
	}
	return func(f *Facts) { f.Nodes = n }
}

func inspectNode(path, name string) node {
	n := node{Path: name}
	info, err := os.Stat(path)
	if err != nil {
		return n
	}
	n.Exists, n.Character = true, info.Mode()&fs.ModeCharDevice != 0
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		n.Major, n.Minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	}
	n.Access = unix.Access(path, unix.R_OK|unix.W_OK)
	return n
}

// readMajors reads the character devices of /proc/devices.
func readMajors(path string) map[string]uint32 {
	majors := map[string]uint32{}
	f, err := os.Open(path)
	if err != nil {
		return majors
	}
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan() && !strings.HasPrefix(lines.Text(), "Block"); {
		if words := strings.Fields(lines.Text()); len(words) == 2 {
			if n, err := strconv.ParseUint(words[0], 10, 32); err == nil {
				majors[words[1]] = uint32(n)
			}
		}
	}
	return majors
}

// deniedNodes opens the control nodes, as the driver's library does. EPERM on a node whose permissions allow it is the device
// cgroup: version 1 is a file, the program of version 2 can't be read.
func deniedNodes(o *Options) (denied []string) {
	for _, name := range []string{"nvidiactl", "nvidia-uvm"} {
		if path := o.dev(name); exists(path) && errno(o.system.open(path)) == syscall.EPERM {
			denied = append(denied, "/dev/"+name)
		}
	}
	return denied
}

const (
	createNodes = "nvidia-modprobe -u -c 0 (or run nvidia-smi once as root)"
	nodesByHost = ", on the host"
)

func decideNodes(c *chain) []Finding {
	f := c.Facts
	n := f.Nodes
	place := f.dev("nvidia*")
	ready := f.Driver.Driver.State == "ready"
	where := remedyInContainer(f, nodesByHost)
	missing := n.names(func(n node) bool { return !n.Exists })
	if ready && (!n.Folder || len(missing) == len(n.All)) {
		return []Finding{{"nodes", Note, place, "no device node is visible from here; the driver answers", ""}}
	}
	if len(f.Denied) > 0 {
		return c.broken(Finding{"nodes", Problem, list(f.Denied), "the device cgroup of this process does not allow it to open " + list(f.Denied),
			deniedRemedy(f)})
	}
	if bad := n.names(func(n node) bool { return n.Exists && !n.Character }); len(bad) > 0 {
		return c.broken(Finding{"nodes", Problem, list(bad), list(bad) + ": not a character device", "remove it, then: " + createNodes + where})
	}
	for _, one := range n.All {
		if one.Exists && one.WantMajor != 0 && one.Major != one.WantMajor {
			return c.broken(Finding{"nodes", Problem, one.Path + ", " + f.proc("devices"),
				fmt.Sprintf("%s has the major number %d, but the kernel module has %d: it is of an earlier load of the module", one.Path, one.Major, one.WantMajor),
				"rm " + one.Path + " && " + createNodes + where})
		}
	}
	if closed := n.names(func(n node) bool { return n.Exists && n.Access != nil }); len(closed) > 0 {
		return c.broken(Finding{"nodes", Problem, list(closed), fmt.Sprintf("user %d may not read and write %s", f.UID, list(closed)),
			"run as root, or chmod 0666; options of the module nvidia: NVreg_DeviceFileMode, NVreg_DeviceFileGID"})
	}
	if len(missing) > 0 {
		return decideMissingNodes(c, missing, createNodes+where)
	}
	return []Finding{{"nodes", OK, place, fmt.Sprintf("%s, numbers and permissions fit", report.Noun(len(n.All), "node")), ""}}
}

// decideMissingNodes: NVML needs all but nvidia-uvm, which CUDA needs. NVIDIA's container runtime makes nodes that are missing.
func decideMissingNodes(c *chain, missing []string, remedy string) []Finding {
	f := c.Facts
	if f.Driver.Driver.State != "ready" {
		return c.broken(Finding{"nodes", Problem, list(missing), list(missing) + " missing, and the driver does not answer", remedy})
	}
	for _, i := range f.Offered().Injections {
		if i.Nodes || i.CDI {
			return []Finding{{"nodes", Problem, list(missing), list(missing) + " missing: containers of pool " + list(i.Pools) + " get no CUDA device", remedy}}
		}
	}
	return []Finding{{"nodes", Warning, list(missing), list(missing) + " missing: programs on the host find no CUDA device; NVIDIA's container runtime makes them for containers", remedy}}
}

func (n nodes) names(which func(node) bool) (names []string) {
	for _, one := range n.All {
		if which(one) {
			names = append(names, one.Path)
		}
	}
	return names
}

func deniedRemedy(f *Facts) string {
	if f.kubernetes() {
		return "run the pod under NVIDIA's container runtime (runtimeClassName: nvidia, NVIDIA_VISIBLE_DEVICES=all), or with privileged: true; " +
			"if it worked before: systemctl daemon-reload took the access away, restart the pod"
	}
	return "allow them in the unit of the Nomad agent (DeviceAllow=char-nvidia* rw, or no DevicePolicy), and restart it"
}
