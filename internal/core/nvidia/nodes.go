package nvidia

import (
	"io/fs"
	"path"
	"slices"
	"sync"
	"time"
)

// nodeFolders are the folders of NVIDIA's device nodes under /dev, with the pattern of their names.
var nodeFolders = [...]struct{ path, names string }{{".", "nvidia*"}, {"nvidia-caps", "nvidia-cap*"}}

// stampGrain is how far a folder's modification time may lag behind a change: the kernel takes it from a clock that
// advances with its timer interrupt, every 1 to 10 ms (current_time in fs/inode.c). It is more than that to be safe.
const stampGrain = time.Second

// nodeList is the list of device nodes as it was read last, and what tells whether it is still right: the modification
// time of each folder, which changes with every node that is created or removed. So a look costs two calls of stat
// and lists no folder; /dev has hundreds of names. The zero value has read nothing.
type nodeList struct {
	mu     sync.Mutex
	nodes  []string
	read   bool
	stamps stamps    // from before the list was read
	settle time.Time // until then the list is read anew each time, as a change may not show in the stamps
}

// stamps are the modification times of the folders, nanoseconds since 1970; 0 = there is no such folder.
type stamps [len(nodeFolders)]int64

// Nodes lists NVIDIA's device nodes under the names that they have in a container, sorted. It asks no driver and is
// safe for concurrent use. The slice must not be changed.
func (s *Session) Nodes() []string { return s.nodes.current(s.dev) }

// current is the list as it is now.
func (l *nodeList) current(dev fs.FS) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := readStamps(dev); !l.read || now != l.stamps || time.Now().Before(l.settle) {
		l.list(dev, now)
	}
	return l.nodes
}

// anew is current that lists the folders in any case: on a file system without such stamps the list is as old as the
// latest reading of the machine.
func (l *nodeList) anew(dev fs.FS) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list(dev, readStamps(dev))
	return l.nodes
}

func (l *nodeList) list(dev fs.FS, now stamps) {
	l.read, l.stamps, l.nodes = true, now, nil
	l.settle = time.Unix(0, slices.Max(now[:])).Add(stampGrain)
	for _, folder := range nodeFolders {
		names, _ := fs.Glob(dev, path.Join(folder.path, folder.names)) // only a bad pattern is an error
		for _, name := range names {
			if info, err := fs.Stat(dev, name); err == nil && !info.IsDir() {
				l.nodes = append(l.nodes, "/dev/"+name)
			}
		}
	}
	slices.Sort(l.nodes)
}

func readStamps(dev fs.FS) (s stamps) {
	for i, folder := range nodeFolders {
		if info, err := fs.Stat(dev, folder.path); err == nil {
			s[i] = info.ModTime().UnixNano()
		}
	}
	return s
}
