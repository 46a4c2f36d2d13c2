package resetter

import (
	"context"
	"time"
)

// Times of readiness.
const (
	readyEvery  = time.Minute
	readyAtMost = 10 * time.Second // for one look: it can ask a component over a socket
)

// readiness is what gpureset.Resetter.Ready returned last. Resetter.mu guards it.
type readiness struct {
	known  bool
	err    error
	at     time.Time          // of the end of the latest look
	cancel context.CancelFunc // of the look that runs; nil = none does
}

func (r *readiness) stop() {
	if r.cancel != nil {
		r.cancel()
	}
}

// checkReady has a goroutine look whether GPUs can be reset, once a minute. mu is locked.
func (r *Resetter) checkReady(ctx context.Context) {
	if r.ending || r.ready.cancel != nil || r.ready.known && time.Since(r.ready.at) < readyEvery {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readyAtMost)
	r.ready.cancel = cancel
	r.work.Go(func() {
		defer cancel()
		err := r.opts.Resetter.Ready(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		changed := !r.ready.known || text(err) != text(r.ready.err)
		r.ready = readiness{known: true, err: err, at: time.Now()}
		if changed {
			r.wake()
		}
	})
}

// both is why no GPU can be reset, by the settings and by what resets them.
func both(cannot string, unready error) string {
	if cannot != "" && unready != nil {
		cannot += "; "
	}
	return cannot + text(unready)
}

// text is that of an error; "" for none.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
