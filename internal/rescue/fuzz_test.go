package rescue_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// FuzzLedger has ledgers of any content, as a person or a program may have changed them: the decision does not fail, and what it makes of one that it accepts
// it accepts again.
func FuzzLedger(f *testing.F) {
	w := newWorld(&testing.T{}, 3, 2)
	w.run("job", "nomad", 0, 0)
	w.run("pod", "kube", 0, 0)
	w.fault("nomad", 0, 0, xid(95))
	w.fault("kube", 0, 0, xid(79))
	w.policy.MaxNodes = 2
	for range 4 {
		w.pass(time.Minute)
		b, err := json.Marshal(w.state.Ledger)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"version":1,"term":1,"rescues":[{"cluster":"nomad","node":"nomad-0","gpu":"GPU-nomad-0-0","hardware":"h","began":"2026-11-27T09:00:00Z","reserved":"2026-11-27T09:01:00Z","done":3}]}`))
	f.Add([]byte(`{"version":1,"term":1,"stop":{"by":"anna"},"ineligible":[{"cluster":"nomad","node":"nomad-0"}]}`))
	fleet, now := w.fleet(), w.now
	f.Fuzz(func(t *testing.T, b []byte) {
		var l rescue.Ledger
		if json.Unmarshal(b, &l) != nil {
			return
		}
		s := rescue.State{Ledger: l, Term: l.Term}
		r := w.policy.Next(s, fleet, now)
		if r.Problem != "" && len(r.Acts) > 0 {
			t.Fatalf("%q, and acts %+v", r.Problem, r.Acts)
		}
		if r.Problem != "" {
			return
		}
		if err := r.State.Ledger.Check(); err != nil {
			t.Fatalf("%v\nin  %s\nout %+v", err, b, r.State.Ledger)
		}
		for _, a := range r.Acts {
			r.State = r.State.Answered(a, rescue.Answer{Kind: rescue.Blocked}, now)
		}
	})
}
