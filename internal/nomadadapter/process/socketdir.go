package process

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/hashicorp/go-plugin"
)

// socketDirs is the prefix of the folders in which each process has its socket; the pid follows.
const socketDirs = "nomad-gpu-"

// maxSocketPath is the longest path of a socket: sun_path of unix(7) has 108 bytes, the terminating 0 included.
const maxSocketPath = 107

// ownSocketDir makes go-plugin create its socket in a folder of this process, and removes the folders of processes that have
// ended: a process that is killed leaves its socket, and Nomad starts the next. Where no such folder can be made, go-plugin uses
// its default. Call remove after the socket's last use.
func ownSocketDir() (remove func()) {
	base := os.Getenv(plugin.EnvUnixSocketDir)
	if base == "" {
		base = os.TempDir()
	}
	removeStaleDirs(base)
	dir := filepath.Join(base, socketDirs+strconv.Itoa(os.Getpid()))
	if os.Getenv(plugin.EnvUnixSocketGroup) != "" { // the group could not enter the folder
		return func() {}
	}
	name := fmt.Sprintf("/plugin%d", ^uint32(0)) // the longest name that os.CreateTemp makes of the pattern of go-plugin
	if len(dir)+len(name) > maxSocketPath || os.Mkdir(dir, 0o700) != nil || os.Setenv(plugin.EnvUnixSocketDir, dir) != nil {
		return func() {}
	}
	return func() { removeSocketDir(dir) }
}

// removeStaleDirs removes the folders of processes that have ended, and that of an earlier process with the pid of this one.
func removeStaleDirs(base string) {
	dirs, _ := filepath.Glob(filepath.Join(base, socketDirs+"[0-9]*")) // the pattern is valid, which is the only error
	for _, dir := range dirs {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), socketDirs))
		if err != nil || pid <= 0 {
			continue
		}
		if pid == os.Getpid() || syscall.Kill(pid, 0) == syscall.ESRCH {
			removeSocketDir(dir)
		}
	}
}

// removeSocketDir removes a folder of this user with the sockets in it. It does not remove a folder with other files.
func removeSocketDir(dir string) {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int(stat.Uid) != os.Geteuid() {
		return
	}
	files, _ := os.ReadDir(dir) // a folder that can't be read can't be removed
	for _, f := range files {
		if f.Type() == fs.ModeSocket {
			_ = os.Remove(filepath.Join(dir, f.Name()))
		}
	}
	_ = os.Remove(dir) // if this fails, the next process tries again
}
