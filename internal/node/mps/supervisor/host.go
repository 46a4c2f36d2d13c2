package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// MountShm mounts the /dev/shm of the daemons and of their clients in pods at the folder shm below root, in NVIDIA's layout, unless there is a
// mount: a tmpfs, of which the size is the kernel's default, half of the memory, or the folder of that is given. A mount that is there stays,
// because clients may use it. (Clients of driver 580 work with another /dev/shm than the daemon, those of older drivers do not.)
func MountShm(root, folder string) error {
	path := filepath.Join(root, "shm")
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	var above, own syscall.Stat_t
	if err := errors.Join(syscall.Stat(root, &above), syscall.Lstat(path, &own)); err != nil {
		return err
	}
	// A container has put a link there, and the mount would be where it leads.
	if own.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return fmt.Errorf("%s is no folder", path)
	}
	if own.Dev != above.Dev {
		return nil
	}
	source, kind, flags := "shm", "tmpfs", uintptr(syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC|syscall.MS_RELATIME)
	if folder != "" {
		source, kind, flags = folder, "", syscall.MS_BIND
	}
	if err := syscall.Mount(source, path, kind, flags, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, path, err)
	}
	return nil
}

// enforcePath is 1 while SELinux is enforcing.
var enforcePath = "/sys/fs/selinux/enforce"

// labelForContainers gives a folder, and what is created in it, the SELinux type of files that all containers may use: else they could not
// connect to a daemon. Without SELinux it does nothing.
func labelForContainers(folder *os.File) error {
	if enforce, err := os.ReadFile(enforcePath); err != nil || !bytes.Equal(bytes.TrimSpace(enforce), []byte("1")) {
		return nil //nolint:nilerr // there is no SELinux
	}
	err := unix.Fsetxattr(int(folder.Fd()), "security.selinux", []byte("system_u:object_r:container_file_t:s0"), 0)
	if err != nil {
		return fmt.Errorf("%s: set the SELinux type container_file_t: %w", folder.Name(), err)
	}
	return nil
}
