package dra

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// unreadRig is a rig with prepared claims "a" of GPU 0 and "b" of GPU 1, whose agent has been started again since the record of "a" can't be
// read. GPU 2 is free. With p nil the kubelet can't be asked.
func unreadRig(t *testing.T, p *pods) (r *rig, record string) {
	t.Helper()
	r = newRig(t, build(coretest.GPUs(3), health.Ledger{}, config()))
	for i, name := range []string{"a", "b", "c"} {
		r.api.put(newClaim(name, result(coretest.GPU(i))))
	}
	for _, name := range []string{"a", "b"} {
		r.mustPrepare(name)
	}
	record = r.adapter.store.Load().Path(uidOf("a"))
	r.stop()
	r.must(os.WriteFile(record, []byte(`{"uid":"uid-a","results":[{"dev`), 0o600))
	if p != nil {
		r.change = append(r.change, asking(p))
	} else {
		r.change = append(r.change, func(a *Adapter) { a.limits.queryLast = 5 * time.Millisecond })
	}
	r.start()
	r.await("records", r.adapter.isLoaded)
	return r, record
}

// holder returns what another API is told of hardware: the claim that has it, or may have it.
func (r *rig) holder(at gpu.Placement) (string, bool) {
	record := r.adapter.Record()
	for h := range holders.NewSet(record.Holders).On(at) {
		return h.Work.String(), true
	}
	return record.Missing, !record.Complete
}

func isFree(s holders.Set, at gpu.Placement) bool {
	for range s.On(at) {
		return false
	}
	return true
}

// wantHolder checks what another API is told of a GPU: "free", or the beginning of the holder.
func (r *rig) wantHolder(n int, want string) {
	r.Helper()
	holder, held := r.holder(gpu.WholeGPU(coretest.GPU(n)))
	if !held {
		holder = "free"
	}
	if !strings.HasPrefix(holder, want) {
		r.Errorf("GPU %d: %q, want %q", n, holder, want)
	}
}

// One record that can't be read stops no other claim, neither Prepare nor Unprepare. As long as it is not known what it holds, other APIs give no
// GPU out that may be its. It is named, with the remedy, and counts again when it can be read.
func TestRecordThatCanNotBeReadConcernsItsClaim(t *testing.T) {
	r, record := unreadRig(t, nil)
	for i, want := range []string{"claim ?/? (" + record + " can't be read as a prepared claim", "claim default/b", "claim ?/?"} {
		r.wantHolder(i, want)
	}
	r.wantProblems(record, "remove it if no pod has the claim")
	if all := r.adapter.Unread(); len(all) != 1 || all[0].UID != uidOf("a") {
		t.Errorf("%v", all)
	}
	r.mustPrepare("c")
	r.must(r.unprepare("b"))
	r.must(r.unprepare("c"))
	r.wantHolder(1, "claim ?/?")

	r.must(os.Remove(record)) // by an operator
	r.await("a free GPU", func() bool { _, held := r.holder(gpu.WholeGPU(coretest.GPU(0))); return !held })
	r.wantProblems()
}

// The kubelet asks for a claim whose record can't be read as for any other: Prepare makes the record again from the API server, Unprepare removes
// it.
func TestCallsForTheClaimOfARecordThatCanNotBeRead(t *testing.T) {
	for name, call := range map[string]func(*rig) error{
		"Prepare":   func(r *rig) error { _, err := r.prepareOne("a"); return err },
		"Unprepare": func(r *rig) error { return r.unprepare("a") },
	} {
		t.Run(name, func(t *testing.T) {
			r, record := unreadRig(t, nil)
			r.must(call(r))
			r.wantHolder(2, "free")
			if name == "Prepare" {
				r.wantHolder(0, "claim default/a")
				r.start()
				r.await("records", r.adapter.isLoaded)
				r.wantHolder(0, "claim default/a")
				r.must(r.unprepare("a"))
			}
			r.wantHolder(0, "free")
			r.wantFile(record, false)
		})
	}
}

