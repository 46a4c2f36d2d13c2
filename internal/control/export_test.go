package control

import (
	"syscall"

	"github.com/fsnotify/fsnotify"
)

// DisableInotify lets inotify fail for a socket as at its limits. Call it before Serve.
func (s *Socket) DisableInotify() {
	s.newWatcher = func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE }
}
