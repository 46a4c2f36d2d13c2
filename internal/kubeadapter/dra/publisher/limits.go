package publisher

import (
	"slices"
	"time"
)

// bucket allows size actions at once and one more after each interval.
type bucket struct {
	size  int
	every time.Duration
	spent []time.Time // when each spent token comes back, oldest first
}

// take spends a token and returns 0, or how long it takes until there is one.
func (b *bucket) take(now time.Time) time.Duration {
	b.spent = slices.DeleteFunc(b.spent, func(t time.Time) bool { return !t.After(now) })
	if len(b.spent) >= b.size {
		return b.spent[0].Sub(now)
	}
	back := now
	if n := len(b.spent); n > 0 {
		back = b.spent[n-1]
	}
	b.spent = append(b.spent, back.Add(b.every))
	return 0
}

const (
	createsAtOnce = 100             // creates: a hundred starts of the kubelet in a row on a node with one slice, four on the largest
	createsAgain  = 5 * time.Second // in which all slices of a node can be created once more, of few slices one a second
)

// limitCreates sets the limit of creates for a number of slices: what another client deletes again and again is not created as often for ever.
func (b *bucket) limitCreates(slices int) {
	b.size = max(createsAtOnce, 4*slices)
	b.every = min(time.Second, createsAgain/time.Duration(max(1, slices)))
}

const (
	deleteRounds = 3                // deletes of another driver's slices, after which it is left alone
	deletePause  = 5 * time.Second  // between deletes: its slices come one after another
	deleteAgain  = 10 * time.Minute // after which slices of another driver are deleted once more
)

// otherDriver has the slices of the same driver and node that this publisher did not make: what NVIDIA's driver left behind, or one that runs.
type otherDriver struct {
	rounds    int // deletes, until there were none for a while
	latest    time.Time
	absent    time.Time // since when there are none
	err       error     // why the latest delete failed; nil = it did not, or nothing is left to delete
	notBefore time.Time // of the next delete
	retry     retries
}

// conflicts reports whether another driver publishes: its slices came back after each delete.
func (o otherDriver) conflicts() bool { return o.rounds >= deleteRounds && o.absent.IsZero() }

// limit removes the deletes of another driver's slices from a plan while that would only create them again, and returns when to try them again;
// 0 = nothing was removed. Beside a driver that creates its slices again and again only the own slices that exist are kept up to date.
func (o *otherDriver) limit(p plan, now time.Time) (plan, time.Duration) {
	if !slices.ContainsFunc(p.writes, func(w write) bool { return w.foreign }) {
		o.err = nil
		return p, 0
	}
	o.absent = time.Time{}
	pause := deletePause
	if o.rounds >= deleteRounds {
		pause = deleteAgain
	}
	wait := pause - now.Sub(o.latest)
	if o.rounds == 0 {
		wait = 0
	}
	if wait = max(wait, o.notBefore.Sub(now)); wait <= 0 {
		return p, 0
	}
	p.writes = slices.DeleteFunc(p.writes, func(w write) bool { return w.foreign || o.conflicts() && (w.verb != update || p.rewrite) })
	return p, wait
}

// deleted counts a delete of another driver's slice. Those of one round come at once.
func (o *otherDriver) deleted(now time.Time) {
	if o.rounds == 0 || now.Sub(o.latest) >= deletePause {
		o.rounds++
	}
	o.latest, o.notBefore, o.err = now, time.Time{}, nil
	o.retry.reset()
}

// failed records that a slice of another driver could not be deleted.
func (o *otherDriver) failed(err error, now time.Time) error {
	o.notBefore = now.Add(o.retry.next(err))
	o.err = partialError{err, o.notBefore}
	return o.err
}

// noWrites records that nothing is to be written while present slices of another driver exist.
func (o *otherDriver) noWrites(present int, now time.Time) {
	switch {
	case present > 0:
		o.absent = time.Time{}
	case o.absent.IsZero():
		o.absent = now
	case now.Sub(o.absent) >= deleteAgain:
		o.rounds = 0
	}
}
