package agents

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// faultyDisk is an ext4 file system of its own that can be full, read-only and slow.
type faultyDisk struct {
	dir    string // where it is mounted
	frozen bool
}

// newFaultyDisk mounts a file system of 8 MiB. It skips the test where the machine does not allow that.
func newFaultyDisk(t *testing.T, dir string) *faultyDisk {
	t.Helper()
	d := &faultyDisk{dir: filepath.Join(dir, "disk")}
	image := filepath.Join(dir, "image")
	err := errors.Join(os.Mkdir(d.dir, 0o700), os.WriteFile(image, nil, 0o600), os.Truncate(image, 8<<20))
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"mkfs.ext4", "-q", "-m", "0", "-N", "128", image}, {"mount", "-o", "loop", image, d.dir}} {
		if text, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("no file system of its own: %v: %v: %s", args, err, text)
		}
	}
	t.Cleanup(func() {
		d.heal(t)
		if err := unix.Unmount(d.dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return d
}

// state is the state directory on the disk.
func (d *faultyDisk) state() string { return filepath.Join(d.dir, "state") }

// fill takes all space. What is there can be read and removed.
func (d *faultyDisk) fill() error {
	f, err := os.Create(filepath.Join(d.dir, "ballast"))
	if err != nil {
		return ignoring(err, syscall.ENOSPC, syscall.EROFS, os.ErrPermission)
	}
	defer func() { _ = f.Close() }()
	for size := 64 << 10; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	return ignoring(err, syscall.ENOSPC)
}

// useInodes takes all inodes: existing files can be changed, and none can be created.
func (d *faultyDisk) useInodes() error {
	for i := 0; ; i++ {
		f, err := os.Create(filepath.Join(d.dir, fmt.Sprintf("inode%d", i)))
		if err != nil {
			return ignoring(err, syscall.ENOSPC, syscall.EROFS, os.ErrPermission)
		}
		_ = f.Close()
	}
}

// lock makes the folders immutable: no file can be created, renamed or removed, as on a read-only file system. Open files do not prevent it.
func (d *faultyDisk) lock() error {
	return errors.Join(d.unlock(), d.chattr("+i")) // chattr fails for some folders that are immutable already
}

func (d *faultyDisk) unlock() error { return d.chattr("-i") }

// chattr changes the attributes of the folders that exist.
func (d *faultyDisk) chattr(flag string) error {
	var errs []error
	for _, dir := range []string{d.dir, d.state(), filepath.Join(d.state(), "agents")} {
		errs = append(errs, ignoring(chattr(flag, dir), os.ErrNotExist))
	}
	return errors.Join(errs...)
}

func chattr(flag, dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return err
	}
	if text, err := exec.Command("chattr", flag, dir).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, text)
	}
	return nil
}

// readOnly mounts the file system read-only. Files that are open for writing prevent it: the folders are locked then.
func (d *faultyDisk) readOnly() error {
	var now unix.Statfs_t
	if err := unix.Statfs(d.dir, &now); err != nil || now.Flags&unix.ST_RDONLY != 0 {
		return err
	}
	if exec.Command("mount", "-o", "remount,ro", d.dir).Run() == nil {
		return nil
	}
	return d.lock()
}

// freeze makes each write wait until thaw.
func (d *faultyDisk) freeze() error {
	d.frozen = true
	return exec.Command("fsfreeze", "-f", d.dir).Run()
}

func (d *faultyDisk) thaw() error {
	if !d.frozen {
		return nil
	}
	d.frozen = false
	return exec.Command("fsfreeze", "-u", d.dir).Run()
}

// heal ends all that is wrong.
func (d *faultyDisk) heal(t *testing.T) {
	t.Helper()
	err := errors.Join(d.thaw(), exec.Command("mount", "-o", "remount,rw", d.dir).Run(), d.unlock())
	for _, pattern := range []string{"ballast", "inode*"} {
		paths, _ := filepath.Glob(filepath.Join(d.dir, pattern)) // its only error is a bad pattern
		for _, path := range paths {
			err = errors.Join(err, os.Remove(path))
		}
	}
	if err != nil {
		t.Error(err)
	}
}

// slow has writes wait for a time.
func (d *faultyDisk) slow(took time.Duration, meanwhile func(time.Duration)) error {
	err := d.freeze()
	meanwhile(took)
	return errors.Join(err, d.thaw())
}

// ignoring returns err unless it is one of these.
func ignoring(err error, these ...error) error {
	for _, one := range these {
		if errors.Is(err, one) {
			return nil
		}
	}
	return err
}
