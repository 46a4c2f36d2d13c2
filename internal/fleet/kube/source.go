package kube

import (
	"context"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// source is the list and the watch of one resource, and until when they are known to have told all changes.
type source struct {
	name   string // "pods"
	object runtime.Object
	table  cache.ReflectorStore
	filled func() bool
	list   func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch  func(context.Context, metav1.ListOptions) (apiwatch.Interface, error)

	mu     sync.Mutex
	err    error // of the latest list or watch; nil = it was answered
	open   bool
	opened time.Time
	closed time.Time
	event  time.Time // of the latest event or bookmark
}

// quiet is for how long a watch may be without an event: the API server sends a bookmark each minute.
const quiet = 3 * time.Minute

// caughtUp is how long a watch that was opened again may send changes of before.
const caughtUp = 5 * time.Second

// readAt is the time of which the table is, if the servers answered another request at a time.
func (s *source) readAt(answered, now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.open:
		return s.closed
	case now.Sub(s.event) > quiet:
		return s.event
	case answered.After(s.opened):
		return answered
	}
	return s.opened
}

// current reports whether what the table gets now has just happened.
func (s *source) current(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open && now.Sub(s.opened) >= caughtUp && now.Sub(s.event) <= quiet
}

// denied returns the error of the server, if a right is missing.
func (s *source) denied() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if apierrors.IsForbidden(s.err) || apierrors.IsUnauthorized(s.err) {
		return s.err
	}
	return nil
}

// failed returns the latest error of the server.
func (s *source) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// run follows the resource until ctx ends.
func (s *source) run(ctx context.Context, client any) {
	lw := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{ListWithContextFunc: s.listed, WatchFuncWithContext: s.watched}, client)
	cache.NewReflectorWithOptions(lw, s.object, s.table, cache.ReflectorOptions{Name: s.name}).RunWithContext(ctx)
}

func (s *source) listed(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list, err := s.list(ctx, o)
	s.answered(err)
	return list, err
}

func (s *source) watched(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
	w, err := s.watch(ctx, o)
	s.answered(err)
	if err != nil {
		return nil, err
	}
	initial := o.SendInitialEvents != nil && *o.SendInitialEvents
	if !initial {
		s.begin()
	}
	seen := &observed{from: w, to: make(chan apiwatch.Event), stop: make(chan struct{})}
	go seen.forward(func(e apiwatch.Event) {
		if initial && endOfInitial(e) {
			initial = false
			s.begin()
		}
		s.saw(e)
	}, s.end)
	return seen, nil
}

// endOfInitial reports whether an event is the last one about the objects that were there before the watch.
func endOfInitial(e apiwatch.Event) bool {
	if e.Type != apiwatch.Bookmark {
		return false
	}
	o, err := meta.Accessor(e.Object)
	return err == nil && o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
}

func (s *source) answered(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *source) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open, s.opened, s.event = true, time.Now(), time.Now()
}

func (s *source) saw(e apiwatch.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.event = time.Now()
	if e.Type == apiwatch.Error {
		s.err = apierrors.FromObject(e.Object)
	}
}

func (s *source) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open {
		s.open, s.closed = false, time.Now()
	}
}

// observed is a watch of which each event is seen.
type observed struct {
	from apiwatch.Interface
	to   chan apiwatch.Event
	once sync.Once
	stop chan struct{}
}

// ResultChan has the events.
func (o *observed) ResultChan() <-chan apiwatch.Event { return o.to }

// Stop ends the watch.
func (o *observed) Stop() {
	o.once.Do(func() { close(o.stop) })
	o.from.Stop()
}

func (o *observed) forward(see func(apiwatch.Event), end func()) {
	defer close(o.to)
	defer end()
	for {
		select {
		case e, ok := <-o.from.ResultChan():
			if !ok {
				return
			}
			see(e)
			select {
			case o.to <- e:
			case <-o.stop:
				return
			}
		case <-o.stop:
			return
		}
	}
}
