package agentapi

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// work is an allocation with one unit.
type work struct {
	id, namespace string
	unit          inventory.UnitID
	ended         time.Time // zero = it runs
}

func (w work) json() string {
	text := alloc(w.id, "job-"+w.id, "running", fmt.Sprintf(`[{"Vendor":"nvidia","Type":"gpu","DeviceIDs":[%q]}]`, w.unit))
	text = strings.Replace(text, `"Namespace":"batch"`, fmt.Sprintf(`"Namespace":%q`, w.namespace), 1)
	if w.ended.IsZero() {
		return text
	}
	text = strings.Replace(text, `"ClientStatus":"running"`, `"ClientStatus":"complete"`, 1)
	return strings.Replace(text, `"State":"running"`, fmt.Sprintf(`"State":"dead","FinishedAt":%q`, w.ended.Format(time.RFC3339Nano)), 1)
}

// token is what the servers answer to a token.
type token struct {
	name    string
	acl     *acl
	expired bool
	reads   func(namespace string) bool
}

func everyNamespace(string) bool { return true }

var tokens = []token{
	{"sees all", &acl{kind: "client", policies: map[string]string{"all": read}}, false, everyNamespace},
	{"of management", &acl{kind: "management"}, false, everyNamespace},
	{"of a workload", &acl{policies: map[string]string{"all": read}}, false, everyNamespace},
	{"sees one namespace", &acl{kind: "client", policies: map[string]string{"one": oneSpace}}, false, func(n string) bool { return n == "batch" }},
	{"without a policy", &acl{kind: "client"}, false, func(string) bool { return false }},
	{"of which nothing is known", &acl{broken: true}, false, everyNamespace},
	{"has expired", &acl{broken: true}, true, nil},
}

// servers are those of Nomad: a leader, and another one that lags behind and answers the queries that wait. agent answers about ACLs.
type servers struct {
	agent
	random *rand.Rand // mu

	is      token
	down    bool
	states  []map[string]work // by index; the last one is the leader's
	applied int               // index of the state of the other server
	shown   []map[string]work // the states of the answers, with what the token hid; each answer has its number, as an allocation
	log     []string
}

func (s *servers) note(format string, args ...any) {
	s.log = append(s.log, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

// change changes what the servers have.
func (s *servers) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *servers) leader() map[string]work { return s.states[len(s.states)-1] }

func (s *servers) put(w work) {
	s.change(func() {
		next := maps.Clone(s.leader())
		next[w.id] = w
		s.states = append(s.states, next)
	})
}

// RoundTrip answers after a while, in which everything may change.
func (s *servers) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	began, pause := s.is, time.Duration(s.random.IntN(300))*time.Millisecond
	s.mu.Unlock()
	w := httptest.NewRecorder()
	if s.answers(w, began) {
		s.serve(w, r, began)
	}
	select {
	case <-time.After(pause):
		return w.Result(), nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// answers reports whether a request is not refused.
func (s *servers) answers(w http.ResponseWriter, is token) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		http.Error(w, "No cluster leader", http.StatusInternalServerError)
	} else if is.expired {
		http.Error(w, "ACL token expired", http.StatusForbidden)
	}
	return !s.down && !is.expired
}

// serve answers as the servers do, which resolve a token when a query begins: what it may see then is what the answer has (Node.GetAllocs).
func (s *servers) serve(w *httptest.ResponseRecorder, r *http.Request, began token) {
	switch index := r.URL.Query().Get("index"); {
	case !strings.HasSuffix(r.URL.Path, "/allocations"):
		s.ServeHTTP(w, r)
	case index == "":
		s.mu.Lock()
		defer s.mu.Unlock()
		s.list(w, s.leader(), began)
	default:
		after, _ := strconv.Atoi(index)
		limit := time.After(waitTime)
		s.mu.Lock()
		defer s.mu.Unlock()
		for waiting := true; waiting && s.applied <= after; {
			changed := s.changed
			s.mu.Unlock()
			select {
			case <-changed:
			case <-limit:
				waiting = false
			case <-r.Context().Done():
				waiting = false
			}
			s.mu.Lock()
		}
		w.Header().Set("X-Nomad-Index", strconv.Itoa(s.applied))
		s.list(w, s.states[s.applied], began)
	}
}

