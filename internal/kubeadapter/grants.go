package kubeadapter

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	savePause  = time.Second            // between two writes
	finishSave = 500 * time.Millisecond // for the last one, when the agent ends
)

// save is the goroutine that may wait for a disk: it loads what was handed out before, and from then on writes what
// changes until ctx ends, and a last time then.
func (t *tracker) save(ctx context.Context) {
	if t.store == nil {
		close(t.loaded)
		return
	}
	t.restore(t.store.Load())
	close(t.loaded)
	for {
		select {
		case <-t.dirty:
		case <-ctx.Done():
			select {
			case <-t.dirty:
				t.store.Save(t.record())
			default:
			}
			return
		}
		t.store.Save(t.record())
		pause(ctx, savePause)
	}
}

// restore takes up what an earlier agent handed out. What this one handed out meanwhile stays. The time since an ID left
// goes on; a clock that was set back does not make it longer than none.
func (t *tracker) restore(grants []Grant) {
	if len(grants) == 0 {
		return
	}
	now := time.Now()
	t.mu.Lock()
	next := *t.latest
	next.grants = map[unitKey]grant{}
	for _, g := range grants {
		if !strings.HasPrefix(g.Resource, vendor) || g.ID == "" {
			continue // not written by an agent
		}
		was := grant{numaNode: g.NUMANode}
		if !g.Gone.IsZero() {
			was.gone = now.Add(-max(now.Sub(g.Gone), 0))
		}
		next.grants[unitKey{g.Resource, g.ID}] = was
	}
	maps.Copy(next.grants, t.latest.grants)
	t.latest = &next
	for k := range next.grants {
		t.ours[k.resource] = true
	}
	t.mu.Unlock()
	t.bell.ring()
	t.ask()
}

// record is what the store keeps, in order.
func (t *tracker) record() []Grant {
	h := t.now()
	all := make([]Grant, 0, len(h.grants))
	for _, k := range slices.SortedFunc(maps.Keys(h.grants), compareKeys) {
		g := h.grants[k]
		all = append(all, Grant{Resource: k.resource, ID: k.id, NUMANode: g.numaNode, Gone: g.gone.UTC().Round(time.Second)})
	}
	return all
}

// finish ends the saver and waits for its last write, but not for a disk that hangs.
func finish(cancel func(), saved <-chan struct{}) {
	cancel()
	t := time.NewTimer(finishSave)
	defer t.Stop()
	select {
	case <-saved:
	case <-t.C:
	}
}
