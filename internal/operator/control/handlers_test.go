package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// fakeAgent executes commands, and counts them.
type fakeAgent struct {
	cfg      core.Config
	state    core.State
	executed int
}

func newFakeAgent() *fakeAgent {
	cfg, now := core.DefaultConfig(), time.Now()
	cfg.MIG = inventory.MIGMixed
	state := core.NewState(cfg).Read(cfg, now, coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb")).Observe(cfg, now,
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 95},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.Lost})
	return &fakeAgent{cfg: cfg, state: state}
}

func (b *fakeAgent) State() core.State            { return b.state }
func (b *fakeAgent) Stats() monitor.Stats         { return monitor.Stats{} }
func (b *fakeAgent) Use() use.Table               { return use.Table{} }
func (b *fakeAgent) Watchdog() *watchdog.Registry { return nil }
func (b *fakeAgent) set(s core.State)             { b.state, b.executed = s, b.executed+1 }
func (b *fakeAgent) Report(obs ...health.Observation) bool {
	b.set(b.state.Observe(b.cfg, time.Now(), obs...))
	return true
}

func (b *fakeAgent) Clear(_ context.Context, o health.Command) ([]health.Condition, error) {
	s, cleared, err := b.state.Clear(b.cfg, time.Now(), o)
	if err == nil {
		b.set(s)
	}
	return cleared, err
}

func (b *fakeAgent) Ignore(_ context.Context, o health.Command, until time.Time) ([]health.Condition, error) {
	s, ignored, err := b.state.Ignore(b.cfg, time.Now(), o, until)
	if err == nil {
		b.set(s)
	}
	return ignored, err
}

func (b *fakeAgent) Quiesce(_ context.Context, until time.Time) error {
	m := health.Maintenance{Since: time.Now(), Until: until}
	if !m.Active(time.Now()) {
		return &setting.Error{Key: "until", Remedy: "want a time to come"}
	}
	b.set(b.state.EnterMaintenance(b.cfg, time.Now(), m))
	return nil
}

func (b *fakeAgent) Save(context.Context) error { return nil }
func (b *fakeAgent) Rebind(context.Context) (was, is []inventory.PositionBinding, err error) {
	next, err := b.state.Rebind(b.cfg, time.Now())
	if err != nil {
		return nil, nil, err
	}
	b.set(next)
	return was, next.Allocatable.PositionBindings(), nil
}

func (b *fakeAgent) Resume(context.Context) error {
	if !b.state.Maintenance.Active(time.Now()) {
		return monitor.ErrNotQuiesced
	}
	b.set(b.state.ExitMaintenance().Read(b.cfg, time.Now(), coretest.GPUs(3)))
	return nil
}

func TestInvalidRequests(t *testing.T) {
	handler := newHandler(newFakeAgent(), Options{Log: slog.New(slog.DiscardHandler)})
	for name, c := range map[string]struct {
		method, path, body string
		want               int
	}{
		"no JSON":     {http.MethodPost, clearURL, "clear it", http.StatusBadRequest},
		"too large":   {http.MethodPost, clearURL, `{"gpu": "` + strings.Repeat("x", 20<<10) + `"}`, http.StatusBadRequest},
		"empty":       {http.MethodPost, ignoreURL, "", http.StatusBadRequest},
		"method":      {http.MethodGet, clearURL, "", http.StatusMethodNotAllowed},
		"unknown":     {http.MethodGet, "/", "", http.StatusNotFound},
		"a reading":   {http.MethodGet, reportURL, "", http.StatusOK},
		"unspecified": {http.MethodPost, clearURL, "{}", http.StatusBadRequest},
	} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), c.method, c.path, strings.NewReader(c.body)))
		if w.Code != c.want {
			t.Errorf("%s: status %d, want %d", name, w.Code, c.want)
		}
	}
}

