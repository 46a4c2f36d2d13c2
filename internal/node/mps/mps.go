// Package mps finds the MPS control daemons of a node: their folders, and whether they answer, for as long as a pool needs one.
package mps

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

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
	named    []string // pools with a name in the policy
	defaults bool     // and pools with a default name, which depends on the GPUs and profiles
}

// Of returns the daemons that a policy needs, in the folders below root; "" = DefaultRoot.
func Of(p inventory.Policy, root string) Daemons {
	d := Daemons{root: cmp.Or(root, DefaultRoot)}
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
			folders, _ := os.ReadDir(filepath.Join(d.root, domain)) // a folder that can't be read has no daemons
			for _, f := range folders {
				if strings.HasSuffix(f.Name(), inventory.MPS.Suffix()) {
					pools = append(pools, f.Name())
				}
			}
		}
	}
	slices.Sort(pools)
	return slices.Compact(pools)
}

// Folder is the pipe directory of the daemon of a pool.
func (d Daemons) Folder(pool string) string { return Pipe(d.root, pool) }

// Check reports why the daemon of a pool takes no clients; nil if it does.
func (d Daemons) Check(pool string) error {
	if err := CheckControl(filepath.Join(d.Folder(pool), ControlSocket)); err != nil {
		return err
	}
	return d.checkRecord(pool)
}

// Answering returns the pools of an inventory whose daemons answer.
func (d Daemons) Answering(inv *inventory.Inventory) (pools []string) {
	return slices.DeleteFunc(d.Pools(inv), func(pool string) bool { return d.Check(pool) != nil })
}

// CheckControl reports why no process serves the control file of an MPS control daemon; nil if one does. It does not block, and
// the daemon does not notice.
//
// The file is a socket of type SOCK_SEQPACKET, to which a client connects (CUDA does so when it is initialised). A daemon logs
// every connection, so one a second would fill its log. Here the type is wrong on purpose: the kernel looks the socket up
// first and compares types then (net/unix/af_unix.c: unix_find_bsd), so EPROTOTYPE means that the process that made it runs,
// and ECONNREFUSED that it has ended. For a FIFO the check is to open it for writing without blocking: ENXIO means that no
// process reads it (fifo(7)).
func CheckControl(path string) error {
	file, err := os.Stat(path)
	if err != nil {
		return err
	}
	switch file.Mode().Type() {
	case os.ModeSocket:
		return checkSocket(path)
	case os.ModeNamedPipe:
		f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		return f.Close()
	default:
		return fmt.Errorf("%s is neither a socket nor a FIFO", path)
	}
}

func checkSocket(path string) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = syscall.Close(fd) }() // nothing was sent
	err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: path})
	if err == nil || errors.Is(err, syscall.EPROTOTYPE) {
		return nil
	}
	return &os.PathError{Op: "connect", Path: path, Err: err}
}
