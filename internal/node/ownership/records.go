package ownership

import (
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// localAPI returns which API of this agent has, or had, a GPU; false while that can't be known.
func (n *next) localAPI(id gpu.DeviceID) (inventory.API, bool) {
	if a := n.file.LocalAPIs[n.Agent][id]; a != "" {
		return a, true
	}
	if len(n.APIs) < 2 {
		return n.Default, true
	}
	for _, a := range n.APIs {
		if record := n.Records[a]; record != nil && len(record().On(id)) > 0 {
			return a, true
		}
	}
	if n.OfferedBefore(id) { // and did not record the API: it had one
		return inventory.DevicePlugin, true
	}
	if record := n.Records[inventory.DevicePlugin]; n.Default != inventory.DevicePlugin && record != nil {
		h := record()
		return n.Default, h.Complete || h.First || n.Now-n.is.started >= initialWait
	}
	return n.Default, true
}

// Clock is the time from which the times of decisions count.
type Clock struct{ Began time.Time }

// readAt returns when a record was read, at the latest now. It is the same each time for the same record: one that was read a second time
// is not older.
func (c Clock) readAt(r holders.Record, now time.Duration) time.Duration {
	if r.At.IsZero() {
		return now
	}
	return min(r.At.Sub(c.Began), now)
}

// seen are the holders of a record, and the time of the latest one that had some of them.
type seen struct {
	holders []holders.Holder
	at      time.Duration
}

// remembering returns a record with the holders that were seen in it: one that was remains until a complete record of a later time lacks
// it. So a record that fails does not forget work, and force disregards only what was never known.
func (n *next) remembering(api inventory.API, read func() holders.Record) func() holders.Record {
	return sync.OnceValue(func() holders.Record {
		r := read()
		if r.MayHaveEnded {
			return r
		}
		is := seen{r.Holders, n.readAt(r, n.Now)}
		if was := n.was.seen[api]; len(was.holders) > 0 && (!r.Complete || is.at < was.at) {
			if is.at = max(is.at, was.at); len(r.Holders) == 0 {
				is.at = was.at
			}
			r.Complete = false // an older one is not
			r = r.Since(was.holders)
			is.holders = r.Holders
		}
		n.is.seen[api] = is
		return r
	})
}
