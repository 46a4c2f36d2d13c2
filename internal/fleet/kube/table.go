package kube

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// table has what is kept of all objects of one resource. A reflector fills it (cache.ReflectorStore).
type table[T interface{ key() named }] struct {
	reduce  func(object any) (kept any)
	changed chan<- struct{}

	mu   sync.Mutex
	rows map[named]T
	full bool // it has been filled once
}

// Transformer has the reflector reduce objects as soon as they are read (cache.TransformingStore).
func (t *table[T]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return t.reduce(o), nil }
}

// Add keeps an object. It is no change if what is kept of it is as before: each kubelet sends the status of its node every five minutes.
func (t *table[T]) Add(o any) error {
	row, ok := t.reduce(o).(T)
	if !ok {
		return fmt.Errorf("%T is not an object of this table", o)
	}
	t.mu.Lock()
	before, there := t.rows[row.key()]
	t.rows[row.key()] = row
	t.mu.Unlock()
	if !there || !reflect.DeepEqual(before, row) {
		watch.Notify(t.changed)
	}
	return nil
}

// Update keeps an object in the place of that with its name.
func (t *table[T]) Update(o any) error { return t.Add(o) }

// Delete removes an object.
func (t *table[T]) Delete(o any) error {
	meta, ok := o.(metav1.ObjectMetaAccessor)
	if !ok {
		return fmt.Errorf("%T is not an object of this table", o)
	}
	t.mu.Lock()
	delete(t.rows, named{meta.GetObjectMeta().GetNamespace(), meta.GetObjectMeta().GetName()})
	t.mu.Unlock()
	watch.Notify(t.changed)
	return nil
}

// Replace keeps these objects and no other.
func (t *table[T]) Replace(all []any, _ string) error {
	rows := make(map[named]T, len(all))
	for _, o := range all {
		row, ok := t.reduce(o).(T)
		if !ok {
			return fmt.Errorf("%T is not an object of this table", o)
		}
		rows[row.key()] = row
	}
	t.mu.Lock()
	t.rows, t.full = rows, true
	t.mu.Unlock()
	watch.Notify(t.changed)
	return nil
}

// Resync does nothing.
func (t *table[T]) Resync() error { return nil }

// filled reports whether all objects have been read once.
func (t *table[T]) filled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.full
}

func (t *table[T]) all() map[named]T {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.rows)
}

func (t *table[T]) list() []T { return slices.Collect(maps.Values(t.all())) }

// tables are those of a cluster.
type tables struct {
	nodes   *table[*node]
	pods    *table[*pod]
	jobs    *table[*job]
	claims  *table[*claim]
	slices  *table[*slice]
	classes *table[*class]

	volumeClaims *table[*volumeClaim]
	volumes      *table[*volume]
}

func newTables(changed chan<- struct{}) tables {
	return tables{
		nodes: newTable(changed, nodeOf), pods: newTable(changed, podOf), jobs: newTable(changed, jobOf),
		claims: newTable(changed, claimOf), slices: newTable(changed, sliceOf), classes: newTable(changed, classOf),
		volumeClaims: newTable(changed, volumeClaimOf), volumes: newTable(changed, volumeOf),
	}
}

// newTable returns a table of what a function keeps of an object.
func newTable[O any, T interface{ key() named }](changed chan<- struct{}, keep func(*O) T) *table[T] {
	return &table[T]{changed: changed, rows: map[named]T{}, reduce: func(o any) any {
		if full, ok := o.(*O); ok {
			return keep(full)
		}
		return o
	}}
}

// objects are what all tables have now.
func (t *tables) objects() objects {
	return objects{
		nodes: t.nodes.list(), pods: t.pods.list(), jobs: t.jobs.all(), claims: t.claims.all(), slices: t.slices.list(), classes: t.classes.all(),
		volumeClaims: t.volumeClaims.all(), volumes: t.volumes.all(),
	}
}
