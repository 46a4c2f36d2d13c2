package nomadadapter

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// fixture is a plugin over sources that the test sets by hand, one for each start.
type fixture struct {
	*Plugin
	Source *coretest.Source // the first, which exists before it is started
	Log    *logBuffer

	mu      sync.Mutex
	started []Settings
	sources []*coretest.Source
	ended   []<-chan struct{}
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	s := &fixture{Source: coretest.NewSource(), Log: &logBuffer{}}
	s.Plugin = New(t.Context(), "2.0.0", s.startSource, hclog.New(&hclog.LoggerOptions{
		Level: hclog.Trace, Output: s.Log, JSONFormat: true,
	}))
	return s
}

// startSource is the StartFunc.
func (s *fixture) startSource(ctx context.Context, settings Settings, _ *slog.Logger) Source {
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.Source
	if len(s.started) > 0 {
		src = coretest.NewSource()
	}
	s.started, s.sources, s.ended = append(s.started, settings), append(s.sources, src), append(s.ended, ctx.Done())
	return src
}

// Started are the settings that sources were started with.
func (s *fixture) Started() []Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

// configure is SetConfig with keys as Nomad encodes them.
func (s *fixture) configure(keys map[string]any) error {
	var raw []byte
	if err := base.MsgPackEncode(&raw, keys); err != nil {
		return err
	}
	return s.SetConfig(&base.Config{PluginConfig: raw})
}

// dial returns p as Nomad has it: on the other side of a gRPC connection.
func dial(t testing.TB, p device.DevicePlugin) device.DevicePlugin {
	t.Helper()
	client, server := plugin.TestPluginGRPCConn(t, false, map[string]plugin.Plugin{
		base.PluginTypeBase:   &base.PluginBase{Impl: p},
		base.PluginTypeDevice: &device.PluginDevice{Impl: p},
	})
	t.Cleanup(func() {
		if err := client.Close(); err != nil { // which also asks the server to stop
			t.Error(err)
		}
		<-server.DoneCh
	})
	raw, err := client.Dispense(base.PluginTypeDevice)
	if err != nil {
		t.Fatal(err)
	}
	return raw.(device.DevicePlugin)
}

var discardLog = hclog.NewNullLogger()

func errorContains(err error, text string) bool { return strings.Contains(err.Error(), text) }

// testTimeout is how long a test waits for what must happen; it never decides whether something did not.
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

// openFingerprint starts a stream and returns how to get the next list.
func openFingerprint(t testing.TB, p device.DevicePlugin) func() []*device.DeviceGroup {
	t.Helper()
	ch, err := p.Fingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return func() []*device.DeviceGroup {
		t.Helper()
		r := receive(t, ch)
		if r.Error != nil {
			t.Fatalf("the stream failed: %v", r.Error)
		}
		for _, g := range r.Devices {
			if err := g.Validate(); err != nil {
				t.Errorf("group %s: %v", g.Name, err)
			}
		}
		return r.Devices
	}
}

// inventory is an inventory as the monitor would give it to this plugin.
func inventory(s core.Snapshot, obs ...core.Observation) *core.Inventory {
	settings, _, err := defaultBlock().compile(nil)
	if err != nil {
		panic(err)
	}
	return inventoryWith(settings.Core, s, obs...)
}

// inventoryWith is machine under another configuration.
func inventoryWith(cfg core.Config, s core.Snapshot, obs ...core.Observation) *core.Inventory {
	return core.Build(s, core.Ledger{}.Apply(cfg.Health, time.Unix(0, 0), obs...), cfg)
}

func lost(n int) core.Observation {
	return core.Observation{At: core.WholeGPU(coretest.GPU(n)), Kind: core.Lost, Detail: "not listed by the driver"}
}

// lostText is the health of a lost GPU, in a world that began with it.
const lostText = "lost: GPU is lost (not listed by the driver) since 1970-01-01T00:00Z; action: check slot and power, reboot the host; clears: GPU answers again, or reboot"

// logBuffer is a bytes.Buffer for concurrent use.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// Lines are the lines written so far.
func (b *logBuffer) Lines() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Split(strings.TrimSuffix(b.b.String(), "\n"), "\n")
}

// with is the assignment after inv.
func (a assignment) with(inv *core.Inventory) assignment {
	next, _ := a.groups(inv)
	return next
}

// deviceGroups are the groups of inv as Nomad gets them.
func deviceGroups(driver core.Driver, groups []group) (all []*device.DeviceGroup) {
	for _, l := range newListings(driver, groups) {
		all = append(all, l.wire())
	}
	return all
}

// groups are the groups of inv under an assignment, as Nomad gets them.
func groups(inv *core.Inventory, a assignment) []*device.DeviceGroup {
	_, all := a.groups(inv)
	return deviceGroups(inv.Driver(), all)
}
