package agent

import (
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

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// testConfig is a configuration of three settings.
type testConfig struct {
	socket, policy, library string
}

func compareConfigs(was, is testConfig) (Change, []string) {
	switch {
	case is == was:
		return Unchanged, nil
	case is.library != was.library:
		return LibraryChanged, []string{"library"}
	case is.socket != was.socket:
		return RunChanged, []string{"socket"}
	}
	return PolicyChanged, []string{"policy"}
}

// testProcess is a process whose configuration and runs a test decides.
type testProcess struct {
	Reloader[testConfig]
	hangup  chan os.Signal
	mu      sync.Mutex
	config  testConfig // what Read returns
	invalid error
	started []string      // the socket of each run
	applied []string      // policies
	valid   int           // calls of Announce
	lasts   time.Duration // from the end of a run's context to its return
	fails   error         // what a run returns then
	log     strings.Builder
}

func newTestProcess() *testProcess {
	p := &testProcess{hangup: make(chan os.Signal, 1), config: testConfig{socket: "none"}}
	p.Reloader = Reloader[testConfig]{
		Read: func() (testConfig, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.config, p.invalid
		},
		Run: func(ctx context.Context, c testConfig, policies <-chan testConfig, _ *slog.Logger) error {
			p.started = append(p.started, c.socket) // one at a time
			for ctx.Err() == nil {
				select {
				case next := <-policies:
					p.applied = append(p.applied, next.policy)
				case <-ctx.Done():
				}
			}
			time.Sleep(p.lasts)
			return p.fails
		},
		Compare: compareConfigs, Announce: func(testConfig, *slog.Logger) { p.valid++ },
		NewLog: func(testConfig) *slog.Logger { return slog.New(slog.NewTextHandler(&p.log, nil)) },
		Hangup: p.hangup, Status: &ReloadStatus{},
	}
	return p
}

// change changes the configuration, and sends a SIGHUP.
func (p *testProcess) change(how func(*testConfig), invalid error) {
	p.mu.Lock()
	how(&p.config)
	p.invalid = invalid
	p.mu.Unlock()
	select {
	case p.hangup <- syscall.SIGHUP:
	default:
	}
}

// socket changes a setting that takes another run.
func (p *testProcess) socket(path string, invalid error) {
	p.change(func(c *testConfig) { c.socket = path }, invalid)
}

// policy changes one that does not.
func (p *testProcess) policy(name string) { p.change(func(c *testConfig) { c.policy = name }, nil) }

// serve runs the process for an hour, and meanwhile calls during.
func (p *testProcess) serve(t *testing.T, during func()) (took time.Duration, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	began, ended := time.Now(), make(chan struct{})
	go func() {
		defer close(ended)
		err = p.Serve(ctx)
	}()
	synctest.Wait()
	during()
	<-ended
	return time.Since(began), err
}

func TestReloader(t *testing.T) {
	invalid := errors.Join(errors.New("one"), errors.New("two"))
	pause := func() { time.Sleep(time.Minute) }
	for name, c := range map[string]struct {
		during func(*testProcess)
		runs   string
		err    error
		short  bool // the process ended before its context
	}{
		"nothing":              {during: func(*testProcess) {}, runs: "none"},
		"a change":             {during: func(p *testProcess) { p.socket("mixed", nil) }, runs: "none mixed"},
		"no change":            {during: func(p *testProcess) { p.socket("none", nil) }, runs: "none"},
		"two at the same time": {during: func(p *testProcess) { p.socket("single", nil); p.socket("mixed", nil) }, runs: "none mixed"},
		"one after the other":  {during: func(p *testProcess) { p.socket("single", nil); pause(); p.socket("mixed", nil) }, runs: "none single mixed"},
		"while the old run ends": {runs: "none single mixed", during: func(p *testProcess) {
			p.lasts = 2 * time.Second
			p.socket("single", nil)
			time.Sleep(time.Second)
			p.socket("mixed", nil)
		}},
		"back while the old run ends": {runs: "none single none", during: func(p *testProcess) {
			p.lasts = 2 * time.Second
			p.socket("single", nil)
			time.Sleep(time.Second)
			p.socket("none", nil)
		}},
		"between two runs": {runs: "none single mixed", during: func(p *testProcess) {
			p.socket("single", nil)
			time.Sleep(RestartPause / 2)
			p.socket("mixed", nil)
		}},
		"invalid":              {during: func(p *testProcess) { p.socket("mixed", invalid) }, runs: "none"},
		"invalid, then valid":  {during: func(p *testProcess) { p.socket("mixed", invalid); pause(); p.socket("mixed", nil) }, runs: "none mixed"},
		"invalid between runs": {during: func(p *testProcess) { p.socket("mixed", nil); pause(); p.socket("single", invalid) }, runs: "none mixed"},
		"a run that does not end": {runs: "none", err: errNotStopped, short: true, during: func(p *testProcess) {
			p.lasts = time.Minute
			p.socket("mixed", nil)
		}},
		"a run that waits for a reset": {runs: "none mixed", during: func(p *testProcess) {
			p.lasts = time.Minute
			asked := time.Now()
			p.Busy = func() bool { return time.Since(asked) < 2*time.Minute }
			p.socket("mixed", nil)
		}},
		"a run that fails as it ends": {runs: "none", err: gpu.ErrDriverStale, short: true, during: func(p *testProcess) {
			p.fails = gpu.ErrDriverStale
			p.socket("mixed", nil)
		}},
		"another library": {runs: "none", short: true, during: func(p *testProcess) {
			p.change(func(c *testConfig) { c.library = "/run/nvidia/driver" }, nil)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newTestProcess()
				took, err := p.serve(t, func() { c.during(p) })
				time.Sleep(p.lasts) // a run that is not waited for
				if got := strings.Join(p.started, " "); got != c.runs || !errors.Is(err, c.err) || (took < time.Hour) != c.short {
					t.Errorf("runs %q, %v after %v; want %q, %v\n%s", got, err, took, c.runs, c.err, &p.log)
				}
			})
		})
	}
}

