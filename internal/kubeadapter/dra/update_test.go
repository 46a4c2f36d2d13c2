package dra

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// During an update with maxSurge two processes have the same records. A claim that the other one unprepares is free here for the next Prepare,
// also if the kubelet has just started, or listed the claim a moment ago; its record is not written again, which nothing would remove.
func TestClaimUnpreparedByAnotherProcess(t *testing.T) {
	listed := []PodClaim{podClaim("a", deviceName(coretest.GPU(0)))}
	for name, c := range map[string]struct {
		partial bool
		pods    []PodClaim
	}{
		"the kubelet has just started":       {partial: true},
		"the kubelet listed it a moment ago": {pods: listed},
		"both":                               {partial: true, pods: listed},
	} {
		t.Run(name, func(t *testing.T) {
			p := &pods{}
			p.partial(c.partial)
			r := admitting(t, p)
			r.api.put(newClaim("a", result(coretest.GPU(0))))
			r.api.put(newClaim("b", result(coretest.GPU(0))))
			r.mustPrepare("a")
			p.set(nil, c.pods...)
			other, err := prepared.Open(r.adapter.claimsDir(), boot, nil)
			r.must(err)
			path := other.Path(uidOf("a"))
			r.must(other.Remove(uidOf("a")))
			r.mustPrepare("b")
			r.awaitQueries(p, 3)
			r.wantFile(path, false) // not written again
			r.must(r.unprepare("b"))
			r.mustPrepare("a")
			r.wantRecord("a", prepared.Complete)
			r.must(other.Remove(uidOf("a"))) // and prepared again before this process has noticed
			r.mustPrepare("a")
			r.wantRecord("a", prepared.Complete)
			if all := r.adapter.Prepared(); len(all) != 1 || all[0].Name != "a" || r.adapter.Cordoned() != "" {
				t.Errorf("%v, %q", all, r.adapter.Cordoned())
			}
		})
	}
}

// The kubelet's list may have a claim that was prepared and unprepared by the other process since this one has read the records.
func TestClaimOfAnotherProcessIsNotLost(t *testing.T) {
	p := &pods{}
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.api.put(newClaim("b", result(coretest.GPU(0))))
	r.mustPrepare("a")
	r.must(r.unprepare("a"))
	p.set(nil, podClaim("a", deviceName(coretest.GPU(0))))
	r.change = append(r.change, func(a *Adapter) { a.opts.PodClaims = p.list })
	r.start() // another process
	r.awaitQueries(p, 3)
	r.mustPrepare("b")
}

// A claim may end, and be deallocated or deleted, while the kubelet's answer that has it is on its way. It keeps no device from new work, not for
// a moment: a kubelet tries a Prepare that was refused again after a minute.
func TestClaimThatEndsDuringAQuery(t *testing.T) {
	for name, after := range map[string]func(*api, kubeapi.ResourceClaim){
		"deallocated": func(s *api, c kubeapi.ResourceClaim) { c.Status.Allocation = nil; s.put(c) },
		"deleted":     func(s *api, c kubeapi.ResourceClaim) { s.remove(c) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
			c := newClaim("a", result(coretest.GPU(0)))
			r.api.put(c)
			r.mustPrepare("a")
			p, text := &pods{}, &logbuffer.Buffer{}
			p.set(nil, podClaim("a", deviceName(coretest.GPU(0))))
			var once sync.Once
			r.change = append(r.change, func(a *Adapter) {
				a.opts.Log = slog.New(slog.NewTextHandler(text, nil))
				a.opts.PodClaims = func(ctx context.Context) (PodClaims, error) {
					answer, err := p.list(ctx)
					once.Do(func() {
						store := a.store.Load()
						r.must(errors.Join(err, a.remove(uidOf("a"), store)))
						after(r.api, c)
						p.set(nil)
					})
					return answer, err
				}
			})
			r.start()
			r.awaitQueries(p, 3)
			if got := text.String(); strings.Contains(got, "no device takes new work") || r.adapter.Cordoned() != "" {
				t.Errorf("%s\n%q", got, r.adapter.Cordoned())
			}
		})
	}
}

// During an update both processes may prepare claims of one device at the same time, each of which has not read the record of the other. One of the
// claims at most is prepared: who stores its record last sees the other one.
func TestClaimThatAnotherProcessPreparesMeanwhile(t *testing.T) {
	var r *rig
	var once sync.Once
	r = newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()), func(a *Adapter) {
		a.opts.Check = func([]inventory.Unit) ([]inventory.Finding, error) { // when the device was found free
			once.Do(func() {
				other, err := prepared.Open(a.claimsDir(), boot, nil)
				r.must(err)
				r.must(other.Put(prepared.Claim{BootID: boot, Namespace: "default", Name: "b", UID: uidOf("b"), State: prepared.Complete, Results: []prepared.Result{{
					Device: deviceName(coretest.GPU(0)), Unit: inventory.UnitID(coretest.GPU(0)), At: gpu.WholeGPU(coretest.GPU(0)), Exclusive: true,
				}}}))
			})
			return nil, nil
		}
	})
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	for range 2 { // the kubelet tries again
		r.mustRefuse("a", "held by other work")
		r.wantRecord("a", "")
	}
	r.must(r.unprepare("b"))
	r.mustPrepare("a")
}
