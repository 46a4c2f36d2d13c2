package nomadadapter

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// fixture is a plugin with fake sources, one for each run.
type fixture struct {
	*Plugin
	Source *fakeSource // of the first run, before it starts
	Log    *logBuffer

	mu      sync.Mutex
	started []Settings // of the runs so far
	sources []*fakeSource
	ended   []<-chan struct{}
}

// newFixture returns a plugin whose first source has this inventory; nil = its driver is pending.
func newFixture(t testing.TB, inv *inventory.Allocatable) *fixture {
	t.Helper()
	return newFixtureUntil(t.Context(), inv)
}

// newFixtureUntil is newFixture with another context of New.
func newFixtureUntil(ctx context.Context, inv *inventory.Allocatable) *fixture {
	s := &fixture{Source: &fakeSource{Source: coretest.NewSource()}, Log: &logBuffer{}}
	s.Plugin = New(ctx, "2.0.0", s.startSource, hclog.New(&hclog.LoggerOptions{
		Level: hclog.Trace, Output: s.Log, JSONFormat: true,
	}))
	if inv != nil {
		s.Source.Set(inv)
	}
	return s
}

// startSource is the StartFunc.
func (s *fixture) startSource(ctx context.Context, settings Settings, _ *slog.Logger) Source {
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.Source
	if len(s.started) > 0 {
		src = &fakeSource{Source: coretest.NewSource()}
	}
	s.started, s.sources, s.ended = append(s.started, settings), append(s.sources, src), append(s.ended, ctx.Done())
	return src
}

// Started returns the settings of the runs so far.
func (s *fixture) Started() []Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

// source returns the source of run n, from 0.
func (s *fixture) source(n int) *fakeSource {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sources[n]
}

// configure calls SetConfig with the keys as Nomad encodes them.
func (s *fixture) configure(keys map[string]any) error {
	return nomadtest.SetConfig(s.Plugin, keys)
}

// mustConfigure is configure with valid keys.
func (s *fixture) mustConfigure(t testing.TB, keys map[string]any) {
	t.Helper()
	check.NoError(t, s.configure(keys))
}

// stopAndFlush ends the run, and waits for writes to the state directory.
func (s *fixture) stopAndFlush() {
	s.currentRun().stop()
	<-s.Flushed()
}

func errorContains(err error, text string) bool {
	return err != nil && strings.Contains(err.Error(), text)
}

// checkEqual fails if got is not as wanted.
func checkEqual[T any](t testing.TB, what string, want, got T) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// checkContains fails if a text does not contain all parts.
func checkContains(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in:\n%s", part, text)
		}
	}
}

// testTimeout bounds the wait for an event that must occur. No test waits for it to show that an event does not occur.
const testTimeout = 10 * time.Second

func receive[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	select {
	case v, ok := <-ch:
		if !ok {
			t.Fatal("the stream was closed")
		}
		return v
	case <-time.After(testTimeout):
		t.Fatal("nothing was sent")
	}
	panic("unreachable")
}

// receiveNothing fails if something is sent now.
func receiveNothing[T any](t testing.TB, ch <-chan T, when string) {
	t.Helper()
	select {
	case v, ok := <-ch:
		t.Errorf("%s: %+v, %t", when, v, ok)
	default:
	}
}

// fingerprints opens a stream that ends with ctx.
func fingerprints(ctx context.Context, t testing.TB, p device.DevicePlugin) <-chan *device.FingerprintResponse {
	t.Helper()
	ch, err := p.Fingerprint(ctx)
	check.NoError(t, err)
	return ch
}

// openFingerprint opens a stream and returns a function that receives the next fingerprint.
func openFingerprint(t testing.TB, p device.DevicePlugin) func() []*device.DeviceGroup {
	t.Helper()
	ch := fingerprints(t.Context(), t, p)
	return func() []*device.DeviceGroup {
		t.Helper()
		r := receive(t, ch)
		if r.Error != nil {
			t.Fatalf("the stream failed: %v", r.Error)
		}
		return r.Devices
	}
}

// openStats opens a stream that ends with ctx.
func openStats(ctx context.Context, t testing.TB, p device.DevicePlugin, interval time.Duration) <-chan *device.StatsResponse {
	t.Helper()
	ch, err := p.Stats(ctx, interval)
	check.NoError(t, err)
	return ch
}

// policyFile writes a policy file and returns its path.
func policyFile(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, path, text)
	return path
}

func write(t testing.TB, path, text string) {
	t.Helper()
	check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

const (
	validPolicy   = "version: v1\npolicy:\n  rules:\n  - {select: {index: 0}, use: reserved}\n  - {select: {index: 1}, use: time-slicing, replicas: 2}\n"
	invalidPolicy = "version: v1\npolicy:\n  rules:\n  - {select: {index: zero}, use: reserved}\n  - {select: {index: 1}, use: quartered}\n"
)

// nodeInventory returns the inventory that the monitor would publish with the default configuration.
func nodeInventory(s gpu.Snapshot, obs ...health.Observation) *inventory.Allocatable {
	return inventoryWith(defaultCore(), s, obs...)
}

func defaultCore() core.Config {
	settings, _, err := config.NewBlock(nil).Read()
	if err != nil {
		panic(err)
	}
	return settings.Core
}

// inventoryWith is nodeInventory with another configuration.
func inventoryWith(cfg core.Config, s gpu.Snapshot, obs ...health.Observation) *inventory.Allocatable {
	return core.Build(s, health.Ledger{}.Apply(cfg.Health, time.Unix(0, 0), obs...), cfg).WithoutHost()
}

func lost(n int) health.Observation {
	return health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Lost, Detail: "not listed by the driver"}
}

// lostText is the health of a GPU that was lost at time 0.
const lostText = "lost: GPU is lost (not listed by the driver) since 1970-01-01T00:00Z; action: check slot and power, reboot the node; cleared by: an answer from the GPU, or a reboot"

// logBuffer is a log by lines.
type logBuffer struct{ logbuffer.Buffer }

// Lines returns the lines written so far.
func (b *logBuffer) Lines() []string {
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}
