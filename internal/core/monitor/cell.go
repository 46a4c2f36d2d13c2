package monitor

import (
	"context"
	"iter"
	"sync"
)

// Value holds the latest value of something and wakes those who follow it. Writers never wait for
// readers; a slow reader skips to the latest value. It is safe for concurrent use.
type Value[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{} // closed and replaced by each Store
}

// NewValue returns a cell that holds v.
func NewValue[T any](v T) *Value[T] {
	return &Value[T]{value: v, changed: make(chan struct{})}
}

// Load returns the latest value.
func (c *Value[T]) Load() T {
	v, _ := c.load()
	return v
}

func (c *Value[T]) load() (T, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.value, c.changed
}

// Store replaces the value and wakes every Watch.
func (c *Value[T]) Store(v T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value = v
	close(c.changed)
	c.changed = make(chan struct{})
}

// Replace replaces the value and wakes nobody: for a value that those who follow take for the same.
func (c *Value[T]) Replace(v T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value = v
}

// Watch yields the present value at once and then each newer one, until ctx ends. It runs in the
// caller's goroutine and starts none.
func (c *Value[T]) Watch(ctx context.Context) iter.Seq[T] {
	return func(yield func(T) bool) {
		for ctx.Err() == nil {
			v, changed := c.load()
			if !yield(v) {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}
