package kubeapitest

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// Slice is a slice as it is stored.
type Slice = kubeapi.ResourceSlice

// body is an object as JSON: fields that kubeapi lacks are kept.
type body = map[string]any

type store struct {
	version int64 // of the latest change
	oldest  int64 // watches from before it are too old
	slices  map[string]body
	claims  map[string]kubeapi.ResourceClaim // by namespace/name
	nodes   map[string]body
	events  map[string]body                // by namespace/name
	pods    map[string]kubeapi.ObjectMeta  // by namespace/name
	feature map[string]kubeapi.NodeFeature // by namespace/name
	log     []change
	uids    int

	onChange func([]Slice)
}

const sliceResource = "resourceslices"

// change is an event of slices or nodes.
type change struct {
	version  int64
	resource string
	kind     kubeapi.EventType
	object   body
}

func newStore() store {
	return store{
		version: 100, slices: map[string]body{}, claims: map[string]kubeapi.ResourceClaim{}, nodes: map[string]body{}, events: map[string]body{},
		pods: map[string]kubeapi.ObjectMeta{}, feature: map[string]kubeapi.NodeFeature{},
	}
}

func (s *store) uid() string {
	s.uids++
	return fmt.Sprintf("00000000-0000-4000-8000-%012d", s.uids)
}

// put stores a slice under a new resource version, unless it is as it was.
func (s *store) put(name string, object body, kind kubeapi.EventType) body {
	if old, ok := s.slices[name]; ok && reflect.DeepEqual(old, object) {
		return old
	}
	s.version++
	metadata(object)["resourceVersion"] = strconv.FormatInt(s.version, 10)
	s.slices[name] = object
	s.log = append(s.log, change{s.version, sliceResource, kind, object})
	s.show()
	return object
}

func (s *store) remove(name string) body {
	object := copyOf(s.slices[name])
	s.version++
	metadata(object)["resourceVersion"] = strconv.FormatInt(s.version, 10)
	delete(s.slices, name)
	s.log = append(s.log, change{s.version, sliceResource, kubeapi.Deleted, object})
	s.show()
	return object
}

func (s *store) show() {
	if s.onChange != nil {
		s.onChange(s.all())
	}
}

// all are the slices by name, as kubeapi decodes them.
func (s *store) all() []Slice {
	all := make([]Slice, 0, len(s.slices))
	for _, name := range s.names() {
		all = append(all, typed(s.slices[name]))
	}
	return all
}

// names are those of the slices, sorted: as etcd lists them.
func (s *store) names() []string { return slices.Sorted(maps.Keys(s.slices)) }

func metadata(object body) body {
	m, ok := object["metadata"].(body)
	if !ok {
		m = body{}
		object["metadata"] = m
	}
	return m
}

func spec(object body) body {
	s, _ := object["spec"].(body) // a nil map can be read
	return s
}

func text(m body, key string) string {
	v, _ := m[key].(string)
	return v
}

// devices are those of a slice, to change.
func devices(object body) []body {
	list, _ := spec(object)["devices"].([]any)
	var all []body
	for _, d := range list {
		if m, ok := d.(body); ok {
			all = append(all, m)
		}
	}
	return all
}

func copyOf(object body) body {
	var out body
	decode(encode(object), &out)
	return out
}

// typed returns a body as kubeapi decodes it.
func typed(object body) Slice {
	var s Slice
	decode(encode(object), &s)
	return s
}

func encode(v any) []byte {
	content, err := json.Marshal(v)
	if err != nil {
		panic(err) // only values of JSON
	}
	return content
}

func decode(content []byte, out any) {
	if err := json.Unmarshal(content, out); err != nil {
		panic(err) // encoded by this package
	}
}

// prepare does what the server does before it stores a slice: it drops the fields of disabled gates, unless the stored slice uses them,
// and sets the time of taints without one.
func (s *Server) prepare(object, old body) error {
	if s.admit != nil {
		return s.admitted(object, old)
	}
	taintsUsed, sharesUsed := uses(old, "taints"), uses(old, "allowMultipleAllocations")
	for _, d := range devices(object) {
		if s.dropTaints && !taintsUsed {
			delete(d, "taints")
		}
		if s.dropShares && !sharesUsed {
			delete(d, "allowMultipleAllocations")
			capacity, _ := d["capacity"].(body)
			for _, c := range capacity {
				if m, ok := c.(body); ok {
					delete(m, "requestPolicy")
				}
			}
		}
		taints, _ := d["taints"].([]any)
		for _, t := range taints {
			if m, ok := t.(body); ok && m["timeAdded"] == nil {
				m["timeAdded"] = time.Now().UTC().Truncate(time.Second).Format(time.RFC3339)
			}
		}
	}
	return nil
}

// admitted replaces a slice by what Admit makes of it.
func (s *Server) admitted(object, old body) error {
	var before []byte
	if old != nil {
		before = encode(old)
	}
	content, err := s.admit(encode(object), before)
	if err != nil {
		return err
	}
	clear(object)
	decode(content, &object)
	return nil
}

func uses(object body, field string) bool {
	return slices.ContainsFunc(devices(object), func(d body) bool { return d[field] != nil })
}

// Slices are the stored slices by name, as kubeapi decodes them.
func (s *Server) Slices() []Slice {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.store.all()
}

// OnChange sets a function that gets all slices after each change, under the server's lock. nil = none.
func (s *Server) OnChange(see func([]Slice)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store.onChange = see
}

// Len is the number of slices.
func (s *Server) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.store.slices)
}

// PutSlice stores a slice of another client, created or changed, without any check.
func (s *Server) PutSlice(slice Slice) { s.PutRaw(slice.Metadata.Name, encode(slice)) }

// PutRaw stores a slice as JSON: with fields that kubeapi lacks.
func (s *Server) PutRaw(name string, content []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var object body
	decode(content, &object)
	m := metadata(object)
	m["name"] = name
	kind := kubeapi.Added
	if old, ok := s.store.slices[name]; ok {
		kind = kubeapi.Modified
		m["uid"] = metadata(old)["uid"]
	} else if m["uid"] == nil {
		m["uid"] = s.store.uid()
	}
	s.store.put(name, object, kind)
	s.notify()
}

// Wipe deletes the slices of a node as a kubelet does that starts, or that had no connection of the driver for 30 s; "" = any driver. It
// returns how many.
func (s *Server) Wipe(node, driver string) int {
	return s.deleteWhere(func(object body) bool {
		return text(spec(object), "nodeName") == node && (driver == "" || text(spec(object), "driver") == driver)
	})
}

// DeleteSlice deletes a slice, as a person does.
func (s *Server) DeleteSlice(name string) {
	s.deleteWhere(func(object body) bool { return text(metadata(object), "name") == name })
}

func (s *Server) deleteWhere(match func(body) bool) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, name := range s.store.names() {
		if match(s.store.slices[name]) {
			s.store.remove(name)
			n++
		}
	}
	s.notify()
	return n
}

// notify wakes the watches. The caller holds the lock.
func (s *Server) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}
