// Package mps finds the MPS control daemons of a node: their folders, and whether they answer, for as long as a pool needs one.
//
// Containers of a pool can write its pipe directory, and some can write all folders of the daemons. So what is below
// the root is looked at without following a link at its end and without blocking. Which daemon this node has started,
// and with what, is in the state directory, which only root can write.
package mps

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// DefaultRoot is where NVIDIA's mps-control-daemon keeps its folders on the host (k8s-device-plugin: values.yaml,
// mps.root). The folder of a pool has the daemon's pipe directory and its log (cmd/mps-control-daemon/mps/root.go).
const DefaultRoot = "/run/nvidia/mps"

// domain is the parent folder of all pools: a daemon's folder is named after its resource, "nvidia.com/gpu.shared".
const domain = inventory.ResourceDomain

// ControlSocket is the file in a pipe directory that the daemon serves.
const ControlSocket = "control"

// Pipe is the pipe directory of a pool's MPS control daemon under root, in the layout of NVIDIA's mps-control-daemon: the
// value of CUDA_MPS_PIPE_DIRECTORY for its clients.
func Pipe(root, pool string) string { return filepath.Join(root, domain, pool, "pipe") }

// Daemons are the MPS control daemons that an agent needs.
type Daemons struct {
	root     string
	stateDir string   // has the records; "" = there are none
	named    []string // pools with a name in the policy
	defaults bool     // and pools with a default name, which depends on the GPUs and profiles
}

// Of returns the daemons that a policy needs, in the folders below root; "" = DefaultRoot. Their records are in
// stateDir; "" = none.
func Of(p inventory.Policy, root, stateDir string) Daemons {
	d := Daemons{root: cmp.Or(root, DefaultRoot), stateDir: stateDir}
	for _, r := range p.Rules {
		switch {
		case r.Sharing == nil || r.Sharing.Mode != inventory.MPS || r.NotOffered != "":
		case r.Pool != "":
			d.named = append(d.named, r.Pool)
		default:
			d.defaults = true
		}
	}
	for _, s := range p.Shares {
		if s.Sharing.Mode == inventory.MPS {
			d.named = append(d.named, cmp.Or(s.Rename, s.Pool))
		}
	}
	return d
}

// Pools are the pools whose daemons are checked, sorted: those of the inventory, and while the driver is not ready, those that
// the policy may select, so that the result is known when the first GPU is read.
func (d Daemons) Pools(inv *inventory.Inventory) []string {
	var pools []string
	for u := range inv.Units() {
		if n := len(pools); u.Sharing.Mode == inventory.MPS && (n == 0 || pools[n-1] != u.Pool) {
			pools = append(pools, u.Pool)
		}
	}
	if inv.Driver().State != gpu.DriverReady {
		pools = append(pools, d.named...)
		if d.defaults {
			for _, name := range folders(filepath.Join(d.root, domain)) {
				if strings.HasSuffix(name, inventory.MPS.Suffix()) {
					pools = append(pools, name)
				}
			}
		}
	}
	slices.Sort(pools)
	return slices.Compact(pools)
}

// maxFolders is how many folders of pools are looked at: a container may have made more.
const maxFolders = 1000

// folders returns the names in a folder, at most maxFolders. A folder that can't be read has no daemons.
func folders(path string) []string {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }() // opened for reading only
	names, _ := f.Readdirnames(maxFolders)
	return names
}

// Folder is the pipe directory of the daemon of a pool.
func (d Daemons) Folder(pool string) string { return Pipe(d.root, pool) }

// Check reports why the daemon of a pool takes no clients; nil if it does.
func (d Daemons) Check(pool string) error {
	control, err := FindControl(d.Folder(pool))
	if err != nil {
		return err
	}
	return d.checkRecord(pool, control)
}

// Answering returns the pools of an inventory whose daemons answer.
func (d Daemons) Answering(inv *inventory.Inventory) (pools []string) {
	return slices.DeleteFunc(d.Pools(inv), func(pool string) bool { return d.Check(pool) != nil })
}

// Control tells the control file of a daemon from one that has taken its place. The zero value is no file.
type Control struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
}

// FindControl returns the control file in a pipe directory, or why no process serves it. It does not block, follows no
// link in the directory, and the daemon does not notice.
//
// The file is a socket of type SOCK_SEQPACKET, to which a client connects (CUDA does so when it is initialised). A daemon logs
// every connection, so one a second would fill its log. Here the type is wrong on purpose: the kernel looks the socket up
// first and compares types then (net/unix/af_unix.c: unix_find_bsd), so EPROTOTYPE means that the process that made it runs,
// and ECONNREFUSED that it has ended. For a FIFO the check is to open it for writing without blocking: ENXIO means that no
// process reads it (fifo(7)).
//
// The file is opened with O_PATH, which neither blocks nor has an effect on it, and then used by its descriptor:
// whoever can write the directory can put another file in its place at any time.
func FindControl(pipe string) (Control, error) {
	path := filepath.Join(pipe, ControlSocket)
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Control{}, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return Control{}, &os.PathError{Op: "fstat", Path: path, Err: err}
	}
	opened := "/proc/self/fd/" + strconv.Itoa(fd)
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		err = checkSocket(opened)
	case unix.S_IFIFO:
		err = checkFIFO(opened)
	default:
		err = errors.New("it is neither a socket nor a FIFO")
	}
	if err != nil {
		return Control{}, fmt.Errorf("%s: %w", path, err)
	}
	return Control{Device: stat.Dev, Inode: stat.Ino}, nil
}

func checkSocket(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing was sent
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	if err == nil || errors.Is(err, unix.EPROTOTYPE) {
		return nil
	}
	return os.NewSyscallError("connect", err)
}

func checkFIFO(path string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open", err)
	}
	return unix.Close(fd)
}