func (s *servers) list(w http.ResponseWriter, state map[string]work, is token) {
	all := []string{fmt.Sprintf(`{"ID":"%d","ClientStatus":"complete"}`, len(s.shown))}
	s.shown = append(s.shown, state)
	for _, one := range state {
		if is.reads(one.namespace) {
			all = append(all, one.json())
		}
	}
	fmt.Fprintf(w, "[%s]", strings.Join(all, ","))
}

// running are the units of the work that has not ended.
func running(state map[string]work) map[inventory.UnitID]work {
	units := map[inventory.UnitID]work{}
	for _, w := range state {
		if w.ended.IsZero() {
			units[w.unit] = w
		}
	}
	return units
}

// recordOfAllocations is a client and the servers that it asks.
type recordOfAllocations struct {
	*servers
	t        *testing.T
	c        *Client
	placed   map[string]time.Time // by work
	reserved map[string]bool      // work to which this agent has given its unit
	seen     map[string]bool
}

// step changes something.
func (m *recordOfAllocations) step(n int) {
	switch r := m.random; r.IntN(9) {
	case 0, 1:
		m.place(work{id: fmt.Sprint("w", n), namespace: []string{"batch", "web"}[r.IntN(2)], unit: inventory.UnitID(fmt.Sprint("GPU-", r.IntN(4)))})
	case 2:
		for _, w := range running(m.leader()) {
			if r.IntN(2) == 0 {
				m.note("%s ends", w.id)
				w.ended = time.Now()
				m.put(w)
			}
		}
	case 3: // the servers remove what has ended
		m.change(func() {
			next := maps.Clone(m.leader())
			maps.DeleteFunc(next, func(_ string, w work) bool { return !w.ended.IsZero() && r.IntN(2) == 0 })
			m.states = append(m.states, next)
		})
	case 4:
		m.change(func() { m.applied += r.IntN(len(m.states) - m.applied) })
	case 5, 6:
		m.setToken(tokens[r.IntN(len(tokens))])
	case 7:
		m.change(func() { m.down = r.IntN(3) == 0 })
	case 8:
		m.c.Confirm()
	}
}

// place has a unit that no work has given to some, as the plugin is asked for it.
func (m *recordOfAllocations) place(w work) {
	if _, taken := running(m.leader())[w.unit]; taken {
		return
	}
	m.note("%s of %s has %s", w.id, w.namespace, w.unit)
	m.put(w)
	m.placed[w.id] = time.Now()
	if m.random.IntN(3) > 0 { // else by the process before this one
		m.c.Reserved(units(w.unit))
		m.reserved[w.id] = true
	}
}

func (m *recordOfAllocations) setToken(is token) {
	m.change(func() {
		m.note("the token %s", is.name)
		m.is, m.acl = is, is.acl
	})
}

// check fails the test if a record lacks work that runs.
func (m *recordOfAllocations) check() {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := running(m.leader())
	latest, err := m.c.Read(m.t.Context(), nil)
	confirmed, seen := m.c.Confirmed(), m.c.Seen()
	for _, r := range []holders.Record{latest, confirmed.Record} {
		for _, w := range running(m.stateOf(r)) {
			if r.Complete && !holds(r, w.unit) {
				m.fail("%s runs, and a complete record has no %s", w.id, w.unit)
			}
		}
	}
	for unit, w := range now {
		given := m.reserved[w.id]
		if err == nil && given && !latest.Complete && !holds(latest, unit) {
			m.fail("%s was given to %s, and the latest record, which is not complete, does not have it", unit, w.id)
		}
		if confirmed.Err == nil && (given || confirmed.Record.Complete) && m.placed[w.id].Before(confirmed.At) && !holds(confirmed.Record, unit) {
			m.fail("%s runs, and the confirmation, complete %t, has no %s", w.id, confirmed.Record.Complete, unit)
		}
		is := slices.ContainsFunc(seen.Holders, func(h holders.Holder) bool { return h.Work.ID == w.id })
		if m.seen[w.id] = m.seen[w.id] || is; !is && m.seen[w.id] {
			m.fail("%s was seen, runs, and is not seen any more", w.id)
		}
	}
}

