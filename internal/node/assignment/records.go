package assignment

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// inner returns which API of this agent has, or had, a GPU; false while that can't be known.
func (n *next) inner(id gpu.DeviceID) (inventory.API, bool) {
	if a := n.file.Inner[n.Agent][id]; a != "" {
		return a, true
	}
	if len(n.APIs) < 2 {
		return n.Default, true
	}
	for _, a := range n.APIs {
		if record := n.Records[a]; record != nil {
			if h := record(id); len(h.By) > 0 || len(h.Before) > 0 {
				return a, true
			}
		}
	}
	if n.Past(id) { // and did not record the API: it had one
		return inventory.DevicePlugin, true
	}
	if record := n.Records[inventory.DevicePlugin]; n.Default != inventory.DevicePlugin && record != nil {
		h := record(id)
		return n.Default, h.Known || h.First || n.Now-n.is.started >= initialWait
	}
	return n.Default, true
}

// seen are the holders of a GPU, and the time of the latest record that had one of them.
type seen struct {
	by []string
	at time.Duration
}

type seenKey struct {
	api inventory.API
	gpu gpu.DeviceID
}

// remembering returns a record with the holders that were seen in it: one that was remains until a complete record of a later time lacks
// it. So a record that fails does not forget work, and force disregards only what was never known.
func (n *next) remembering(api inventory.API, record Record) Record {
	return func(id gpu.DeviceID) Holders {
		h, key := record(id), seenKey{api, id}
		is := seen{h.By, n.Now - h.Age}
		if was, ok := n.was.seen[key]; ok && (!h.Known || is.at < was.at) {
			if len(h.By) == 0 {
				is.at = was.at
			}
			is = seen{slices.Compact(slices.Sorted(slices.Values(slices.Concat(h.By, was.by)))), max(is.at, was.at)}
			h.Known, h.By = false, is.by
		}
		if delete(n.is.seen, key); len(is.by) > 0 {
			n.is.seen[key] = is
		}
		return h
	}
}
