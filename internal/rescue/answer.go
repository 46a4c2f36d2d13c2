package rescue

import (
	"strings"
	"time"
)

// AnswerKind is how the orchestrator answered an act.
type AnswerKind uint8

// Kinds of answers.
const (
	Failed   AnswerKind = iota // there was none, or an error of which it is not known whether the act is done
	Accepted                   // the work will end; it can't be taken back
	NotFound                   // the work is gone, or another one has its name
	Blocked                    // not now: a disruption budget, or too many requests
	Denied                     // never in this way: several disruption budgets. A missing right is a Cluster.Problem
	NotMade                    // there was no call: Still has refused it, or the objects could not be read
)

var answerNames = [...]string{"failed", "accepted", "not-found", "blocked", "denied", "not-made"}

// String returns the name of the kind.
func (k AnswerKind) String() string { return answerNames[k] }

// Answer is the orchestrator's answer to an act.
type Answer struct {
	Kind   AnswerKind
	Text   string
	Remedy string        // of Blocked: what a person has to change, because it does not end by itself
	After  time.Duration // when the orchestrator asks to try again; 0 = it does not
}

// Answered returns the state after the answer to an act. The caller writes its ledger; if it can't, the act is repeated, which is harmless.
func (s State) Answered(a Act, answer Answer, now time.Time) State {
	s, now = s.clone(), clock(now)
	for i := range s.Ledger.Rescues {
		r := &s.Ledger.Rescues[i]
		if r.Listed || r.key() != (gpuKey{a.Cluster, a.Node, a.GPU}) {
			continue
		}
		for j := range r.Moves {
			if m := &r.Moves[j]; m.Outcome == Open && m.Accepted.IsZero() && m.Device == a.Device && m.Work[0].ID == a.Subject.Work {
				m.answered(answer, now)
			}
		}
	}
	return s
}

func (m *Move) answered(a Answer, now time.Time) {
	m.Answer, m.Remedy = short(a.Text), short(a.Remedy)
	switch a.Kind {
	case Accepted:
		m.Accepted = now
	case Blocked:
		m.Sent = time.Time{}
		m.Retry = now.Add(max(a.After, retryAfter+m.spread()))
	case Denied:
		m.end(Refused, now)
	case NotFound:
		if m.Tries > 1 {
			m.Accepted = now // perhaps by an earlier call
			return
		}
		m.end(EndedItself, now)
	case Failed:
		m.Retry = now.Add(retryAfter + m.spread())
	case NotMade:
		m.Retry = now.Add(retryAfter + m.spread())
		if m.Tries == 1 { // else an earlier call may be done
			m.Sent, m.Tries = time.Time{}, 0
		}
	}
}

// short is a text as the ledger has it.
func short(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxAnswer)], "")
}

// spread is the part of a time to wait that is not the same for all work, so that not all calls are repeated at once.
func (m *Move) spread() time.Duration {
	sum := uint32(m.Tries) //nolint:gosec // only to spread
	for _, b := range []byte(m.id()) {
		sum = sum*31 + uint32(b)
	}
	return time.Duration(sum%1000) * retrySpread / 1000
}
