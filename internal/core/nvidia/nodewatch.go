package nvidia

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// nodeWatch reports changes of the folders of device nodes by inotify(7). It asks for names that are created, removed or renamed:
// every write to /dev/null is an event of /dev too, up to a recent kernel, and the fsnotify package always asks for writes.
type nodeWatch struct {
	events  *os.File
	dev     string
	changed chan struct{} // capacity 1
}

// watchNodes begins to watch; dev is the host's /dev. It fails if inotify is not available or its limits are reached.
func watchNodes(dev string) (*nodeWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	w := &nodeWatch{os.NewFile(uintptr(fd), "inotify"), dev, make(chan struct{}, 1)}
	if err := w.add(); err != nil {
		_ = w.events.Close()
		return nil, err
	}
	go w.follow()
	return w, nil
}

// add adds the folders that exist; it changes nothing for those that it added before.
func (w *nodeWatch) add() error {
	const names = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ONLYDIR
	conn, err := w.events.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := conn.Control(func(fd uintptr) {
		for i := len(nodeFolders) - 1; i >= 0; i-- { // /dev last: err is its error
			_, err = unix.InotifyAddWatch(int(fd), filepath.Join(w.dev, nodeFolders[i].path), names)
		}
	})
	if controlErr != nil {
		return controlErr
	}
	return os.NewSyscallError("inotify_add_watch", err)
}

// follow sends to changed for each change until close.
func (w *nodeWatch) follow() {
	var buffer [16 * (unix.SizeofInotifyEvent + unix.NAME_MAX + 1)]byte
	for {
		n, err := w.events.Read(buffer[:])
		if err != nil {
			return // closed
		}
		if concernsNodes(buffer[:n]) {
			_ = w.add() // a folder may be new
			watch.Notify(w.changed)
		}
	}
}

// concernsNodes reports whether one of the events (struct inotify_event) is of a name that NVIDIA's device nodes, their folders or
// IMEX channels have, or has no name, as when events were lost.
func concernsNodes(events []byte) bool {
	for len(events) >= unix.SizeofInotifyEvent {
		mask, length := binary.NativeEndian.Uint32(events[4:]), binary.NativeEndian.Uint32(events[12:])
		events = events[unix.SizeofInotifyEvent:]
		length = min(length, uint32(len(events)))
		if name := string(events[:length]); mask&unix.IN_IGNORED == 0 && (name == "" || strings.HasPrefix(name, "nvidia") || strings.HasPrefix(name, "channel")) {
			return true
		}
		events = events[length:]
	}
	return false
}

// close ends the watch. It is safe for a nil *nodeWatch.
func (w *nodeWatch) close() {
	if w != nil {
		_ = w.events.Close()
	}
}
