package rescue

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// State is what is known from before. Its ledger is on disk; the rest is seen again after a restart. It is a value: Next changes none of its parts.
type State struct {
	Ledger Ledger
	Term   uint64 // of this process as the leader; see Lead

	seen   map[gpuKey]time.Time   // since when a GPU has had a fault that counts, without a break
	named  map[namedKey]time.Time // when the first report came that names work as a holder of a GPU with such a fault
	causes map[causeKey]time.Time // when a node got a fault of a cause
}

type gpuKey struct {
	cluster, node string
	gpu           gpu.DeviceID
}

type namedKey struct {
	gpuKey
	work string
}

type causeKey struct{ cause, hardware string }

// Ledger is the part of the state that must outlive the process: what was reserved, before it was done.
type Ledger struct {
	Version    int         `json:"version"`
	Term       uint64      `json:"term"` // of the leader
	Rescues    []Rescue    `json:"rescues,omitempty"`
	Stop       *Stop       `json:"stop,omitempty"` // all acts are stopped; nil = they are not
	ResumedAt  time.Time   `json:"resumedAt,omitzero"`
	Ineligible []Withdrawn `json:"ineligible,omitempty"`
}

const version = 1

// What a ledger has at most. A Nomad variable holds 64 KiB.
const (
	maxRescues   = 80
	maxMoves     = 80
	maxWithdrawn = 50
	maxAnswer    = 120 // bytes

	// In bytes of JSON:
	maxHead   = 1200                    // of a rescue without its moves
	moveGrows = 512                     // what answers and times add to an open move
	mostBytes = LedgerBytes - (3 << 10) // so that a person can stop all acts, with a text
)

// NewLedger is the ledger of a team that has made no act. An operator creates it once: a ledger that is missing is not an empty one.
func NewLedger() Ledger { return Ledger{Version: version} }

// Rescue is one attempt to move the work of a GPU: what the budgets count.
type Rescue struct {
	Cluster  string       `json:"cluster"`
	Node     string       `json:"node"`
	GPU      gpu.DeviceID `json:"gpu"`
	Hardware string       `json:"hardware"` // the node, in all clusters that have it
	Cause    string       `json:"cause"`
	Began    time.Time    `json:"began"` // of the fault
	Reserved time.Time    `json:"reserved"`
	Listed   bool         `json:"listed,omitempty"` // in mode report: no act was made
	Over     time.Time    `json:"over,omitzero"`    // when the fault had ended
	Moves    []Move       `json:"moves,omitempty"`
	Done     int          `json:"done,omitempty"` // moves that have ended and are not in Moves any more
}

// Move is one act of a rescue: of one workload, or of all work of a device.
type Move struct {
	Work     []Target     `json:"work"`
	Device   gpu.DeviceID `json:"device,omitempty"` // the act is on the device; "" = on the work
	Tries    int          `json:"tries,omitempty"`
	Sent     time.Time    `json:"sent,omitzero"`  // the latest call may be under way, or done; zero = it was answered, or there was none
	Retry    time.Time    `json:"retry,omitzero"` // the next call, not before
	Answer   string       `json:"answer,omitempty"`
	Remedy   string       `json:"remedy,omitempty"` // of the answer
	Accepted time.Time    `json:"accepted,omitzero"`
	Gone     time.Time    `json:"gone,omitzero"` // the old work had ended, and its replacement did not run
	Ended    time.Time    `json:"ended,omitzero"`
	Outcome  Outcome      `json:"outcome,omitempty"`
}

// Target is the work of a move.
type Target struct {
	ID         string        `json:"id"`
	Namespace  string        `json:"namespace,omitempty"`
	Name       string        `json:"name,omitempty"`
	Needs      []Need        `json:"needs,omitempty"`
	EndsWithin time.Duration `json:"endsWithin,omitempty"`
}

// Stop is why no act is made.
type Stop struct {
	At   time.Time `json:"at"`
	By   string    `json:"by"` // ByQuorum, or a person
	Text string    `json:"text"`
}

// ByQuorum is what stopped acts, if no person did.
const ByQuorum = "quorum"

// Withdrawn is a node that this program has made ineligible.
type Withdrawn struct {
	Cluster string `json:"cluster"`
	Node    string `json:"node"`
	Index   uint64 `json:"index"` // of the change; 0 = the answer is not known
}

// Lead returns the state of a process that has become the leader, with a term that no process had before. The caller writes its ledger, by
// which the writes of the leader before it fail.
func (s State) Lead() State {
	s.Term = s.Ledger.Term + 1
	s.Ledger.Term = s.Term
	return s
}

