package publisher

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	watchLongest = 7 * time.Minute  // more than a watch of kubeapi takes
	watchSteady  = 10 * time.Second // a watch of this length resets the waits between tries
	watchSpread  = 10 * time.Second // in which the nodes of a cluster come back after an API server that cut all watches at once
)

// observation is a list, an event or an error; of an event that is only a bookmark nothing.
type observation struct {
	list  *kubeapi.SliceList
	began time.Time // of the request of the list
	event *kubeapi.Event
	back  bool // the server answers after a failure
	err   error
}

// observer lists the slices once and watches them. A watch that breaks continues from its latest version: a list of all nodes at once, after a
// restart of the API server, would cost it more than the restart.
type observer struct {
	api     *kubeapi.Client
	sel     kubeapi.SliceSelector
	send    func(observation) bool // false when the context has ended
	version string                 // from which the next watch continues; "" = there has to be a list
	failed  bool                   // the latest request, or the watch, has failed
}

// observe lists and watches the slices until ctx ends.
func observe(ctx context.Context, api *kubeapi.Client, sel kubeapi.SliceSelector, out chan<- observation, registry *watchdog.Registry) {
	task := registry.Register("resource slices: watch")
	defer task.Done()
	o := observer{api: api, sel: sel, send: func(o observation) bool {
		task.Heartbeat(0) // the receiver has a task of its own
		select {
		case out <- o:
			task.Heartbeat(watchLongest)
			return true
		case <-ctx.Done():
			return false
		}
	}}
	for retry := newRetries(); ctx.Err() == nil; {
		task.Heartbeat(callTimeout)
		began := time.Now()
		err := o.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		steady := time.Since(began) > watchSteady
		if steady {
			retry.reset()
		}
		if err != nil {
			o.failed = true
		}
		var wait time.Duration
		switch {
		case errors.Is(err, kubeapi.ErrGone):
			wait = rand.N(watchSpread)
		case err != nil && !o.send(observation{err: err}):
			return
		case steady && errors.Is(err, kubeapi.ErrUnavailable):
			wait = rand.N(watchSpread)
		case err != nil || !steady:
			wait = retry.next(err)
		}
		task.Heartbeat(wait)
		watch.Sleep(ctx, wait)
	}
}

// follow lists if that is needed, and watches until a failure, or until a watch ended at once (nil).
func (o *observer) follow(ctx context.Context) error {
	if o.version == "" {
		began := time.Now()
		list, err := o.api.Slices(ctx, o.sel)
		if err != nil {
			return err
		}
		o.version = list.Metadata.ResourceVersion
		if !o.send(observation{list: &list, began: began, back: o.failed}) {
			return nil
		}
		o.failed = false
	}
	for ctx.Err() == nil {
		began := time.Now()
		for event, err := range o.api.WatchSlices(ctx, o.sel, o.version) {
			if err != nil {
				if errors.Is(err, kubeapi.ErrGone) || !continues(err) {
					o.version = ""
				}
				return err
			}
			if !o.take(event) {
				return nil
			}
		}
		if time.Since(began) < watchSteady {
			return nil // a server or a proxy that ends watches at once
		}
	}
	return nil
}

// continues reports whether a watch that failed can continue: the connection broke, or the server has too much to do. Other answers may be
// about the version.
func continues(err error) bool {
	if status, ok := errors.AsType[*kubeapi.StatusError](err); ok {
		return status.Code == http.StatusTooManyRequests
	}
	return true
}

// take sends what an event means.
func (o *observer) take(event kubeapi.Event) bool {
	if v := event.Slice.Metadata.ResourceVersion; v != "" {
		o.version = v
	}
	switch event.Type {
	case kubeapi.Opened:
		back := o.failed
		o.failed = false
		return o.send(observation{back: back})
	case kubeapi.Bookmark:
		return o.send(observation{})
	default:
		return o.send(observation{event: &event})
	}
}

// observed are the slices of the driver and the node as far as they are known: the newest of list, events and answers to writes, by
// their resource versions. Those can be compared as numbers (KEP-5504); others count as newer.
type observed struct {
	listed  bool
	slices  map[string]kubeapi.ResourceSlice
	version map[string]uint64    // of each name, of a deletion also
	written map[string]time.Time // of the answer to a write
	highest int64                // generation of the pool, of deleted slices also
}

func newObserved() observed {
	return observed{slices: map[string]kubeapi.ResourceSlice{}, version: map[string]uint64{}, written: map[string]time.Time{}}
}

// devices are those of slices with names that ok accepts.
func (o *observed) devices(ok func(name string) bool) []kubeapi.Device {
	var all []kubeapi.Device
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		if ok(name) {
			all = append(all, o.slices[name].Spec.Devices...)
		}
	}
	return all
}

// owner is the UID of the Node that own slices belong to; "" if there is none.
func (o *observed) owner(own func(name string) bool, node string) string {
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		for _, r := range o.slices[name].Metadata.OwnerReferences {
			if own(name) && r.Kind == "Node" && r.Name == node {
				return r.UID
			}
		}
	}
	return ""
}

// replace takes a list. What was written since its request began stays, if it is newer.
func (o *observed) replace(list kubeapi.SliceList, began time.Time) {
	before := *o
	*o = newObserved()
	o.listed, o.highest = true, before.highest
	for _, s := range list.Items {
		o.put(s)
	}
	for name, at := range before.written {
		if at.Before(began) || before.version[name] <= o.version[name] {
			continue
		}
		o.version[name], o.written[name] = before.version[name], at
		delete(o.slices, name)
		if s, ok := before.slices[name]; ok {
			o.slices[name] = s
		}
	}
}

// add takes an event and reports whether something changed.
func (o *observed) add(e kubeapi.Event) bool {
	if e.Type == kubeapi.Deleted {
		return o.drop(e.Slice.Metadata.Name, e.Slice.Metadata.ResourceVersion)
	}
	return o.put(e.Slice)
}

func (o *observed) put(s kubeapi.ResourceSlice) bool {
	name := s.Metadata.Name
	if !o.newer(name, s.Metadata.ResourceVersion) {
		return false
	}
	o.slices[name] = s
	o.highest = max(o.highest, s.Spec.Pool.Generation)
	return true
}

func (o *observed) drop(name, version string) bool {
	if !o.newer(name, version) {
		return false
	}
	_, existed := o.slices[name]
	delete(o.slices, name)
	return existed
}

// newer records a version of a name and reports whether it is newer than the one that is known.
func (o *observed) newer(name, version string) bool {
	v, err := strconv.ParseUint(version, 10, 64)
	if err == nil && v <= o.version[name] {
		return false
	}
	o.version[name] = v
	return true
}

// recordWrite takes the answer to a write.
func (o *observed) recordWrite(s kubeapi.ResourceSlice) {
	o.put(s)
	o.written[s.Metadata.Name] = time.Now()
}

// recordDelete takes that a slice does not exist.
func (o *observed) recordDelete(name string) {
	delete(o.slices, name)
	o.written[name] = time.Now()
}
