package hostwatch

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// watchDaemons asks the MPS control daemons, as long as there is one to ask.
func (w *Watcher) watchDaemons(ctx context.Context, m Machine) {
	said := map[string]string{}
	w.turn(ctx, m, "MPS daemons", func() (again bool) {
		pools := w.daemons.of(m.Current())
		var answering []string
		for _, pool := range pools {
			text := "MPS control daemon answers"
			err := w.daemons.ask(pool)
			if err == nil {
				answering = append(answering, pool)
			} else {
				text = "MPS control daemon does not answer: " + oneLine(err)
			}
			if said[pool] != text {
				said[pool] = text
				w.log.Info(text, "pool", pool, "folder", MPSPipe(w.daemons.root, pool))
			}
		}
		w.tell(m, func(h *core.Host) { h.MPS = answering })
		return len(pools) > 0
	})
}

// watchClaims claims what is offered and reads what others claim.
func (w *Watcher) watchClaims(ctx context.Context, m Machine) {
	defer w.register.close()
	var patience patience
	w.tell(m, func(h *core.Host) { h.SharesNumbers = true }) // until it is known better
	w.turn(ctx, m, "claims", func() (again bool) {
		v, err := w.round(ctx, m)
		if ctx.Err() != nil {
			return false
		}
		twin := errors.Is(err, errTwin)
		if lasting := patience.with("", twin); !twin || lasting {
			w.troubled(err)
		}
		if _, part := errors.AsType[unwritten](err); err == nil || part || twin {
			w.missing(patience.lasting(v.others))
			w.tell(m, func(h *core.Host) { h.Claims, h.Numbering, h.SharesNumbers = v.claims, v.numbering, err == nil })
		} else { // nothing was seen: what was told before stands, and new devices wait for their numbers if that is over soon
			lasting := patience.with("the register", true)
			w.tell(m, func(h *core.Host) {
				h.SharesNumbers = (full(err) || errors.Is(err, context.DeadlineExceeded)) && !lasting
			})
			return true
		}
		patience.with("the register", false)
		return true
	})
}

// round is one of the register. It is tried again for a while if the process, or the host, has too many files open: an agent that
// has just started would go by a history that is older than the register.
func (w *Watcher) round(ctx context.Context, m Machine) (view, error) {
	for began := time.Now(); ; {
		v, err := w.register.round(ctx, offerOf(m.Current()))
		if !full(err) || ctx.Err() != nil || time.Since(began) > lockAtMost/2 {
			return v, err
		}
		select {
		case <-time.After(fullPause):
		case <-ctx.Done():
		}
	}
}

// full reports whether an error is that this process, or the host, has too many files open.
func full(err error) bool { return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) }

// fullPause is the pause between two tries while a table of open files is full.
const fullPause = 50 * time.Millisecond

// patience is since when something has been so that is not worth a word while agents are restarted, by agent.
type patience struct{ since map[string]time.Time }

// with reports whether it has been so for long.
func (p *patience) with(agent string, so bool) bool {
	if !so {
		delete(p.since, agent)
		return false
	}
	if p.since == nil {
		p.since = map[string]time.Time{}
	}
	if _, known := p.since[agent]; !known {
		p.since[agent] = time.Now()
	}
	return time.Since(p.since[agent]) > restartAtMost
}

// lasting are those of the others that are in our way and have not been running for long.
func (p *patience) lasting(others []other) (gone []other) {
	for _, o := range others {
		if p.with(o.agent, !o.lives && o.devices > 0) {
			gone = append(gone, o)
		}
	}
	return gone
}

// turn looks at once, then whenever another inventory is published, and every second as long as look wants that,
// until ctx ends.
func (w *Watcher) turn(ctx context.Context, m Machine, name string, look func() (again bool)) {
	loop := m.Watchdog().Register(name)
	defer loop.Done()
	var following sync.WaitGroup
	defer following.Wait()
	changed := make(chan struct{}, 1)
	following.Go(func() {
		for range m.Watch(ctx) {
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	})
	tick := time.NewTicker(every)
	defer tick.Stop()
	loop.Heartbeat(lockAtMost)
	again := look()
	w.looked.Done()
	for {
		due, within := tick.C, every
		if !again {
			due, within = nil, 0
		}
		loop.Heartbeat(within)
		select {
		case <-due:
		case <-changed:
		case <-ctx.Done():
			return
		}
		loop.Heartbeat(lockAtMost)
		again = look()
	}
}
