package gpureset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
)

// Program is nvidia-smi of the node's driver. It is run with the root of the driver as its own, so that it gets the driver's own libraries: that of a
// driver container, or of the host in a container. A folder that has only files of the driver, as on Google's images, is no root: there nvidia-smi is run
// as it is, with the driver's library preloaded, as NVIDIA's DRA driver does. A search path for libraries could have another libc in it.
type Program struct {
	Root      string   // of the driver, see core.Roots; "" or "/" = that of this process
	Path      string   // of nvidia-smi as it is run, so in Root if that is a root; "" = searched in the folders of a root
	Libraries []string // folders beneath Root in which libnvidia-ml.so.1 may be
}

// folders are where distributions, NVIDIA's driver container and Google's images have programs, beneath the root of the driver.
var folders = []string{"usr/bin", "usr/local/bin", "usr/sbin", "usr/local/sbin", "bin", "sbin", "opt/bin", "usr/local/nvidia/bin"}

// linkers are the dynamic linkers of 64-bit Linux, where programs have them. A root has one.
var linkers = []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"}

// killAtMost is for how long the end of a process is awaited that was killed.
const killAtMost = 2 * time.Second

// place is where nvidia-smi is and how it is run.
type place struct {
	root    string // "/" = as it is
	path    string // in the root
	library string // LD_PRELOAD; "" = none
}

// Check returns why nvidia-smi can't be run: an *UnavailableError.
func (p Program) Check() error {
	_, err := p.place()
	return err
}

// place finds nvidia-smi, and checks who can write it and the library that it gets: it is run as root.
func (p Program) place() (place, error) {
	driver := cmp.Or(p.Root, "/")
	at := place{root: "/", path: p.Path}
	if existing(driver, linkers) != "" {
		at.root, driver = driver, "/"
	} else {
		at.library = p.library(driver)
	}
	if at.path == "" {
		for _, folder := range folders {
			if path := filepath.Join(driver, folder, "nvidia-smi"); isThere(filepath.Join(at.root, path)) {
				at.path = path
				break
			}
		}
	}
	if at.path == "" {
		return at, &UnavailableError{"install it with the driver, or give its path: reset.program, or --program of reset-server",
			fmt.Errorf("there is no nvidia-smi beneath %s: searched %v", filepath.Join(at.root, driver), folders)}
	}
	err := proofcommand.CheckIn(at.root, []string{at.path})
	if at.library != "" {
		err = errors.Join(err, proofcommand.CheckLibrary(at.library))
	}
	if err != nil {
		return at, &UnavailableError{"it is run as root, so only root may be able to replace it", err}
	}
	return at, nil
}

// library returns the driver's library for nvidia-smi; "" = the linker finds it.
func (p Program) library(root string) string {
	for _, folder := range p.Libraries {
		if path := filepath.Join(root, folder, "libnvidia-ml.so.1"); root != "/" && isThere(path) {
			return path
		}
	}
	return ""
}

// existing returns the first file or folder beneath a root that exists; "" = none.
func existing(root string, names []string) string {
	for _, name := range names {
		if path := filepath.Join(root, name); isThere(path) {
			return path
		}
	}
	return ""
}

// isThere reports whether there is a file or a link: a link of another root ends elsewhere.
func isThere(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Call runs nvidia-smi until ctx ends, and then kills it. A process that can't be killed is left: a driver that hangs keeps it in the kernel.
//
// It has a session of its own, so that a signal to the process group of the agent does not end it, and no PDEATHSIG, which would end it with the agent:
//
//	agent      --gpu-reset begins . . . . killed
//	nvidia-smi                            resets the GPU . . . ended: the GPU is whole, and the agent that follows finds it so
//	with PDEATHSIG                        killed in the middle of the reset: the GPU may be in any state
func (p Program) Call(ctx context.Context, args ...string) (printed string, status int, err error) {
	return p.call(ctx, nil, args...)
}

// call is Call with a lock that nvidia-smi holds until it has ended.
func (p Program) call(ctx context.Context, lock *Lock, args ...string) (printed string, status int, err error) {
	at, err := p.place()
	if err != nil {
		return "", -1, err
	}
	held, release, err := lock.hold(ctx)
	if err != nil {
		return "", -1, err
	}
	defer release()
	proofcommand.CloseOnExec()
	cmd := exec.CommandContext(ctx, at.path, args...)
	cmd.Dir, cmd.Env = "/", []string{"LC_ALL=C", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if at.library != "" {
		cmd.Env = append(cmd.Env, "LD_PRELOAD="+at.library)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if at.root != "/" {
		cmd.SysProcAttr.Chroot = at.root
	}
	if held != nil {
		cmd.ExtraFiles = []*os.File{held}
	}
	output := proofcommand.NewTail()
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = output, output, killAtMost/2
	ended := make(chan error, 1)
	go func() { ended <- cmd.Run() }() // also the start can hang, with the file system of the program
	left, err := await(ctx, ended)
	if left {
		lock.leave()
	}
	if err == nil {
		return output.String(), cmd.ProcessState.ExitCode(), nil
	}
	return output.String(), -1, err
}

// await returns nil if a process has ended by itself, with any status, and whether it was left because it could not be
// killed.
func await(ctx context.Context, ended <-chan error) (left bool, err error) {
	select {
	case err = <-ended:
	case <-ctx.Done():
		killed := time.NewTimer(killAtMost)
		defer killed.Stop()
		select {
		case err = <-ended:
		case <-killed.C:
			return true, ctx.Err()
		}
	}
	exit, ran := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay), ran && exit.Exited():
		return false, nil
	case ctx.Err() != nil:
		return false, ctx.Err()
	}
	return false, err
}
