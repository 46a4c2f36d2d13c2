// Package watch has Value, the latest value of something for any number of readers, waits that end with a context, and Notify.
package watch

import (
	"context"
	"iter"
	"sync"
)

// Value holds the latest value of something and wakes its watchers when it is replaced. Store never blocks; a slow watcher
// skips to the latest value. Make one with NewValue; it is safe for concurrent use.
type Value[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{} // closed and replaced by each Store
}

// NewValue returns a Value that holds v.
func NewValue[T any](v T) *Value[T] {
	return &Value[T]{value: v, changed: make(chan struct{})}
}

// Load returns the latest value.
func (w *Value[T]) Load() T {
	v, _ := w.LoadNext()
	return v
}

// LoadNext returns the latest value and a channel that the next Store closes.
func (w *Value[T]) LoadNext() (latest T, next <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.value, w.changed
}

// Changed returns a channel that the next Store closes.
func (w *Value[T]) Changed() <-chan struct{} {
	_, next := w.LoadNext()
	return next
}

// Store replaces the value and wakes every watcher.
func (w *Value[T]) Store(v T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.value = v
	close(w.changed)
	w.changed = make(chan struct{})
}

// Replace replaces the value without waking the watchers, for a value that to them is equal to the present one.
func (w *Value[T]) Replace(v T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.value = v
}

// Watch yields the present value and then each newer one until ctx ends. It runs in the goroutine of the caller.
func (w *Value[T]) Watch(ctx context.Context) iter.Seq[T] {
	return func(yield func(T) bool) {
		for ctx.Err() == nil {
			v, next := w.LoadNext()
			if !yield(v) {
				return
			}
			select {
			case <-next:
			case <-ctx.Done():
				return
			}
		}
	}
}
