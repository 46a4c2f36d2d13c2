package kubeadapter

import (
	"context"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// watch rings the bell after file events in the folder and every so often without: a ring only says "look
// again". The folder may be missing, appear later or be replaced; file events may get lost, never come (some
// file systems have none) or not be had at all, as the limits of inotify are shared by a whole node. Then it
// looks more often, and tries for them again each time.
func (k *kubelet) watch(ctx context.Context, p pace, turns *watchdog.Task) {
	defer turns.Done()
	w, err := k.attach(nil)
	every := k.looks(p, p.look, err)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		turns.Heartbeat(every)
		var events chan fsnotify.Event
		var errs chan error
		if w != nil {
			events, errs = w.Events, w.Errors
		}
		ring := true
		select {
		case e := <-events: // the kubelet's checkpoint changes with every list
			ring = filepath.Ext(e.Name) == ".sock" || e.Name == k.dir
		case err := <-errs: // such as too many events at once
			k.log.Debug("file events", "error", err)
		case <-tick.C:
		case <-ctx.Done():
			if w != nil {
				_ = w.Close()
			}
			return
		}
		w, err = k.attach(w) // before the ring: what happens after a look is then an event
		if now := k.looks(p, every, err); now != every {
			every, ring = now, true
			tick.Reset(every)
		}
		if ring {
			k.bell.ring()
		}
	}
}

// attach has file events of the folder that is there now. The watcher may be nil, as the one given.
func (k *kubelet) attach(w *fsnotify.Watcher) (*fsnotify.Watcher, error) {
	if w == nil {
		var err error
		if w, err = k.events(); err != nil {
			return nil, err
		}
	}
	return w, w.Add(k.dir)
}

// looks is how long to wait between looks, with or without file events. A change is logged.
func (k *kubelet) looks(p pace, before time.Duration, err error) time.Duration {
	switch {
	case err != nil && before != p.poll:
		k.log.Info("no file events of the kubelet's folder, looking every "+p.poll.String(), "error", err)
	case err == nil && before != p.look:
		k.log.Info("file events of the kubelet's folder again")
	}
	if err != nil {
		return p.poll
	}
	return p.look
}

// bell wakes everybody who listens. Take heard before looking at what may have changed: a ring between
// the look and the wait is then not lost.
type bell struct {
	mu   sync.Mutex
	next chan struct{}
}

func newBell() *bell { return &bell{next: make(chan struct{})} }

func (b *bell) heard() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.next
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.next)
	b.next = make(chan struct{})
}