// A change of the policy ends no run, however often it comes and whatever comes before and after.
func TestReloaderAppliesPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestProcess()
		_, err := p.serve(t, func() {
			p.policy("mixed")
			time.Sleep(time.Minute)
			p.policy("mixed") // no change
			time.Sleep(time.Minute)
			p.policy("single")
			time.Sleep(time.Minute)
			p.change(func(c *testConfig) { c.policy, c.socket = "", "other" }, nil)
			time.Sleep(time.Minute)
			p.policy("mixed")
		})
		if runs := strings.Join(p.started, " "); err != nil || runs != "none other" || !slices.Equal(p.applied, []string{"mixed", "single", "mixed"}) {
			t.Errorf("runs %s, applied %v, %v\n%s", runs, p.applied, err, &p.log)
		}
	})
}

// Announce is called at the start of each run and for each valid configuration, and never for an invalid one.
func TestReloaderAnnouncesValidConfigurations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestProcess()
		_, err := p.serve(t, func() {
			for i, step := range []struct {
				change func()
				want   int
			}{
				{func() {}, 1},
				{func() { p.socket("none", nil) }, 2},
				{func() { p.socket("none", os.ErrInvalid) }, 2},
				{func() { p.policy("mixed") }, 3},
				{func() { p.socket("other", nil) }, 5},
			} {
				step.change()
				time.Sleep(time.Minute)
				synctest.Wait()
				if p.valid != step.want {
					t.Errorf("step %d: announced %d times, want %d", i, p.valid, step.want)
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestInvalidConfigurationAtTheStart(t *testing.T) {
	p := newTestProcess()
	p.invalid = errors.New("invalid")
	if err := p.Serve(t.Context()); !errors.Is(err, p.invalid) || len(p.started) > 0 {
		t.Errorf("%v, runs %v", err, p.started)
	}
}
