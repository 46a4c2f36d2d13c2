package agents

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// smallDisk mounts a small file system for the state directory of both agents, and returns its path.
func smallDisk(t *testing.T, n, k *agent) string {
	t.Helper()
	disk := filepath.Join(n.dir, "disk")
	n.must(os.Mkdir(disk, 0o755))
	err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=64k,mode=0755")
	if errors.Is(err, syscall.EPERM) {
		t.Skip("mount is not permitted")
	}
	n.must(err)
	t.Cleanup(func() {
		if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, a := range []*agent{n, k} {
		a.state = filepath.Join(disk, "state")
		a.settings["state_dir"] = a.state
	}
	n.must(os.Mkdir(n.state, 0o755))
	return disk
}

// nomad-gpu is alone on a disk that takes no file, and gives a GPU out. k8s-gpu starts, and offers none: also while
// nomad-gpu is restarted, and when the disk works again.
func TestDiskThatTakesNoFileOfAnAgent(t *testing.T) {
	for name, fault := range map[string]struct {
		begin, end func(disk string) error
	}{
		"full": {
			func(disk string) error {
				err := os.WriteFile(filepath.Join(disk, "other"), make([]byte, 1<<20), 0o600)
				if !errors.Is(err, syscall.ENOSPC) {
					return errors.New("the disk is not full")
				}
				return nil
			},
			func(disk string) error { return os.Remove(filepath.Join(disk, "other")) },
		},
		"read-only and empty": {
			func(disk string) error { return syscall.Mount("", disk, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "") },
			func(disk string) error { return syscall.Mount("", disk, "", syscall.MS_REMOUNT, "") },
		},
		"read-only, without the state directory": {
			func(disk string) error {
				err := os.Remove(filepath.Join(disk, "state"))
				return cmp.Or(err, syscall.Mount("", disk, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
			},
			func(disk string) error { return syscall.Mount("", disk, "", syscall.MS_REMOUNT, "") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, k := newBoth(t, map[string]any{"overlap": "refuse"})
			nomad, address := startNomadAPI(t)
			n.settings["nomad_address"] = address
			disk := smallDisk(t, n, k)
			n.must(fault.begin(disk))
			n.start()
			n.healthy(8, 8)
			_, err := n.allocate(n.driver.UUID(0))
			n.must(err)
			nomad.set(n.driver.UUID(0))
			k.start()
			k.healthy(8, 0)
			n.healthy(8, 8)
			if _, err := k.allocate(n.driver.UUID(0)); err == nil {
				t.Error("k8s-gpu gave out a GPU that work of nomad-gpu has")
			}
			n.kill()
			n.start()
			n.healthy(8, 8)
			k.healthy(8, 0)
			n.must(fault.end(disk))
			k.await("the file of nomad-gpu", func() bool {
				_, err := os.Stat(filepath.Join(n.state, "agents", "nomad-gpu.json"))
				return err == nil
			})
			n.await("the end of what shows GPUs without a record", func() bool {
				_, err := os.Lstat(filepath.Join(n.state, "agents", "nomad-gpu.unrecorded"))
				return errors.Is(err, os.ErrNotExist)
			})
			k.healthy(8, 0)
			n.healthy(8, 8)
			n.kill()
			k.healthy(8, 0)
			k.kill()
		})
	}
}
