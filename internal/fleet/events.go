package fleet

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// events logs and counts what this process has decided and done as the leader: all of it once.
type events struct {
	log     *slog.Logger
	counts  Counts
	stop    *rescue.Stop                     // that was logged and lasts
	waits   map[rescue.Subject]rescue.Reason // that were logged and last
	refused map[rescue.Subject]rescue.Reason
	logged  map[rescue.Subject]string // the latest answer to the act of an open move, and to the mark of a node
}

const keptReplaced = 100 // of Counts.Replaced

func newEvents(log *slog.Logger) events {
	return events{
		log: log, counts: Counts{Acts: map[ActKey]uint64{}, Outcomes: map[OutcomeKey]uint64{}},
		waits: map[rescue.Subject]rescue.Reason{}, refused: map[rescue.Subject]rescue.Reason{},
		logged: map[rescue.Subject]string{},
	}
}

// attrs are the fields of a log line about a subject, with more behind them.
func attrs(s rescue.Subject, more ...any) []any {
	all := []any{"cluster", s.Cluster, "node", s.Node}
	for _, field := range [][2]string{{"id", string(s.GPU)}, {"cause", s.Cause}, {"work", s.Name}, {"work_id", s.Work}} {
		if field[1] != "" {
			all = append(all, field[0], field[1])
		}
	}
	return append(all, more...)
}

// decided is for a decision that holds: its ledger is written, or nothing of it has to be.
func (e *events) decided(r rescue.Result) {
	e.stopping(r.State.Ledger.Stop)
	e.ended(r.Ended)
	for i := range r.Acts {
		e.acting(&r.Acts[i])
	}
	e.waiting(r)
	e.refusing(r.Refusals)
}

// stopping logs that all acts are stopped, and that they are not any more.
func (e *events) stopping(stop *rescue.Stop) {
	was := e.stop
	e.stop = stop
	switch {
	case stop != nil && (was == nil || *was != *stop):
		e.log.Warn("all acts are stopped", "by", stop.By, "text", stop.Text, "since", stop.At)
	case stop == nil && was != nil:
		e.log.Warn("acts are allowed again", "stopped_by", was.By)
	}
}

// acting logs an act. One that is repeated after an answer is not told again.
func (e *events) acting(a *rescue.Act) {
	switch {
	case a.Listed:
		e.counts.Acts[ActKey{a.Cluster, "listed"}]++
		e.log.Info("work would be stopped in mode act", attrs(a.Subject, "victims", a.Victims)...)
	case e.logged[about(a.Subject)] == "":
		e.log.Info("work is stopped, to run elsewhere", attrs(a.Subject, "try", a.Try, "victims", a.Victims)...)
	}
}

// waiting logs what has begun to wait, or waits for another reason, and what does not any more. Of a cluster that can't be read nothing is known.
func (e *events) waiting(r rescue.Result) {
	before := maps.Clone(e.waits)
	for i := range r.Acts {
		delete(before, about(r.Acts[i].Subject)) // it waits for its answer
	}
	for i := range r.Waits {
		w := &r.Waits[i]
		key := about(w.Subject)
		delete(before, key)
		if w.Reason != rescue.ReasonSent && w.Reason != e.waits[key] {
			e.waits[key] = w.Reason
			e.wait(w)
		}
	}
	for _, key := range inOrder(before) {
		if e.waits[rescue.Subject{Cluster: key.Cluster}] != rescue.ReasonUnread || key.Node == "" {
			e.log.Info("rescue does not wait any more", attrs(key, "reason", string(before[key]))...)
			delete(e.waits, key)
		}
	}
}

// wait logs what begins to wait.
func (e *events) wait(w *rescue.Wait) {
	level := slog.LevelInfo
	if w.Alert {
		level = slog.LevelWarn
	}
	more := []any{"reason", string(w.Reason), "text", w.Text}
	if !w.Until.IsZero() {
		more = append(more, "until", w.Until)
	}
	e.log.Log(context.Background(), level, "rescue waits", attrs(w.Subject, more...)...)
}

