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
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// book is an agent that does what it is told, and counts it.
type book struct {
	cfg   core.Config
	state core.State
	done  int
}

func newBook() *book {
	cfg, now := core.DefaultConfig(), time.Now()
	cfg.MIG = core.MIGMixed
	s := coretest.GPUs(3)
	instance := s.Devices[2]
	instance.ID, instance.Profile, instance.At.GI, instance.At.CI = "MIG-1", "1g.10gb", 7, 0
	s.Devices[2].MIG, s.Devices = true, append(s.Devices, instance)
	state := core.NewState(cfg).Read(cfg, now, core.NewSnapshot(s)).Observe(cfg, now,
		core.Observation{At: core.WholeGPU(coretest.GPU(0)), Kind: core.XID, Code: 95},
		core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.Lost})
	return &book{cfg: cfg, state: state}
}

func (b *book) State() core.State            { return b.state }
func (b *book) Stats() monitor.Stats         { return monitor.Stats{} }
func (b *book) Watchdog() *watchdog.Registry { return nil }
func (b *book) enter(s core.State)           { b.state, b.done = s, b.done+1 }
func (b *book) Report(obs ...core.Observation) bool {
	b.enter(b.state.Observe(b.cfg, time.Now(), obs...))
	return true
}

func (b *book) Clear(_ context.Context, o core.Command) ([]core.Condition, error) {
	s, cleared, err := b.state.Clear(b.cfg, time.Now(), o)
	if err == nil {
		b.enter(s)
	}
	return cleared, err
}

func (b *book) Ignore(_ context.Context, o core.Command, until time.Time) ([]core.Condition, error) {
	s, ignored, err := b.state.Ignore(b.cfg, time.Now(), o, until)
	if err == nil {
		b.enter(s)
	}
	return ignored, err
}

func (b *book) Quiesce(_ context.Context, until time.Time) error {
	m := core.Maintenance{Since: time.Now(), Until: until}
	if !m.Active(time.Now()) {
		return &core.ConfigError{Key: "until", Remedy: "want a time to come"}
	}
	b.enter(b.state.EnterMaintenance(b.cfg, time.Now(), m))
	return nil
}

func (b *book) Save(context.Context) error { return nil }
func (b *book) Rebind(context.Context) (was, is []core.PositionBinding, err error) {
	next, err := b.state.Rebind(b.cfg, time.Now())
	if err != nil {
		return nil, nil, err
	}
	b.enter(next)
	return was, next.Inventory.PositionBindings(), nil
}

func (b *book) Resume(context.Context) error {
	if !b.state.Maintenance.Active(time.Now()) {
		return monitor.ErrNotQuiesced
	}
	b.enter(b.state.ExitMaintenance().Read(b.cfg, time.Now(), coretest.GPUs(3)))
	return nil
}

// FuzzOrders: an order is carried out or refused with a reason, in JSON and once; a refused one changes nothing.
func FuzzOrders(f *testing.F) {
	urls := []string{clearURL, ignoreURL, simulateURL, quiesceURL, resumeURL}
	for i := range urls {
		for _, body := range []string{
			`{"gpu":"0"}`, `{"gpu":"0000:10:00.0","cause":"xid 95","verifiedAt":"2099-01-01T00:00:00Z","until":"4h"}`,
			`{"gpu":"1","until":"-1h"}`, `{"code":"79","gpu":"2","gi":"7","ci":"0"}`, `{"kind":"event","code":"0x2000","gpu":"GPU-00000000-0000-4000-8000-000000000000"}`,
			`{"for":"2h"}`, `{"for":"2020-01-01T00:00:00Z"}`, `{}`, ``, `[]`, `{"gpu":7}`, `{"gi":"4294967295","gpu":"mig-"}`,
		} {
			f.Add(uint8(i), []byte(body), true)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, body []byte, simulation bool) {
		b := newBook()
		before := b.state
		handler := routes(b, Options{Config: b.cfg, Simulation: simulation, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // a rehearsal may have no consequences to wait for
		defer cancel()
		url := urls[int(which)%len(urls)]
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body)))

		var answer struct {
			Error      string
			Conditions []struct{ GPU, Cause string }
		}
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
			t.Fatalf("%s %q: %v: %s", url, body, err, w.Body)
		}
		if w.Code == http.StatusOK {
			if b.done != 1 || answer.Error != "" {
				t.Errorf("%s %q was obeyed %d times: %s", url, body, b.done, w.Body)
			}
			for _, c := range answer.Conditions {
				if c.GPU == "" || c.Cause == "" {
					t.Errorf("%s %q: %s", url, body, w.Body)
				}
			}
			return
		}
		known := []int{http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound, http.StatusConflict}
		if !slices.Contains(known, w.Code) || strings.TrimSpace(answer.Error) == "" {
			t.Errorf("%s %q: %d %s", url, body, w.Code, w.Body)
		}
		if b.done != 0 || !b.state.Inventory.Equal(before.Inventory) {
			t.Errorf("%s %q was refused, and obeyed: %s", url, body, w.Body)
		}
	})
}

// FuzzGPUWord: a word means one GPU that is there, which is called so, or there is an error; what a GPU is called
// in full means it.
func FuzzGPUWord(f *testing.F) {
	for _, word := range []string{"0", "2", "3", "-1", "+1", "00000000:10:00.0", "11:00.0", "gpu-00000000-0000-4000-8000-000000000001", "MIG-1", "mig-", "GPU-", " 1 ", "G"} {
		f.Add(word)
	}
	state := newBook().state
	said := words{state, time.Now()}
	f.Fuzz(func(t *testing.T, word string) {
		id, err := said.gpu(word)
		if err != nil {
			if problem, ok := errors.AsType[*core.ConfigError](err); !ok || problem.Key != "gpu" || id != "" {
				t.Errorf("%q: %q, %v", word, id, err)
			}
			return
		}
		for _, d := range state.Snapshot.Devices {
			if d.At.GPU != id {
				continue
			}
			for _, name := range []string{string(d.ID), string(d.PCI), strings.ToLower(string(d.ID))} {
				if again, err := said.gpu(name); err != nil || again != id {
					t.Errorf("%q is %s, and %q is %s, %v", word, id, name, again, err)
				}
			}
			return
		}
		t.Errorf("%q is %s, which is not there", word, id)
	})
}

// FuzzCauseWord: a cause in any spelling has one, which is its own.
func FuzzCauseWord(f *testing.F) {
	for _, word := range []string{"xid 95", "XID_95", "95", "xid-095", "row remap failed", "EVENT_0x2000", "xid", "xid 99999999999999999999", "ﬀ", "xid xid 1"} {
		f.Add(word)
	}
	f.Fuzz(func(t *testing.T, word string) {
		cause := causeOf(word)
		if again := causeOf(cause); again != cause {
			t.Errorf("%q is %q, and that is %q", word, cause, again)
		}
		if code, err := xidCode(word); err == nil && (code == 0 || code >= 1<<32) {
			t.Errorf("%q is XID %d", word, code)
		}
	})
}