// FuzzCommands: a command is executed once, or rejected with a reason, in JSON; a rejected one changes nothing.
func FuzzCommands(f *testing.F) {
	urls := []string{clearURL, ignoreURL, simulateURL, quiesceURL, resumeURL}
	for i := range urls {
		for _, body := range []string{
			`{"gpu":"0"}`, `{"gpu":"0000:10:00.0","cause":"xid 95","verifiedAt":"2099-01-01T00:00:00Z","until":"4h"}`,
			`{"gpu":"1","until":"-1h"}`, `{"code":"79","gpu":"2","gi":"1","ci":"0"}`, `{"kind":"event","code":"0x2000","gpu":"GPU-00000000-0000-4000-8000-000000000000"}`,
			`{"for":"2h"}`, `{"for":"2020-01-01T00:00:00Z"}`, `{}`, ``, `[]`, `{"gpu":7}`, `{"gi":"4294967295","gpu":"mig-"}`,
		} {
			f.Add(uint8(i), []byte(body), true)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, body []byte, simulation bool) {
		b := newFakeAgent()
		before := b.state
		handler := newHandler(b, Options{Config: b.cfg, Simulation: simulation, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // a simulated fault may cause no condition
		defer cancel()
		url := urls[int(which)%len(urls)]
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body)))

		var result struct {
			Error      string
			Conditions []struct{ GPU, Cause string }
		}
		if err := json.Unmarshal(w.Body.Bytes(), &result); err != nil {
			t.Fatalf("%s %q: %v: %s", url, body, err, w.Body)
		}
		if w.Code == http.StatusOK {
			if b.executed != 1 || result.Error != "" {
				t.Errorf("%s %q was executed %d times: %s", url, body, b.executed, w.Body)
			}
			for _, c := range result.Conditions {
				if c.GPU == "" || c.Cause == "" {
					t.Errorf("%s %q: %s", url, body, w.Body)
				}
			}
			return
		}
		known := []int{http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound, http.StatusConflict}
		if !slices.Contains(known, w.Code) || strings.TrimSpace(result.Error) == "" {
			t.Errorf("%s %q: %d %s", url, body, w.Code, w.Body)
		}
		if b.executed != 0 || !b.state.Allocatable.Equal(before.Allocatable) {
			t.Errorf("%s %q was rejected, and executed: %s", url, body, w.Body)
		}
	})
}

// FuzzGPUArg: an argument selects one known GPU or is an error; the full names of that GPU select it too.
func FuzzGPUArg(f *testing.F) {
	for _, arg := range []string{"0", "2", "3", "-1", "+1", "00000000:10:00.0", "11:00.0", "gpu-00000000-0000-4000-8000-000000000001", "MIG-0", "mig-", "GPU-", " 1 ", "G"} {
		f.Add(arg)
	}
	state := newFakeAgent().state
	p := argParser{state, time.Now()}
	f.Fuzz(func(t *testing.T, arg string) {
		id, err := p.physicalGPU(arg)
		if err != nil {
			if problem, ok := errors.AsType[*setting.Error](err); !ok || problem.Key != "gpu" || id != "" {
				t.Errorf("%q: %q, %v", arg, id, err)
			}
			return
		}
		for _, d := range state.Snapshot.Devices {
			if d.At.GPU != id {
				continue
			}
			for _, name := range []string{string(d.ID), string(d.PCI), strings.ToLower(string(d.ID))} {
				if again, err := p.physicalGPU(name); err != nil || again != id {
					t.Errorf("%q is %s, and %q is %s, %v", arg, id, name, again, err)
				}
			}
			return
		}
		t.Errorf("%q is %s, which is not known", arg, id)
	})
}

// FuzzCauseArg: the canonical form of a cause is its own canonical form.
func FuzzCauseArg(f *testing.F) {
	for _, arg := range []string{"xid 95", "XID_95", "95", "xid-095", "row remap failed", "EVENT_0x2000", "xid", "xid 99999999999999999999", "ﬀ", "xid xid 1"} {
		f.Add(arg)
	}
	f.Fuzz(func(t *testing.T, arg string) {
		cause := parseCause(arg)
		if again := parseCause(cause); again != cause {
			t.Errorf("%q is %q, and that is %q", arg, cause, again)
		}
		if code, err := parseXID(arg); err == nil && (code == 0 || code >= 1<<32) {
			t.Errorf("%q is XID %d", arg, code)
		}
	})
}
