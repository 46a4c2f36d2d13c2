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

// change is a list, an event or an error; of an event that is only a bookmark nothing.
type change struct {
	list  *kubeapi.SliceList
	began time.Time // of the request of the list
	event *kubeapi.Event
	back  bool // the server answers after a failure
	err   error
}

// reflector lists the slices once and watches them. A watch that breaks continues from its latest version: a list of all nodes at once, after a
// restart of the API server, would cost it more than the restart.
type reflector struct {
	api     *kubeapi.Client
	sel     kubeapi.SliceSelector
	send    func(change) bool // false when the context has ended
	version string            // from which the next watch continues; "" = there has to be a list
	failed  bool              // the latest request, or the watch, has failed
}

// listAndWatch lists and watches the slices until ctx ends.
func listAndWatch(ctx context.Context, api *kubeapi.Client, sel kubeapi.SliceSelector, out chan<- change, registry *watchdog.Registry) {
	task := registry.Register("resource slices: watch")
	defer task.Done()
	r := reflector{api: api, sel: sel, send: func(c change) bool {
		task.Heartbeat(0) // the receiver has a task of its own
		select {
		case out <- c:
			task.Heartbeat(watchLongest)
			return true
		case <-ctx.Done():
			return false
		}
	}}
	for retry := newRetries(); ctx.Err() == nil; {
		task.Heartbeat(callTimeout)
		began := time.Now()
		err := r.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		steady := time.Since(began) > watchSteady
		if steady {
			retry.reset()
		}
		if err != nil {
			r.failed = true
		}
		var wait time.Duration
		switch {
		case errors.Is(err, kubeapi.ErrGone):
			wait = rand.N(watchSpread)
		case err != nil && !r.send(change{err: err}):
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
func (r *reflector) follow(ctx context.Context) error {
	if r.version == "" {
		began := time.Now()
		list, err := r.api.Slices(ctx, r.sel)
		if err != nil {
			return err
		}
		r.version = list.Metadata.ResourceVersion
		if !r.send(change{list: &list, began: began, back: r.failed}) {
			return nil
		}
		r.failed = false
	}
	for ctx.Err() == nil {
		began := time.Now()
		for event, err := range r.api.WatchSlices(ctx, r.sel, r.version) {
			if err != nil {
				if errors.Is(err, kubeapi.ErrGone) || !continues(err) {
					r.version = ""
				}
				return err
			}
			if !r.take(event) {
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
func (r *reflector) take(event kubeapi.Event) bool {
	if v := event.Slice.Metadata.ResourceVersion; v != "" {
		r.version = v
	}
	switch event.Type {
	case kubeapi.Opened:
		back := r.failed
		r.failed = false
		return r.send(change{back: back})
	case kubeapi.Bookmark:
		return r.send(change{})
	default:
		return r.send(change{event: &event})
	}
}

// sliceCache has the slices of the driver and the node as far as they are known: the newest of list, events and answers to writes, by
// their resource versions. Those can be compared as numbers (KEP-5504); others count as newer.
type sliceCache struct {
	listed  bool
	slices  map[string]kubeapi.ResourceSlice
	version map[string]uint64    // of each name, of a deletion also
	written map[string]time.Time // of the answer to a write
	highest int64                // generation of the pool, of deleted slices also
}

func newSliceCache() sliceCache {
	return sliceCache{slices: map[string]kubeapi.ResourceSlice{}, version: map[string]uint64{}, written: map[string]time.Time{}}
}

// devices are those of slices with names that ok accepts.
func (c *sliceCache) devices(ok func(name string) bool) []kubeapi.Device {
	var all []kubeapi.Device
	for _, name := range slices.Sorted(maps.Keys(c.slices)) {
		if ok(name) {
			all = append(all, c.slices[name].Spec.Devices...)
		}
	}
	return all
}

// owner is the UID of the Node that own slices belong to; "" if there is none.
func (c *sliceCache) owner(own func(name string) bool, node string) string {
	for _, name := range slices.Sorted(maps.Keys(c.slices)) {
		for _, r := range c.slices[name].Metadata.OwnerReferences {
			if own(name) && r.Kind == "Node" && r.Name == node {
				return r.UID
			}
		}
	}
	return ""
}

// replace takes a list. What was written since its request began stays, if it is newer.
func (c *sliceCache) replace(list kubeapi.SliceList, began time.Time) {
	before := *c
	*c = newSliceCache()
	c.listed, c.highest = true, before.highest
	for _, s := range list.Items {
		c.put(s)
	}
	for name, at := range before.written {
		if at.Before(began) || before.version[name] <= c.version[name] {
			continue
		}
		c.version[name], c.written[name] = before.version[name], at
		delete(c.slices, name)
		if s, ok := before.slices[name]; ok {
			c.slices[name] = s
		}
	}
}

// add takes an event and reports whether something changed.
func (c *sliceCache) add(e kubeapi.Event) bool {
	if e.Type == kubeapi.Deleted {
		return c.drop(e.Slice.Metadata.Name, e.Slice.Metadata.ResourceVersion)
	}
	return c.put(e.Slice)
}

func (c *sliceCache) put(s kubeapi.ResourceSlice) bool {
	name := s.Metadata.Name
	if !c.newer(name, s.Metadata.ResourceVersion) {
		return false
	}
	c.slices[name] = s
	c.highest = max(c.highest, s.Spec.Pool.Generation)
	return true
}

func (c *sliceCache) drop(name, version string) bool {
	if !c.newer(name, version) {
		return false
	}
	_, existed := c.slices[name]
	delete(c.slices, name)
	return existed
}

// newer records a version of a name and reports whether it is newer than the one that is known.
func (c *sliceCache) newer(name, version string) bool {
	v, err := strconv.ParseUint(version, 10, 64)
	if err == nil && v <= c.version[name] {
		return false
	}
	c.version[name] = v
	return true
}

// recordWrite records the answer to a write.
func (c *sliceCache) recordWrite(s kubeapi.ResourceSlice) {
	c.put(s)
	c.written[s.Metadata.Name] = time.Now()
}

// recordDelete records that a slice does not exist.
func (c *sliceCache) recordDelete(name string) {
	delete(c.slices, name)
	c.written[name] = time.Now()
}
