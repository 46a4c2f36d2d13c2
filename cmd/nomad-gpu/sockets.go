package main

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

// socketDirs is the beginning of the folders in which each process has its socket; the pid follows.
const socketDirs = "nomad-gpu-"

// maxSocketPath is the longest path of a socket: sun_path in unix(7) is 108 bytes with the 0 at its end.
const maxSocketPath = 107

// ownSocketDir has go-plugin make its socket in a folder of this process's own, and removes the folders of
// processes that are gone: one that is killed leaves its socket behind, and Nomad starts the next as often
// as that happens. Where there can be no such folder the socket is where go-plugin puts it. Call remove when
// the socket is not needed any more.
func ownSocketDir() (remove func()) {
	base := os.Getenv(plugin.EnvUnixSocketDir)
	if base == "" {
		base = os.TempDir()
	}
	sweep(base)
	dir := filepath.Join(base, socketDirs+strconv.Itoa(os.Getpid()))
	if os.Getenv(plugin.EnvUnixSocketGroup) != "" { // it could not enter
		return func() {}
	}
	name := fmt.Sprintf("/plugin%d", ^uint32(0)) // the longest that os.CreateTemp makes of what go-plugin asks for
	if len(dir)+len(name) > maxSocketPath || os.Mkdir(dir, 0o700) != nil || os.Setenv(plugin.EnvUnixSocketDir, dir) != nil {
		return func() {}
	}
	return func() { removeSocketDir(dir) }
}

// sweep removes the folders of processes that are gone, and of the one that had our pid before.
func sweep(base string) {
	dirs, _ := filepath.Glob(filepath.Join(base, socketDirs+"[0-9]*")) // its only error is a bad pattern
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

// removeSocketDir removes a folder of ours with its sockets. What else somebody put there keeps it.
func removeSocketDir(dir string) {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int(stat.Uid) != os.Geteuid() {
		return
	}
	files, _ := os.ReadDir(dir) // what can't be read can't be removed
	for _, f := range files {
		if f.Type() == fs.ModeSocket {
			_ = os.Remove(filepath.Join(dir, f.Name()))
		}
	}
	_ = os.Remove(dir) // if it stays, the next process tries again
}
