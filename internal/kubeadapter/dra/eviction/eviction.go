// Package eviction decides of which broken GPUs Kubernetes may delete the pods, by a taint with the effect NoExecute: it does so within a second,
// for all GPUs at once, and without regard to disruption budgets. A reading of the driver may be wrong, above all the first ones of an agent.
//
// A GPU is evicted when its hardware has been broken for 30 seconds of this process, two more checks of all GPUs have agreed, a claim has it, and
// fewer GPUs of the node than allowed were evicted in the hour before. It stays evicted until it is not broken any more. The record of
// evictions is on disk before the taint is published, so that a restart of the agent starts no new hour.
package eviction

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	brokenFor     = 30 * time.Second // before a GPU is evicted
	confirmations = 2                // checks that have to agree after the first one
	window        = time.Hour        // of Options.PerHour
	pollEvery     = time.Second      // while a GPU waits for checks
	fileRetry     = 10 * time.Second // until the file is tried again
	fileLimit     = time.Minute      // for the watchdog: a write of the file
)

// Options configure Evictions.
type Options struct {
	// Devices are what slices are to have, with the effect NoExecute at each whose hardware is broken; nil = not known yet.
	Devices *watch.Value[[]kubeapi.Device]

	Checks  func() uint64 // complete checks of all GPUs since the start
	PerHour int           // GPUs that may be evicted within an hour
	File    string        // the record of evictions

	Watchdog *watchdog.Registry // of the goroutine; nil = none
	Log      *slog.Logger       // nil = no log
}

// Evictions are the GPUs whose pods Kubernetes may delete. Make one with New, then call Run once.
type Evictions struct {
	opts     Options
	gpus     *watch.Value[map[gpu.DeviceID]bool]
	problems problemset.Set
	waiting  map[gpu.DeviceID]bool // GPUs of which it is logged that PerHour keeps them from being evicted
}

// New returns evictions that do not run: no GPU is evicted.
func New(o Options) *Evictions {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Evictions{opts: o, gpus: watch.NewValue(map[gpu.DeviceID]bool{}), problems: problemset.Set{Log: o.Log}, waiting: map[gpu.DeviceID]bool{}}
}

// GPUs returns the GPUs that are evicted now. The maps are not to be changed.
func (e *Evictions) GPUs() *watch.Value[map[gpu.DeviceID]bool] { return e.gpus }

// Problems are those of the record, while they last.
func (e *Evictions) Problems() []problem.Problem { return e.problems.List() }

// setProblem adds what does not work with the record, which is tried again; a nil error ends it.
func (e *Evictions) setProblem(text string, err error) {
	if err == nil {
		e.problems.End(problem.Evictions, "", "the record of evictions can be used again", "file", e.opts.File)
		return
	}
	e.problems.Put(problem.Problem{Code: problem.Evictions, Text: text + ": " + err.Error()}, slog.LevelWarn, text, "error", err)
}

// Run decides until ctx ends.
func (e *Evictions) Run(ctx context.Context) error {
	task := e.opts.Watchdog.Register("evictions")
	defer task.Done()
	s := state{}
	for ctx.Err() == nil {
		task.Heartbeat(fileLimit)
		records, err := read(e.opts.File, time.Now(), e.opts.PerHour)
		e.setProblem("no pods are evicted: the record of evictions can't be read", err)
		if err == nil {
			s.records, s.saved = records, records
			break
		}
		watch.Sleep(ctx, fileRetry)
	}
	if ctx.Err() != nil {
		return nil
	}
	reconcile.Loop{On: []reconcile.Source{e.opts.Devices.Changed}, Task: task, Limit: fileLimit}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		devices, wait := e.opts.Devices.Load(), reconcile.Never
		if devices != nil {
			s, wait = e.decide(s, brokenOf(devices))
		}
		return wait
	})
	return nil
}

// decide returns what follows from the devices, and when to decide again. A GPU is evicted when that is on disk; that an eviction has ended holds
// at once.
func (e *Evictions) decide(s state, broken map[gpu.DeviceID]fault) (state, time.Duration) {
	next, wait := s.next(time.Now(), e.opts.Checks(), broken, e.opts.PerHour)
	if !slices.Equal(next.records, s.saved) {
		err := write(e.opts.File, next.records)
		e.setProblem("no more pods are evicted: the record of evictions can't be written", err)
		if err == nil {
			next.saved = next.records
		} else {
			next.records, wait = s.kept(time.Now(), broken), min(wait, fileRetry)
		}
	} else {
		e.setProblem("", nil) // what could not be written has ended
	}
	evicted := next.evicted()
	for id := range evicted {
		if !e.gpus.Load()[id] {
			e.opts.Log.Warn("GPU is broken: Kubernetes deletes the pods that use it", "gpu", id, "cause", broken[id].cause)
		}
	}
	for id, f := range broken {
		if limited := f.held && !evicted[id] && next.confirmed(id, time.Now(), e.opts.Checks()); limited && !e.waiting[id] {
			e.opts.Log.Warn("GPU is broken: its pods stay, because as many GPUs as evictions-per-hour allows were evicted within the hour",
				"gpu", id, "cause", f.cause, "evictions-per-hour", e.opts.PerHour)
			e.waiting[id] = true
		}
	}
	maps.DeleteFunc(e.waiting, func(id gpu.DeviceID, _ bool) bool { _, still := broken[id]; return !still || evicted[id] })
	if !maps.Equal(evicted, e.gpus.Load()) {
		e.gpus.Store(evicted)
	}
	return next, wait
}

// fault is why a GPU is broken.
type fault struct {
	cause string // its taint
	held  bool   // a claim has it
}

// brokenOf returns the GPUs of devices that have the effect NoExecute.
func brokenOf(devices []kubeapi.Device) map[gpu.DeviceID]fault {
	all := map[gpu.DeviceID]fault{}
	for _, d := range devices {
		i := slices.IndexFunc(d.Taints, resourceslice.IsNoExecute)
		id := resourceslice.GPU(d)
		if i < 0 || id == "" {
			continue
		}
		f, ok := all[id]
		if f.held = f.held || d.Held; !ok {
			f.cause = d.Taints[i].Key + "=" + d.Taints[i].Value
		}
		all[id] = f
	}
	return all
}
