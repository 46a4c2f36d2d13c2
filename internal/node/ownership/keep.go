package ownership

import (
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// kept is a recorded device that this agent does not offer any more.
type kept struct {
	at    gpu.Placement
	waits Wait // for which it stays
	long  bool // it has for a while
}

// givenAtMost is how long it takes to give out a device that was offered when that began.
const givenAtMost = 5 * time.Second

// givenOut is what a GPU that has just left waits for.
var givenOut = Wait{Text: "what was being given out when it left"}

// keeping returns what is to be recorded, with what this agent does not offer any more and work may still have: the policy leaves the GPU out, or it has left for another agent and
// was perhaps given out between the look at the record after which it left and the inventory without it.
//
//	policy changes, GPU 1 leaves . the pod on it goes on, GPU 1 stays recorded . the pod ends . a record of after that has none: free
//
// A device stays recorded while the record of holders is not known: until a reboot, or until an operator removes the file. Where it never is, by the settings of
// the agent, this process knows what it has given out itself. A GPU whose owner has changed left by its record, or by force, and
// after the settle time, so for that only work counts that is known.
func (s *store) keeping(mine agentFile, o localDevices) (localDevices, []kept) {
	a := s.decider
	now, records, was := a.now(), a.readers.Read(), s.left // each record is read when it is asked
	s.left = map[gpu.Placement]time.Duration{}
	var all []kept
	for _, c := range mine.devices {
		if slices.Contains(o.at, c.at) || o.unsure(c.at) {
			continue
		}
		if !o.allocatable.Exists(c.at) && len(records.holdersAt(c.at)) == 0 {
			continue
		}
		left, known := was[c.at]
		if !known {
			left = now
		}
		s.left[c.at] = left
		w := records.Wait(c.at.GPU, a.clock, now, a.lastReserved)
		if w.Never && !w.Held && s.neverGiven(c.at.GPU) {
			w = Wait{}
		}
		if one, assigned := o.allocatable.Owner(c.at.GPU); assigned && !one.Local {
			if !w.Held {
				continue
			}
		} else if w.Text == "" && now-left < givenAtMost {
			w = givenOut
		}
		if w.Text != "" {
			all = append(all, kept{c.at, w, now-left >= DefaultSettle})
		}
	}
	unsure := o.unsure
	o.unsure = func(p gpu.Placement) bool {
		return unsure(p) || slices.ContainsFunc(all, func(k kept) bool { return k.at == p })
	}
	return o, all
}

// neverGiven reports whether nothing has got a GPU from this agent since it recorded it, as this process was the first to do that.
func (s *store) neverGiven(id gpu.DeviceID) bool {
	_, given := s.decider.lastReserved(id)
	return !given && !s.previous[id] && !s.lost
}

// untilNext is the time until the records must be read again, of devices that stay recorded; 0 = no time.
func (w *Watcher) untilNext(all []kept) (next time.Duration) {
	for _, k := range all {
		if !k.waits.Held && !k.waits.Never {
			return movePause // there may be an answer in a moment
		}
		next = w.timings.others
	}
	return next
}

// setKept keeps the devices that stay recorded, where another agent waits for them, and logs each once.
func (w *Watcher) setKept(all []kept) {
	w.mu.Lock()
	defer w.mu.Unlock()
	logKept(w.log, w.kept, all)
	w.kept = all
}

func logKept(log *slog.Logger, was, is []kept) {
	for _, k := range is {
		if !slices.ContainsFunc(was, func(l kept) bool { return l.at == k.at && l.waits.Held == k.waits.Held }) {
			log.Info("device is not offered any more and stays recorded", "device", k.at.String(), "waits_for", k.waits.Text)
		}
	}
	for _, k := range was {
		if !slices.ContainsFunc(is, func(l kept) bool { return l.at == k.at }) {
			log.Info("device is not recorded any more", "device", k.at.String())
		}
	}
}

// problem is for an operator, if a device stays recorded for long because of what is not known.
func (k kept) problem(file string) (problem.Problem, bool) {
	return problem.Problem{
		Code: problem.DeviceKept, Object: k.at.String(),
		Text: fmt.Sprintf("%s is not offered any more and stays recorded, so that no other agent offers it: waits for %s; if no work has it, delete %s, which this agent writes again without it",
			k.at, k.waits.Text, file),
	}, !k.waits.Held && k.long
}