// Stopped returns the state with all acts stopped by a person.
func (s State) Stopped(by, text string, now time.Time) State {
	s.Ledger.Stop = &Stop{At: clock(now), By: by, Text: text}
	return s
}

// Resumed returns the state with acts allowed again. Faults of before do not stop them another time.
func (s State) Resumed(now time.Time) State {
	s.Ledger.Stop, s.Ledger.ResumedAt = nil, clock(now)
	return s
}

// clone returns a state that can be changed without effect on s.
func (s State) clone() State {
	s.Ledger.Rescues = slices.Clone(s.Ledger.Rescues)
	for i := range s.Ledger.Rescues {
		s.Ledger.Rescues[i].Moves = slices.Clone(s.Ledger.Rescues[i].Moves)
	}
	s.Ledger.Ineligible = slices.Clone(s.Ledger.Ineligible)
	return s
}

// Check returns why the ledger can't be one that this program wrote.
func (l Ledger) Check() error {
	if l.Version != version {
		return fmt.Errorf("its version is %d, and this program writes %d", l.Version, version)
	}
	if len(l.Rescues) > maxRescues {
		return fmt.Errorf("it has %d rescues, and this program keeps %d at most", len(l.Rescues), maxRescues)
	}
	seen := map[string]bool{}
	for i := range l.Rescues {
		r := &l.Rescues[i]
		if err := r.check(); err != nil {
			return fmt.Errorf("rescue %d (GPU %s on node %s): %w", i, r.GPU, r.Node, err)
		}
		for j := range r.Moves {
			id := fmt.Sprintf("%s %s %t", r.Cluster, r.Moves[j].id(), r.Listed)
			if r.Moves[j].Outcome == Open && seen[id] {
				return fmt.Errorf("two open moves are of %s in cluster %s", r.Moves[j].id(), r.Cluster)
			}
			seen[id] = seen[id] || r.Moves[j].Outcome == Open
		}
	}
	return nil
}

func (r *Rescue) check() error {
	switch {
	case r.Cluster == "" || r.Node == "" || r.GPU == "" || r.Hardware == "":
		return fmt.Errorf("it does not name cluster %q, node %q, GPU %q and hardware %q", r.Cluster, r.Node, r.GPU, r.Hardware)
	case r.Reserved.IsZero():
		return fmt.Errorf("it has no time")
	case len(r.Moves) == 0 && r.Done == 0:
		return fmt.Errorf("it has no work")
	}
	for i := range r.Moves {
		m := &r.Moves[i]
		if len(m.Work) == 0 || slices.ContainsFunc(m.Work, func(t Target) bool { return t.ID == "" }) {
			return fmt.Errorf("move %d has work without an ID", i)
		}
		if m.Tries < 0 || m.Ended.IsZero() != (m.Outcome == Open) {
			return fmt.Errorf("move %d has outcome %s, end %v and %d tries", i, m.Outcome, m.Ended, m.Tries)
		}
	}
	return nil
}

// id names the act of a move: a call that is repeated has the same.
func (m *Move) id() string {
	if m.Device != "" {
		return string(m.Device)
	}
	return m.Work[0].ID
}

func (m *Move) has(work string) bool {
	return slices.ContainsFunc(m.Work, func(t Target) bool { return t.ID == work })
}

// underWay reports whether the call of an open move may have been made.
func (m *Move) underWay() bool {
	return m.Outcome == Open && (!m.Sent.IsZero() || !m.Accepted.IsZero())
}

// endsWithin is from the call to the end of all work.
func (m *Move) endsWithin() (d time.Duration) {
	for i := range m.Work {
		d = max(d, m.Work[i].EndsWithin)
	}
	return d
}

// end ends a move. What only an open one needs goes, for the ledger is small.
func (m *Move) end(o Outcome, now time.Time) {
	m.Outcome, m.Ended = o, now
	m.Sent, m.Retry, m.Gone, m.Remedy = time.Time{}, time.Time{}, time.Time{}, ""
	if o != Refused {
		m.Answer = ""
	}
}

// holds reports whether the outcome of a move holds for as long as the fault: the work is not acted on again.
func (m *Move) holds() bool {
	return m.Outcome == Refused || m.Outcome == GivenUp || m.Outcome == Listed
}

func (r *Rescue) open() bool {
	return slices.ContainsFunc(r.Moves, func(m Move) bool { return m.Outcome == Open })
}

func (r *Rescue) key() gpuKey { return gpuKey{r.Cluster, r.Node, r.GPU} }

// units is the sum of needs.
func units(all []Need) (n int) {
	for _, one := range all {
		n += one.Units
	}
	return n
}
