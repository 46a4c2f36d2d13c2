package watchdog_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

func TestLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := watchdog.NewRegistry()
		quick, idle := b.Register("quick"), b.Register("idle")
		quick.Heartbeat(time.Second)
		idle.Heartbeat(0)
		time.Sleep(5 * time.Second)
		if late := b.Late(time.Now()); len(late) != 0 {
			t.Errorf("late within the slack: %v", late)
		}
		time.Sleep(time.Hour)
		late := b.Late(time.Now())
		if len(late) != 1 || late[0].Name != "quick" || late[0].Beats != 1 || !quick.Late(time.Now()) || idle.Late(time.Now()) {
			t.Errorf("after an hour: %v", late)
		}
		quick.Heartbeat(time.Second)
		if late := b.Late(time.Now()); len(late) != 0 {
			t.Errorf("after a heartbeat: %v", late)
		}
		quick.Done()
		quick.Heartbeat(time.Second) // has no effect
		if all := b.Tasks(); len(all) != 1 || all[0].Name != "idle" {
			t.Errorf("registered: %v", all)
		}
	})
}

func TestNilRegistry(t *testing.T) {
	var b *watchdog.Registry
	l := b.Register("any")
	l.Heartbeat(time.Second)
	l.Done()
	if l.Late(time.Now()) || b.Tasks() != nil || b.Late(time.Now()) != nil {
		t.Error("something was recorded")
	}
}

func TestWatchLogsOverdueTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		b := watchdog.NewRegistry()
		l := b.Register("history")
		l.Heartbeat(time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.Watch(ctx, slog.New(slog.NewTextHandler(&log, nil)), "monitor") }()
		time.Sleep(time.Hour)
		l.Heartbeat(0)
		time.Sleep(time.Minute)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if got := log.String(); strings.Count(got, "task overdue") != 1 || strings.Count(got, "no longer overdue") != 1 {
			t.Errorf("log:\n%s", got)
		}
	})
}

// Whenever a task begins to hang, that is logged within 15 s after it is overdue, and not before the second check.
func TestOverdueTaskIsLoggedInTime(t *testing.T) {
	for hangs := range 20 {
		synctest.Test(t, func(t *testing.T) {
			var logged []time.Time
			b := watchdog.NewRegistry()
			l := b.Register("history")
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			log := slog.New(slog.NewTextHandler(writer(func() { logged = append(logged, time.Now()) }), nil))
			go func() { ended <- b.Watch(ctx, log) }()
			time.Sleep(time.Duration(hangs) * 500 * time.Millisecond)
			l.Heartbeat(time.Second)
			overdue := time.Now().Add(6 * time.Second)
			time.Sleep(time.Minute)
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if len(logged) != 1 || logged[0].Sub(overdue) < 5*time.Second || logged[0].Sub(overdue) > 15*time.Second {
				t.Errorf("overdue at %v, logged at %v", overdue, logged)
			}
		})
	}
}

// writer is called for each line of a log.
type writer func()

func (w writer) Write(line []byte) (int, error) { w(); return len(line), nil }

func TestOverdueVitalTaskEndsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := watchdog.NewRegistry()
		l := b.Register("monitor")
		l.Heartbeat(time.Second)
		began := time.Now()
		err := b.Watch(t.Context(), slog.New(slog.DiscardHandler), "monitor")
		stuck, ok := errors.AsType[*watchdog.StuckError](err)
		if !ok || stuck.Task != "monitor" || time.Since(began) < time.Minute || time.Since(began) > 2*time.Minute {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}

// In a process that was stopped (SIGSTOP, a frozen cgroup) every heartbeat is overdue, once.
func TestStoppedProcessIsNotOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := watchdog.NewRegistry()
		l := b.Register("monitor")
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var running sync.WaitGroup
		defer running.Wait()
		running.Go(func() {
			for l.Heartbeat(time.Second); ctx.Err() == nil; l.Heartbeat(time.Second) {
				time.Sleep(11 * time.Second) // overdue at one check, not at the next
			}
		})
		if err := b.Watch(ctx, slog.New(slog.DiscardHandler), "monitor"); err != nil {
			t.Error(err)
		}
	})
}
