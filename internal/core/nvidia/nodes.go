package nvidia

import (
	"io/fs"
	"path"
	"slices"
	"sync"
	"time"
)

// This file lists NVIDIA's device nodes, from /dev, on any goroutine. It makes no NVML call.

// nodeFolders are the folders of NVIDIA's device nodes under /dev, with the pattern of their names.
var nodeFolders = [...]struct{ path, names string }{{".", "nvidia*"}, {"nvidia-caps", "nvidia-cap*"}}

// mtimeGranularity is how far a folder's modification time may lag behind a change, with a margin: the kernel takes the
// time from a clock that advances with its timer interrupt, every 1 to 10 ms (current_time in fs/inode.c).
const mtimeGranularity = time.Second

// nodeList is the list of device nodes as it was read last. It is valid while the modification times of the folders,
// which change with every node that is created or removed, are the same: a check costs two stat calls and lists no
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
			if info, err := fs.Stat(dev, name); err == nil && !info.IsDir() {
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
