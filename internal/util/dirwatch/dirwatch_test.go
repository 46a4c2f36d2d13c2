package dirwatch_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
)

func write(path string) error { return os.WriteFile(path, nil, 0o600) }

// watching is a File that is watched until the test ends.
type watching struct {
	*testing.T
	calls chan struct{}
	log   *strings.Builder // read it after stop
	stop  func()
}

// watch watches f, which never calls without an event.
func watch(t *testing.T, f dirwatch.Directory) *watching {
	t.Helper()
	w := &watching{T: t, calls: make(chan struct{}, 1000), log: &strings.Builder{}}
	f.Log = slog.New(slog.NewTextHandler(w.log, nil))
	if f.Interval == 0 {
		f.Interval = time.Hour
	}
	if f.PollInterval == 0 {
		f.PollInterval = 5 * time.Millisecond
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { f.Watch(ctx, func() { w.calls <- struct{}{} }) })
	w.stop = func() { cancel(); running.Wait() }
	t.Cleanup(w.stop)
	return w
}

// expect waits for a call, and then until there are no more.
func (w *watching) expect(after string) {
	w.Helper()
	select {
	case <-w.calls:
	case <-time.After(10 * time.Second):
		w.Fatalf("no call after %s", after)
	}
	w.drain()
}

// drain waits until there are no calls for a while, and returns their number.
func (w *watching) drain() (n int) {
	for {
		select {
		case <-w.calls:
			n++
		case <-time.After(50 * time.Millisecond):
			return n
		}
	}
}

func TestEventsThatCount(t *testing.T) {
	dir := t.TempDir()
	file, temporary := filepath.Join(dir, "a.json"), filepath.Join(dir, ".a.json1")
	w := watch(t, dirwatch.Directory{Path: dir + "/", Relevant: func(name string) bool { return name == "a.json" }})
	w.expect("the start")
	check.NoError(t, write(temporary), os.Chmod(temporary, 0o644), write(filepath.Join(dir, "other")))
	if n := w.drain(); n != 0 {
		t.Errorf("%d calls for files that do not count", n)
	}
	check.NoError(t, os.Rename(temporary, file))
	w.expect("its creation")
	check.NoError(t, os.WriteFile(file, []byte("x"), 0))
	w.expect("a write")
	check.NoError(t, os.Chmod(file, 0o600))
	w.expect("a change of mode")
	check.NoError(t, os.Remove(file))
	w.expect("its removal")
}

// The directory at the path is watched, whichever it is, and each change is followed by a call.
func TestDirectoryIsReplaced(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plugins")
	w := watch(t, dirwatch.Directory{Path: dir, Interval: time.Hour})
	for range 3 {
		check.NoError(t, os.Mkdir(dir, 0o700))
		// While the directory is missing it is polled. The last of these calls is at its creation.
		for began, previous := time.Now(), -1; previous != 0; previous = w.drain() {
			if time.Since(began) > 10*time.Second {
				t.Fatal("still polled")
			}
		}
		check.NoError(t, write(filepath.Join(dir, "file")))
		w.expect("a new file")
		check.NoError(t, os.Rename(dir, t.TempDir()+"/old"))
		select {
		case <-w.calls:
		case <-time.After(10 * time.Second):
			t.Fatal("no call after the directory was moved away")
		}
	}
}

// Without inotify it is polled and tried again; each change of that is logged once.
func TestInotifyBecomesAvailable(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	dir := t.TempDir()
	tries := 0
	w := watch(t, dirwatch.Directory{Path: dir, NewWatcher: func() (*fsnotify.Watcher, error) {
		if tries++; tries <= 3 {
			return nil, syscall.EMFILE
		}
		return fsnotify.NewWatcher()
	}})
	for range 4 {
		select {
		case <-w.calls:
		case <-time.After(10 * time.Second):
			t.Fatal("not polled")
		}
	}
	if n := w.drain(); n != 0 {
		t.Errorf("%d calls without an event", n)
	}
	check.NoError(t, write(filepath.Join(dir, "file")))
	w.expect("an event")
	w.stop()
	if log := w.log.String(); tries != 4 || strings.Count(log, "inotify unavailable, polling") != 1 || strings.Count(log, "inotify available again") != 1 {
		t.Errorf("%d tries; log:\n%s", tries, log)
	}
	for began := time.Now(); runtime.NumGoroutine() > goroutines; time.Sleep(time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			t.Fatal("goroutines remain")
		}
	}
}

// Without inotify changed is called every PollInterval, and the task is never overdue.
func TestPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		tasks := watchdog.NewRegistry()
		calls := 0
		var running sync.WaitGroup
		running.Go(func() {
			dirwatch.Directory{
				Path: "/any", Interval: time.Minute, PollInterval: time.Second, Log: slog.New(slog.DiscardHandler), Task: tasks.Register("files"),
				NewWatcher: func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE },
			}.Watch(ctx, func() { calls++ })
		})
		time.Sleep(100*time.Second + time.Millisecond)
		if late := tasks.Late(time.Now()); len(late) != 0 || tasks.Tasks()[0].Within != time.Second {
			t.Errorf("overdue: %v, tasks %v", late, tasks.Tasks())
		}
		cancel()
		running.Wait()
		if calls != 101 {
			t.Errorf("%d calls in 100 s, want the first one and 100", calls)
		}
	})
}

// A call that ends the context is the last one, although there are more events.
func TestLastCall(t *testing.T) {
	dir := t.TempDir()
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		dirwatch.Directory{Path: dir, Interval: time.Hour, PollInterval: time.Hour, Log: slog.New(slog.DiscardHandler)}.Watch(ctx, func() {
			calls++
			for range 10 {
				check.NoError(t, write(filepath.Join(dir, "file")))
			}
			if calls == 2 {
				cancel()
			}
		})
		if calls != 2 {
			t.Fatalf("%d calls", calls)
		}
	}
}

// On a file system without events changed is called every Interval.
func TestNoEvents(t *testing.T) {
	w := watch(t, dirwatch.Directory{Path: t.TempDir(), Interval: 5 * time.Millisecond, PollInterval: time.Hour, NewWatcher: func() (*fsnotify.Watcher, error) {
		w, err := fsnotify.NewWatcher()
		w.Events = nil
		return w, err
	}})
	for range 4 {
		select {
		case <-w.calls:
		case <-time.After(10 * time.Second):
			t.Fatal("not polled")
		}
	}
}
