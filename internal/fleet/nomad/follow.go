package nomad

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
	"unique"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// jobVersions are what is known of a job.
type jobVersions struct {
	at       time.Time // when it was read; zero = it was not
	present  *api.Job
	siblings []*api.AllocationListStub
	text     string // why the job is not known: it is gone

	mu    sync.Mutex
	older map[uint64]*api.Job // by version
	specs map[specKey]*spec   // one for all allocations of a group
}

type specKey struct {
	version uint64
	group   string
}

// jobsAtOnce is how many jobs are read again for one list though none of their work has to be replaced. If there are more, as when GPUs of all nodes fail,
// each of them is read the more seldom.
const jobsAtOnce = 100

// readFollowed reads the jobs of the work that is followed, and the allocations of those that have to be replaced.
func (r *reader) readFollowed(ctx context.Context, now *reading) error {
	r.followAgain(now.allocs)
	if err := r.readJobs(ctx, r.followedJobs(now)); err != nil {
		return err
	}
	return each(ctx, keysInOrder(r.followed), func(ctx context.Context, id string) error { return r.readOne(ctx, r.followed[id]) })
}

// followedJobs are the jobs of the work that is followed, and whether some of it has to be replaced.
func (r *reader) followedJobs(now *reading) map[jobName]bool {
	t, jobs := &translation{reading: now, byID: map[string]*api.NodeListStub{}}, map[jobName]bool{}
	for _, f := range r.followed {
		job, phase := jobName{f.alloc.Namespace, f.alloc.JobID}, t.phase(f.alloc)
		jobs[job] = jobs[job] || phase == rescue.Ending || phase == rescue.Ended || f.gone
	}
	return jobs
}

// readJobs reads jobs: all of which work has to be replaced or that are new, and of the others those that were read longest ago.
func (r *reader) readJobs(ctx context.Context, jobs map[jobName]bool) error {
	before, known := r.jobs, []jobName{}
	r.jobs = map[jobName]*jobVersions{}
	byName := map[string]jobName{}
	read := func(job jobName) {
		r.jobs[job] = &jobVersions{older: map[uint64]*api.Job{}, specs: map[specKey]*spec{}}
		byName[job.namespace+"\x00"+job.id] = job
	}
	for job, ended := range jobs {
		if v := before[job]; v == nil || v.at.IsZero() || ended {
			read(job)
		} else {
			known = append(known, job)
		}
	}
	slices.SortFunc(known, func(a, b jobName) int { return before[a].at.Compare(before[b].at) })
	for i, job := range known {
		if i < jobsAtOnce {
			read(job)
		} else {
			r.jobs[job] = before[job]
			r.jobs[job].siblings = nil
		}
	}
	return each(ctx, keysInOrder(byName), func(ctx context.Context, name string) error {
		job := byName[name]
		return r.readJob(ctx, job, r.jobs[job], jobs[job])
	})
}

// followAgain has one value for each allocation that is to be followed and was seen: an allocation that the servers have removed is as it was.
func (r *reader) followAgain(allocs []*api.AllocationListStub) {
	want, next := r.following(), map[string]*followed{}
	for _, a := range allocs {
		if want[a.ID] {
			f := r.followed[a.ID]
			if f == nil {
				f = &followed{}
			}
			f.alloc, f.gone = a, false
			next[a.ID] = f
		}
	}
	for id, f := range r.followed {
		if want[id] && next[id] == nil {
			f.gone = true // it has ended, or its record is gone
			next[id] = f
		}
	}
	for id := range r.followed {
		delete(r.followed, id)
	}
	for id, f := range next {
		r.followed[id] = f
	}
}

func (r *reader) readJob(ctx context.Context, job jobName, v *jobVersions, siblings bool) error {
	q, err := r.in(ctx, job.namespace)
	if err != nil {
		return err
	}
	v.present, _, err = r.client.Jobs().Info(job.id, q)
	if status, _ := statusOf(err); status == http.StatusNotFound {
		v.text, err = "a job that is gone", nil
	}
	if err == nil && siblings {
		v.siblings, _, err = r.client.Jobs().Allocations(job.id, false, q)
	}
	if err != nil {
		return denied(fmt.Errorf("job %s in namespace %s: %w", job.id, job.namespace, err), "jobs can't be read")
	}
	v.at = time.Now()
	return nil
}