// refusing logs what is refused, once for as long as it is.
func (e *events) refusing(all []rescue.Refusal) {
	before := e.refused
	e.refused = make(map[rescue.Subject]rescue.Reason, len(all))
	for i := range all {
		r := &all[i]
		key := about(r.Subject)
		e.refused[key] = r.Reason
		if before[key] != r.Reason {
			e.log.Info("rescue is refused", attrs(r.Subject, "reason", string(r.Reason), "text", r.Text)...)
		}
	}
	for key, reason := range before {
		if e.waits[rescue.Subject{Cluster: key.Cluster}] == rescue.ReasonUnread {
			e.refused[key] = reason
		}
	}
}

// about is a subject as something that lasts: its causes may alternate.
func about(s rescue.Subject) rescue.Subject {
	s.Cause = ""
	return s
}

func inOrder(all map[rescue.Subject]rescue.Reason) []rescue.Subject {
	return slices.SortedFunc(maps.Keys(all), func(a, b rescue.Subject) int {
		return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Node, b.Node), cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Work, b.Work))
	})
}

// answered is for the answer to an act. One that is as before is not told again.
func (e *events) answered(a rescue.Act, given rescue.Answer) {
	level, key, text := slog.LevelInfo, about(a.Subject), given.Kind.String()+" "+given.Text
	switch given.Kind {
	case rescue.Failed, rescue.Denied:
		level = slog.LevelWarn
	case rescue.Accepted, rescue.NotFound, rescue.Blocked, rescue.NotMade:
	}
	if given.Kind != rescue.NotMade {
		e.counts.Acts[ActKey{a.Cluster, given.Kind.String()}]++
	}
	if e.logged[key] == text {
		return
	}
	e.logged[key] = text
	more := []any{"answer", given.Kind.String(), "try", a.Try, "text", given.Text}
	if given.Remedy != "" {
		more = append(more, "remedy", given.Remedy)
	}
	message := "the orchestrator has answered"
	if given.Kind == rescue.NotMade {
		message = "call is not made"
	}
	e.log.Log(context.Background(), level, message, attrs(a.Subject, more...)...)
}

// ended is for moves that have ended.
func (e *events) ended(all []rescue.EndedMove) {
	for i := range all {
		one := &all[i]
		m := &one.Move
		delete(e.waits, about(one.Subject))
		delete(e.logged, about(one.Subject))
		e.counts.Outcomes[OutcomeKey{one.Cluster, m.Outcome}]++
		e.log.Info("move has ended", attrs(one.Subject, "outcome", m.Outcome.String(), "tries", m.Tries)...)
		if m.Outcome == rescue.Moved {
			next := Replaced{Cluster: one.Cluster, At: m.Ended, Fault: m.Ended.Sub(one.Began), Call: m.Ended.Sub(m.Accepted)}
			kept := e.counts.Replaced[max(0, len(e.counts.Replaced)+1-keptReplaced):]
			e.counts.Replaced = append(slices.Clone(kept), next) // views have the one before
		}
	}
}

// marked is for a node that was to be marked.
func (e *events) marked(m rescue.Mark, err error) {
	about := []any{"cluster", m.Cluster, "node", m.Node, "repair", m.Repair.String(), "eligibility", m.Eligible.String()}
	key, was := rescue.Subject{Cluster: m.Cluster, Node: m.Node}, ""
	was, e.logged[key] = e.logged[key], fmt.Sprint(err)
	switch {
	case err != nil && was == err.Error():
	case err != nil:
		e.log.Warn("mark of a node could not be changed, and is tried again", append(about, "error", err)...)
	case m.Repair == health.NoRepair:
		e.log.Info("mark of a node is removed", about...)
	default:
		e.log.Info("node is marked for repair", about...)
	}
}

// copied are the counts as they are now.
func (e *events) copied() Counts {
	all := e.counts
	all.Acts, all.Outcomes = maps.Clone(all.Acts), maps.Clone(all.Outcomes)
	return all
}