// The kubelet's list of pods shows what a record that can't be read has: the record is made again, from the API server, if a pod has the claim. If
// none has, it holds nothing, and is set aside. A list that may lack pods shows nothing: devices are kept back for two minutes at most.
func TestPodsShowWhatARecordThatCanNotBeReadHas(t *testing.T) {
	a, b := podClaim("a", deviceName(coretest.GPU(0))), podClaim("b", deviceName(coretest.GPU(1)))
	t.Run("a pod has the claim", func(t *testing.T) {
		p := &pods{}
		p.set(nil, a, b)
		r, _ := unreadRig(t, p)
		r.await("the record again", func() bool { return len(r.adapter.Prepared()) == 2 })
		r.wantHolder(0, "claim default/a")
		r.wantHolder(2, "free")
	})
	t.Run("the API server is away", func(t *testing.T) {
		p := &pods{err: errors.New("connection refused")}
		r, record := unreadRig(t, p)
		r.api.fail(kubeapi.ErrUnavailable)
		p.set(nil, a, b)
		r.await("a problem", func() bool {
			return strings.Contains(strings.Join(problem.Lines(r.adapter.Problems()), ""), "the record of claim default/a")
		})
		r.wantProblems("the record of claim default/a", record)
		r.must(r.unprepare("b"))
		r.wantHolder(2, "claim ?/?")
		p.set(nil, a)
		r.api.fail(nil)
		r.await("the record again", func() bool { return len(r.adapter.Prepared()) == 1 && r.adapter.Cordoned() == "" })
		r.wantHolder(0, "claim default/a")
		r.wantHolder(2, "free")
	})
	t.Run("no pod has it", func(t *testing.T) {
		p := &pods{}
		p.set(nil, b)
		r, record := unreadRig(t, p)
		r.awaitQueries(p, 3)
		if r.wantHolder(0, "claim ?/?"); len(r.adapter.Desired().Load()) != 3 {
			t.Errorf("devices are not offered through DRA: %q", problem.Lines(r.adapter.Problems()))
		}
		r.src.Set(offeredThrough(inventory.DevicePlugin, 0))
		r.wantHolder(0, "free")
		r.wantHolder(2, "claim ?/?")
		if gpus := r.adapter.mayHaveClaims(); len(gpus) != 2 {
			t.Errorf("%v may have claims", gpus)
		}
		r.change = append(r.change, func(a *Adapter) { a.limits.abandoned = 10 * time.Millisecond })
		r.src.Set(build(coretest.GPUs(3), health.Ledger{}, config()))
		r.start()
		r.await("a free GPU", func() bool { _, held := r.holder(gpu.WholeGPU(coretest.GPU(0))); return !held })
		r.wantFile(record+".broken", true)
		r.wantProblems("no pod has the claim, and the file was renamed to " + filepath.Base(record) + ".broken")
		r.mustPrepare("c")
	})
	t.Run("the list may lack pods", func(t *testing.T) {
		p := &pods{}
		p.partial(true)
		r, record := unreadRig(t, p)
		r.awaitQueries(p, 3)
		r.wantHolder(2, "claim ?/?")
		if r.wantProblems("devices are kept back"); r.adapter.Desired().Load() != nil {
			t.Error("devices are offered")
		}
		v := r.adapter.admission.Load()
		if text := v.text(); !strings.Contains(text, record) || !strings.Contains(text, "the kubelet may not have listed all pods yet") {
			t.Errorf("the reason is %q", text)
		}
		if text := v.textFor("default"); strings.Contains(text, uidOf("a")) || !strings.Contains(text, "a record in "+filepath.Dir(record)+" can't be read") {
			t.Errorf("the event is %q", text)
		}
		r.must(r.unprepare("b"))
		p.partial(false)
		r.await("devices", func() bool { return len(r.adapter.Desired().Load()) == 3 })
		r.wantHolder(2, "claim ?/?")
		r.wantFile(record, true) // not set aside at once
	})
}

// offeredThrough returns the inventory of the rig with a GPU that is offered through an API, and the others through DRA.
func offeredThrough(api inventory.API, n int) *inventory.Allocatable {
	inv, owners := build(coretest.GPUs(3), health.Ledger{}, config()), inventory.Ownership{}
	for i := range 3 {
		one := inventory.GPUOwner{GPU: coretest.GPU(i), API: inventory.DRA, Local: true}
		if i == n {
			one.API = api
		}
		owners.GPUs = append(owners.GPUs, one)
	}
	return inv.WithHost(inventory.Host{CDI: inv.CDI(), Ownership: owners}, inventory.OverlapRefuse)
}

// The CDI specification of a claim stays as long as its record can't be read: a container that runs may start again.
func TestSpecificationOfAClaimWhoseRecordCanNotBeRead(t *testing.T) {
	r, _, spec := mpsRig(t)
	record := r.adapter.store.Load().Path(uidOf("a"))
	r.stop()
	r.must(os.WriteFile(record, nil, 0o600))
	checked := make(chan struct{}, 8)
	r.change = append(r.change, func(a *Adapter) {
		a.opts.PodClaims = nil
		go func() { <-a.loaded; a.restoreSpecs(r.ctx, a.store.Load()); checked <- struct{}{} }()
	})
	r.start()
	<-checked
	r.wantFile(spec, true)
	r.must(r.unprepare("a"))
	r.wantFile(spec, false)
	if r.wantRecord("a", ""); len(prepared.ReadProblems(r.adapter.claimsDir(), boot)) > 0 {
		t.Error("the record is left")
	}
}
