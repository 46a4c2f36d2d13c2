package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// script is a process whose settings and lives a test decides.
type script struct {
	lives
	hup     chan os.Signal
	mu      sync.Mutex
	written settings // what reading gives
	bad     error
	began   []string // the kubelet socket of each life
	adopted []core.MIGStrategy
	lasts   time.Duration // from a life's end to its return
	fails   error         // what a life returns then
	said    output
}

// output is what is written to it, to be read meanwhile.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func newScript() *script {
	s := &script{hup: make(chan os.Signal, 1)}
	s.written.Core, s.written.KubeletSocket = core.DefaultConfig(), "none"
	s.lives = lives{
		read: func() (settings, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.written, s.bad
		},
		live: func(ctx context.Context, given settings, offers <-chan settings, _ *slog.Logger) error {
			s.began = append(s.began, given.KubeletSocket) // one at a time
			for ctx.Err() == nil {
				select {
				case next := <-offers:
					s.adopted = append(s.adopted, next.Core.MIG)
				case <-ctx.Done():
				}
			}
			time.Sleep(s.lasts)
			return s.fails
		},
		hup: s.hup, config: &configStatus{}, stderr: &s.said,
	}
	return s
}

// write changes a setting that takes another life, and says so.
func (s *script) write(socket string, bad error) {
	s.change(func(now *settings) { now.KubeletSocket = socket }, bad)
}

// offer changes one that does not.
func (s *script) offer(mig core.MIGStrategy) {
	s.change(func(now *settings) { now.Core.MIG = mig }, nil)
}

func (s *script) change(how func(*settings), bad error) {
	s.mu.Lock()
	how(&s.written)
	s.bad = bad
	s.mu.Unlock()
	select {
	case s.hup <- syscall.SIGHUP:
	default:
	}
}

// play runs the process for an hour, and what happens meanwhile.
func (s *script) play(t *testing.T, happens func()) (took time.Duration, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	began, ended := time.Now(), make(chan struct{})
	go func() {
		defer close(ended)
		err = s.run(ctx)
	}()
	synctest.Wait()
	happens()
	<-ended
	return time.Since(began), err
}

func TestLives(t *testing.T) {
	bad := errors.Join(errors.New("one"), errors.New("two"))
	rest := func() { time.Sleep(time.Minute) }
	for name, c := range map[string]struct {
		happens func(*script)
		lives   string
		err     error
		short   bool // the process ended before it was told to
	}{
		"nothing":             {happens: func(*script) {}, lives: "none"},
		"a change":            {happens: func(s *script) { s.write("mixed", nil) }, lives: "none mixed"},
		"no change":           {happens: func(s *script) { s.write("none", nil) }, lives: "none"},
		"two at once":         {happens: func(s *script) { s.write("single", nil); s.write("mixed", nil) }, lives: "none mixed"},
		"one after the other": {happens: func(s *script) { s.write("single", nil); rest(); s.write("mixed", nil) }, lives: "none single mixed"},
		"while the old life ends": {lives: "none single mixed", happens: func(s *script) {
			s.lasts = 2 * time.Second
			s.write("single", nil)
			time.Sleep(time.Second)
			s.write("mixed", nil)
		}},
		"back while the old life ends": {lives: "none single none", happens: func(s *script) {
			s.lasts = 2 * time.Second
			s.write("single", nil)
			time.Sleep(time.Second)
			s.write("none", nil)
		}},
		"between two lives": {lives: "none single mixed", happens: func(s *script) {
			s.write("single", nil)
			time.Sleep(between / 2)
			s.write("mixed", nil)
		}},
		"bad":               {happens: func(s *script) { s.write("mixed", bad) }, lives: "none"},
		"bad, then good":    {happens: func(s *script) { s.write("mixed", bad); rest(); s.write("mixed", nil) }, lives: "none mixed"},
		"bad between lives": {happens: func(s *script) { s.write("mixed", nil); rest(); s.write("single", bad) }, lives: "none mixed"},
		"a life that does not end": {lives: "none", err: errEndless, short: true, happens: func(s *script) {
			s.lasts = time.Minute
			s.write("mixed", nil)
		}},
		"a life that fails as it ends": {lives: "none", err: core.ErrDriverStale, short: true, happens: func(s *script) {
			s.fails = core.ErrDriverStale
			s.write("mixed", nil)
		}},
		"another library": {lives: "none", short: true, happens: func(s *script) {
			s.written.Core.Roots.Driver = "/run/nvidia/driver"
			s.write("none", nil)
		}},
		"another way to the library": {lives: "none", short: true, happens: func(s *script) {
			s.written.FallbackDriver = true
			s.write("none", nil)
		}},
		"other device nodes": {lives: "none none", happens: func(s *script) {
			s.written.Core.Roots.Dev = "/run/nvidia/driver"
			s.write("none", nil)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScript()
				s.written.Core.MIG = core.MIGNone
				took, err := s.play(t, func() { c.happens(s) })
				time.Sleep(s.lasts) // a life that nobody waits for
				if got := strings.Join(s.began, " "); got != c.lives || !errors.Is(err, c.err) || (took < time.Hour) != c.short {
					t.Errorf("lives %q, %v after %v; want %q, %v\n%s", got, err, took, c.lives, c.err, &s.said)
				}
			})
		})
	}
}

// What a life can adopt ends none, however often it comes and with whatever before and after.
func TestAnOfferIsAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		_, err := s.play(t, func() {
			s.offer(core.MIGMixed)
			time.Sleep(time.Minute)
			s.offer(core.MIGMixed) // which is no change
			time.Sleep(time.Minute)
			s.offer(core.MIGSingle)
			time.Sleep(time.Minute)
			s.change(func(now *settings) { now.Core.MIG, now.KubeletSocket = core.MIGNone, "other" }, nil)
			time.Sleep(time.Minute)
			s.offer(core.MIGMixed)
		})
		if lives := strings.Join(s.began, " "); err != nil || lives != "none other" ||
			!slices.Equal(s.adopted, []core.MIGStrategy{core.MIGMixed, core.MIGSingle, core.MIGMixed}) {
			t.Errorf("lives %s, adopted %v, %v\n%s", lives, s.adopted, err, &s.said)
		}
	})
}

func TestABadStartIsAnError(t *testing.T) {
	s := newScript()
	s.bad = errors.New("bad")
	if err := s.run(t.Context()); !errors.Is(err, s.bad) || len(s.began) > 0 {
		t.Errorf("%v, lives %v", err, s.began)
	}
}

// A store that comes back late overwrites nothing that the next life knows.
func TestThePastIsTheLatestLifes(t *testing.T) {
	p := &past{}
	first := p.on(nil, unknownBoot)
	if r, boot := first.Load(); boot != "" || r.BootID != "" {
		t.Errorf("a first life knows %+v", r)
	}
	if err := first.Save(core.Checkpoint{BootID: "b", Driver: "1"}); !errors.Is(err, monitor.ErrNoStore) {
		t.Errorf("what only this process knows is said to be on disk: %v", err)
	}
	second := p.on(nil, unknownBoot)
	if err := first.Save(core.Checkpoint{BootID: "b", Driver: "0"}); err == nil {
		t.Error("a store that came back late has saved something")
	}
	if r, boot := second.Load(); r.Driver != "1" || boot != "b" {
		t.Errorf("the second life knows %+v of boot %q", r, boot)
	}
}
