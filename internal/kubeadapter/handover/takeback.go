package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Record is a file with the types of the conditions that the Node has from this agent. So a condition that no setting names any more is removed,
// and a repair system never finds a fault that no agent clears.
// Its methods are safe for concurrent use.
type Record struct {
	Path string

	mu sync.Mutex
}

type recorded struct {
	Conditions []string `json:"conditions"`
}

// types returns the recorded types; none if there is no file.
func (r *Record) types() ([]string, error) {
	if r == nil {
		return nil, nil
	}
	text, err := os.ReadFile(r.Path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var is recorded
	if err := json.Unmarshal(text, &is); err != nil {
		return nil, fmt.Errorf("%s: %w", r.Path, err)
	}
	return is.Conditions, nil
}

// add records types, if they are not. A record that can't be read is replaced.
func (r *Record) add(types ...string) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	had, err := r.types()
	all := slices.Sorted(slices.Values(append(slices.Clone(had), types...)))
	if all = slices.Compact(all); err == nil && len(all) == len(had) {
		return nil
	}
	return r.set(all)
}

// drop removes types from the record.
func (r *Record) drop(types []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	had, err := r.types()
	if err != nil {
		return err
	}
	return r.set(slices.DeleteFunc(had, func(name string) bool { return slices.Contains(types, name) }))
}

// set writes the record. Without types there is none.
func (r *Record) set(types []string) error {
	if len(types) == 0 {
		if err := os.Remove(r.Path); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	text, err := json.Marshal(recorded{types})
	if err != nil {
		return err
	}
	return statefile.Write(r.Path, append(text, '\n'))
}

// removeAgain is the time to the second removal: an agent of the earlier settings may still run beside this one, during an upgrade.
const removeAgain = 2 * faultreport.Renewed

// TakeBack removes what earlier settings have written to the Node and these do not: conditions, and without hand-over the annotation.
type TakeBack struct {
	API    API
	Node   string
	Record *Record
	Keep   []string // types of the conditions of these settings; none = the hand-over is off

	problems problemset.Set
}

// Stale returns the types that are to be removed.
func (t *TakeBack) Stale() []string {
	types, _ := t.Record.types() // nothing is known of the Node without the record
	return slices.DeleteFunc(types, func(name string) bool { return slices.Contains(t.Keep, name) })
}

// Problems has why something can't be removed.
func (t *TakeBack) Problems() []problem.Problem { return t.problems.List() }

// Run removes what is stale, and again after a while. It returns when that is done or ctx ends; without the second removal the next run begins anew.
func (t *TakeBack) Run(ctx context.Context, log *slog.Logger) {
	t.problems.Log = log
	stale := t.Stale()
	if len(stale) == 0 || !t.removed(ctx, stale) {
		return
	}
	log.Info("conditions of the Node removed, which the settings do not have any more", "node", t.Node, "conditions", stale)
	if !watch.Sleep(ctx, removeAgain) || !t.removed(ctx, stale) {
		return
	}
	if err := t.Record.drop(stale); err != nil {
		log.Warn("the record of conditions can't be written: they are removed again at the next start", "error", err)
	}
}

// removed tries to remove conditions until it succeeds (true) or ctx ends.
func (t *TakeBack) removed(ctx context.Context, stale []string) bool {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = retryFirst, retryMost
	for {
		err := t.remove(ctx, stale)
		if err == nil {
			t.problems.End(problem.HandOver, "removal", "")
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		p := problem.Problem{
			Code: problem.HandOver, Object: "removal",
			Text:   "the Node has conditions of earlier settings, which no agent changes any more: " + strings.Join(stale, ", ") + ": " + err.Error(),
			Remedy: "give the agent the rights of " + component + " until they are removed, or remove them by kubectl",
		}
		t.problems.Put(p, slog.LevelWarn, p.String())
		if !watch.Sleep(ctx, kubeapi.WaitAtLeast(err, retry.NextBackOff())) {
			return false
		}
	}
}

// remove removes conditions, and without hand-over the annotation.
func (t *TakeBack) remove(ctx context.Context, stale []string) error {
	var p kubeapi.NodePatch
	for _, name := range stale {
		p.Status.Conditions = append(p.Status.Conditions, kubeapi.NodeCondition{Type: name, Patch: kubeapi.DeleteCondition})
	}
	if len(t.Keep) == 0 {
		p.Metadata.Annotations = map[string]*string{faultreport.Annotation: nil}
	}
	if err := t.API.PatchNodeStatus(ctx, t.Node, p, kubeapi.Store); !errors.Is(err, kubeapi.ErrNotFound) {
		return err
	}
	return nil
}
