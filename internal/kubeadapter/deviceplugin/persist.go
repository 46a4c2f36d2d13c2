package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// StoredAllocation is a device ID that was allocated to a pod, which may still hold it, as it is stored.
type StoredAllocation struct {
	Resource    string           `json:"resource"`
	ID          inventory.UnitID `json:"id"`
	NUMANode    int              `json:"numaNode"`             // -1 = no affinity
	At          gpu.Placement    `json:"at,omitzero"`          // of the device; zero = not known
	AllocatedAt time.Time        `json:"allocatedAt,omitzero"` // zero = the agent was not asked for it: another one was, or an earlier version
	WithdrawnAt time.Time        `json:"withdrawnAt,omitzero"` // since when the ID is not offered; zero = it was when this was written
}

// AllocationStore stores allocations across restarts of the agent. Load is called first, and both are called from one goroutine.
// They may block, and log their errors.
type AllocationStore interface {
	Load() []StoredAllocation
	Save([]StoredAllocation)
	Missing() bool // the file that Load or Save has seen was removed
}

const (
	saveInterval     = time.Second            // between two writes
	finalSaveTimeout = 500 * time.Millisecond // of the last write, when the agent ends
)

// persist loads the stored allocations, and then stores each change until ctx ends. It may block on a disk.
func (t *tracker) persist(ctx context.Context) {
	t.restore(t.store.Load())
	close(t.loaded)
	look := time.NewTicker(statefile.LookEvery)
	defer look.Stop()
	for {
		select {
		case <-t.unsaved:
		case <-look.C:
			if !t.store.Missing() {
				continue
			}
		case <-ctx.Done():
			select {
			case <-t.unsaved:
				t.store.Save(t.stored())
			default:
			}
			return
		}
		t.store.Save(t.stored())
		watch.Sleep(ctx, saveInterval)
	}
}

// restore adds what an earlier agent stored; an allocation of this agent takes precedence. If the clock was set back, an ID
// counts as withdrawn since now, not later.
func (t *tracker) restore(stored []StoredAllocation) {
	if len(stored) == 0 {
		return
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	next := *t.allocations
	next.byKey = map[deviceKey]allocation{}
	for _, s := range stored {
		if !strings.HasPrefix(s.Resource, inventory.ResourceDomain) || s.ID == "" {
			continue // not written by an agent
		}
		a := allocation{numaNode: s.NUMANode, at: s.At, stays: true, seenAt: now, heldSince: s.AllocatedAt}
		if !s.WithdrawnAt.IsZero() {
			a.withdrawnAt = now.Add(-max(now.Sub(s.WithdrawnAt), 0))
		}
		next.byKey[deviceKey{s.Resource, s.ID}] = a
		t.served[s.Resource] = true
	}
	maps.Copy(next.byKey, t.allocations.byKey)
	t.allocations = &next
	t.publish()
	t.pods.Request()
}

// stored returns what the store keeps, in order.
func (t *tracker) stored() []StoredAllocation {
	t.mu.Lock()
	byKey := maps.Clone(t.allocations.byKey)
	t.mu.Unlock()
	all := make([]StoredAllocation, 0, len(byKey))
	for _, k := range slices.SortedFunc(maps.Keys(byKey), compareKeys) {
		one := byKey[k]
		if !one.kept() {
			continue
		}
		all = append(all, StoredAllocation{
			Resource: k.resource, ID: k.id, NUMANode: one.numaNode, At: one.at,
			AllocatedAt: one.heldSince.UTC().Round(time.Second), WithdrawnAt: one.withdrawnAt.UTC().Round(time.Second),
		})
	}
	return all
}