// readOne reads what one allocation that is followed needs beside its job.
func (r *reader) readOne(ctx context.Context, f *followed) error {
	v := r.jobs[jobName{f.alloc.Namespace, f.alloc.JobID}]
	f.siblings = v.siblings
	for _, s := range v.siblings {
		if s.ID == f.alloc.ID && f.gone {
			resources := f.alloc.AllocatedResources
			f.alloc = s
			f.alloc.AllocatedResources = resources
		}
	}
	if (f.gone || f.alloc.DesiredStatus != api.AllocDesiredStatusRun) && f.stopIndex == 0 {
		if err := r.readStop(ctx, f); err != nil {
			return err
		}
	}
	return r.readSpecs(ctx, f, v)
}

// readStop reads when the servers last changed an allocation that was stopped: that was the stop.
func (r *reader) readStop(ctx context.Context, f *followed) error {
	q, err := r.in(ctx, f.alloc.Namespace)
	if err != nil {
		return err
	}
	a, _, err := r.client.Allocations().Info(f.alloc.ID, q)
	if status, _ := statusOf(err); status == http.StatusNotFound {
		return nil // removed
	}
	if err != nil {
		return denied(fmt.Errorf("allocation %s: %w", f.alloc.ID, err), "allocations can't be read")
	}
	if a.DesiredStatus != api.AllocDesiredStatusRun {
		f.stopIndex = a.AllocModifyIndex
	}
	f.alloc.NextAllocation = a.NextAllocation
	return nil
}

// readSpecs finds what the replacement of an allocation asks for: what the present version of its job does, or in a deployment that of its own version.
func (r *reader) readSpecs(ctx context.Context, f *followed, v *jobVersions) error {
	f.text, f.specs = v.text, nil
	if v.present == nil {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	versions := []*api.Job{v.present}
	if f.alloc.JobVersion != value(v.present.Version) {
		if v.older[f.alloc.JobVersion] == nil {
			own, err := r.readVersion(ctx, f.alloc)
			if err != nil {
				return err
			}
			v.older[f.alloc.JobVersion] = own
		}
		if own := v.older[f.alloc.JobVersion]; own != nil {
			versions = append(versions, own)
		}
	}
	for _, job := range versions {
		s, err := v.spec(job, f.alloc.TaskGroup)
		if err != nil {
			f.text, f.specs = err.Error(), nil
			return nil
		}
		f.specs = append(f.specs, s)
	}
	return nil
}

// readVersion returns the job of an allocation as it was when that was placed; nil = the allocation was removed, so it is not placed again.
func (r *reader) readVersion(ctx context.Context, a *api.AllocationListStub) (*api.Job, error) {
	q, err := r.in(ctx, a.Namespace)
	if err != nil {
		return nil, err
	}
	full, _, err := r.client.Allocations().Info(a.ID, q)
	if status, _ := statusOf(err); status == http.StatusNotFound {
		return nil, nil
	}
	if err != nil {
		return nil, denied(fmt.Errorf("allocation %s: %w", a.ID, err), "allocations can't be read")
	}
	return full.Job, nil
}

func (v *jobVersions) spec(job *api.Job, group string) (*spec, error) {
	key := specKey{value(job.Version), group}
	if s := v.specs[key]; s != nil {
		return s, nil
	}
	s, err := specOf(job, group)
	if err == nil {
		v.specs[key] = s
	}
	return s, err
}

// once returns a map whose texts exist once for all nodes.
func once(m map[string]string) map[string]string {
	all := make(map[string]string, len(m))
	for k, v := range m {
		all[unique.Make(k).Value()] = unique.Make(v).Value()
	}
	return all
}

// keptEvents are the events that changedIndex reads.
func keptEvents(all []*api.NodeEvent) (kept []*api.NodeEvent) {
	for _, e := range all {
		kept = append(kept, &api.NodeEvent{Subsystem: e.Subsystem, Message: e.Message, CreateIndex: e.CreateIndex})
	}
	return kept
}