// stateOf is what the servers had when they made the answer of a record.
func (m *recordOfAllocations) stateOf(r holders.Record) map[string]work {
	for id := range r.Work {
		if n, err := strconv.Atoi(id); err == nil {
			return m.shown[n]
		}
	}
	return nil
}

func (m *recordOfAllocations) fail(format string, args ...any) {
	m.t.Errorf(format+"\n%s", append(args, strings.Join(m.log, "\n"))...)
}

func holds(r holders.Record, unit inventory.UnitID) bool {
	return slices.ContainsFunc(r.Holders, func(h holders.Holder) bool { return h.Unit == unit })
}

// Tokens expire, lose namespaces and get them back while work begins and ends, servers lag behind and fail: no record that is complete lacks
// work that runs, no other one lacks a unit that this agent has given to it, and what was seen once is forgotten only when it has ended. With a
// token that sees all, the records have exactly what runs.
//
//	TANDEM_STORM=1000     runs, instead of a few
//	TANDEM_STORM_SEED=7   of the first run
func TestRandomTokens(t *testing.T) {
	runs, err := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM"), "40"), 10, 64)
	first, seedErr := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM_SEED"), "0"), 10, 64)
	if err != nil || seedErr != nil {
		t.Fatal(err, seedErr)
	}
	complete := 0
	for seed := first; seed < first+runs && !t.Failed(); seed++ {
		synctest.Test(t, func(t *testing.T) { complete += runTokens(t, seed) })
	}
	if complete < int(runs) {
		t.Errorf("%d complete records in %d runs: too few to mean anything", complete, runs)
	}
}

func runTokens(t *testing.T, seed uint64) (complete int) {
	random := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // a test that can be repeated
	s := &servers{agent: *newAgent(), random: random, is: tokens[0], states: []map[string]work{{}, {}}, applied: 1}
	s.acl = s.is.acl
	var log logbuffer.Buffer
	c := New(Options{Address: "http://nomad", Log: slog.New(slog.NewTextHandler(&log, nil))})
	c.http = &http.Client{Transport: s}
	m := &recordOfAllocations{servers: s, t: t, c: c, placed: map[string]time.Time{}, reserved: map[string]bool{}, seen: map[string]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); c.Run(ctx, nil, func() {}) }()
	defer func() { cancel(); <-ended }()
	for n := range 100 {
		s.mu.Lock()
		pause := time.Duration(random.Int64N(int64(8 * time.Second)))
		s.mu.Unlock()
		time.Sleep(pause)
		synctest.Wait()
		m.step(n)
		synctest.Wait()
		if m.check(); t.Failed() {
			t.Logf("TANDEM_STORM_SEED=%d\n%s", seed, log.String())
			return 0
		}
		if r, err := c.Read(ctx, nil); err == nil && r.Complete {
			complete++
		}
	}
	m.setToken(tokens[0])
	s.change(func() { s.down, s.applied = false, len(s.states)-1 })
	time.Sleep(3 * time.Minute) // two queries
	c.Confirm()
	time.Sleep(confirmTime)
	synctest.Wait()
	latest, err := c.Read(ctx, nil)
	confirmed := c.Confirmed()
	for name, r := range map[string]holders.Record{"latest": latest, "confirmed": confirmed.Record, "seen": c.Seen()} {
		if want := running(s.leader()); err != nil || confirmed.Err != nil || r.Complete != (name != "seen") || len(r.Holders) != len(want) {
			m.fail("in the end %s is %+v, want %v; %v, %v; TANDEM_STORM_SEED=%d", name, r, want, err, confirmed.Err, seed)
		}
	}
	return complete
}
