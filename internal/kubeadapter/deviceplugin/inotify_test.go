package deviceplugin

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/util/watch"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

// event changes the mode of kubelet.sock and reports whether that is noticed within d.
func (r *rig) event(d time.Duration) bool {
	r.Helper()
	_, changed := r.plugins.kubelet.changes.LoadNext()
	check.NoError(r, os.Chmod(r.kubelet.Socket(), 0o755))
	return watch.Await(r.ctx, changed, d)
}

// bind(2) creates the file and the event. Until listen(2) the socket refuses connections, and there is no other event.
func TestBoundSocketDoesNotListenYet(t *testing.T) {
	r := newRig(t)
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	check.NoError(r, err)
	defer func() { _ = syscall.Close(fd) }()
	check.NoError(r, syscall.Bind(fd, &syscall.SockaddrUnix{Name: r.kubelet.Socket()}))
	k := newKubelet(r.dir, r.kubelet.Socket(), slog.New(slog.DiscardHandler)) // without events
	listening := false
	id, err := k.waitForKubelet(r.ctx, func(err error) {
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("refused with %v", err)
		}
		if !listening {
			listening = true
			check.NoError(r, syscall.Listen(fd, 1))
		}
	})
	check.NoError(r, err)
	if id == (statefile.Identity{}) || id != statefile.IdentityOf(r.kubelet.Socket()) {
		t.Errorf("accepted by %v", id)
	}
}

// A socket of a killed kubelet is tried at growing intervals, also after many events.
func TestStaleKubeletSocket(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.kubelet.Crash()
	k := newKubelet(r.dir, r.kubelet.Socket(), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(r.ctx)
	tries := make(chan struct{}, 1000)
	done := make(chan error, 1)
	go func() {
		_, err := k.waitForKubelet(ctx, func(error) {
			select {
			case tries <- struct{}{}:
			default:
			}
		})
		done <- err
	}()
	for range 100 {
		<-tries
		k.changes.Store(struct{}{})
	}
	watch.Sleep(ctx, 200*time.Millisecond)
	if n := len(tries); n > 5 {
		t.Errorf("%d tries in 200 ms", n)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Events are used as soon as inotify is available. One may arrive after the registration with the same socket (measured: 38 µs):
// only another file is a restart.
func TestInotifyBecomesAvailable(t *testing.T) {
	tries := 0
	r := startRig(t, gpus(1), func(p *Plugins) {
		p.timings.pollInterval = time.Hour // without an event
		p.kubelet.newWatcher = func() (*fsnotify.Watcher, error) {
			if tries++; tries <= 3 {
				return nil, syscall.EMFILE
			}
			return fsnotify.NewWatcher()
		}
	})
	r.awaitReady()
	check.Until(r, "an event", func() bool { return r.event(10 * time.Millisecond) })
	r.restartKubelet(true)
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	r.awaitReady()
	before := len(r.kubelet.Attempts())
	for range 50 {
		if !r.event(10 * time.Second) {
			t.Fatal("no event of kubelet.sock")
		}
	}
	check.NoError(r, r.plugins.Alive(r.ctx))
	if n := len(r.kubelet.Attempts()); n != before || r.plugins.Ready() != nil {
		t.Errorf("%d registrations because of late events, ready: %v", n-before, r.plugins.Ready())
	}
}

// limits names the file of an inotify limit in a user namespace, where it affects this test only (user_namespaces(7),
// /proc/sys/user).
const limits = "TANDEM_TEST_LIMIT"

// At its limits inotify has no events: each restart of a kubelet, and the removal of a plugin socket, is noticed without.
func TestRestartsAtInotifyLimits(t *testing.T) {
	if limit := os.Getenv(limits); limit != "" {
		if err := os.WriteFile(limit, []byte("0"), 0); err != nil {
			t.Skip("no limits to set here: ", err)
		}
		_, want := fsnotify.NewWatcher()
		if filepath.Base(limit) == "max_inotify_watches" {
			w, err := fsnotify.NewWatcher()
			want = errors.Join(err, w.Add("/"))
		}
		if !errors.Is(want, syscall.EMFILE) && !errors.Is(want, syscall.ENOSPC) {
			t.Fatalf("%s is not in force: %v", limit, want)
		}
		r := newRig(t)
		r.start(gpus(1))
		r.startKubelet()
		r.awaitReady()
		for i := range 3 {
			r.restartKubelet(i == 1)
			r.awaitHealthy(kubeadapter.GPUResource, 1)
			r.awaitReady()
		}
		check.NoError(r, os.Remove(r.stats().Socket))
		r.awaitRegistrations(5)
		r.awaitHealthy(kubeadapter.GPUResource, 1)
		r.awaitReady()
		return
	}
	for _, limit := range []string{"/proc/sys/user/max_inotify_instances", "/proc/sys/user/max_inotify_watches"} {
		t.Run(filepath.Base(limit), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			again := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestRestartsAtInotifyLimits$", "-test.v")
			again.Env = append(os.Environ(), limits+"="+limit)
			ids := []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
			groups := []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
			again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: groups}
			out, err := again.CombinedOutput()
			if started := again.ProcessState != nil; !started {
				t.Skip("no user namespace: ", err)
			}
			if t.Logf("%s", out); err != nil {
				t.Error(err)
			}
		})
	}
}
