package bigfleet

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/nomad/api"
)

// Nomad is the HTTP API of a Nomad region without ACLs: lists, single reads, the stream of events with its heartbeats, stops, variables with
// check-and-set and their lock. Answers are compressed, as those of the real servers.
type Nomad struct {
	server

	mu      sync.Mutex // guards all that follows
	index   uint64
	nodes   []*api.Node
	byID    map[string]*api.Node
	allocs  []*api.Allocation
	allocBy map[string]*api.Allocation
	jobs    map[string]*api.Job
	vars    map[string]*api.Variable
	lists   map[string][]byte // of the present index, compressed
	streams map[chan []byte]bool
}

// NewNomad returns a server of a region. It answers after Open.
func NewNomad(nodes int) *Nomad {
	s := &Nomad{
		index: 1000, byID: map[string]*api.Node{}, allocBy: map[string]*api.Allocation{}, jobs: map[string]*api.Job{}, vars: map[string]*api.Variable{},
		lists: map[string][]byte{}, streams: map[chan []byte]bool{},
	}
	for n := range nodes {
		node := newNomadNode(n)
		s.nodes, s.byID[node.ID] = append(s.nodes, node), node
		if n == nodes-1 {
			break
		}
		job := newNomadJob(n)
		s.jobs[*job.ID] = job
		for g := range GPUs {
			s.addAlloc(newAlloc(node, job, workID(n, g), gpuID(n, g), g))
		}
	}
	s.start(nomadRequest, http.HandlerFunc(s.serve))
	return s
}

func (s *Nomad) addAlloc(a *api.Allocation) {
	s.allocs, s.allocBy[a.ID] = append(s.allocs, a), a
}

// Config is the region in gpu-fleet's configuration.
func (s *Nomad) Config(_, mode string) (string, error) {
	return fmt.Sprintf("{name: dc1, kind: nomad, mode: %s, address: %q}", mode, s.http.URL), nil
}

// Fail has the servers show GPUs of a node as faulty, for some minutes by their text.
func (s *Nomad) Fail(n int, gpus ...int) {
	at := time.Now().UTC().Add(-2 * time.Minute).Format("2006-01-02T15:04Z")
	s.setHealth(n, gpus, "XID_95 unhealthy: XID 95 uncontained memory error since "+at+"; action: drain and reset the GPU; cleared by: reset seen")
}

// Recover ends that.
func (s *Nomad) Recover(n int, gpus ...int) { s.setHealth(n, gpus, "") }

func (s *Nomad) setHealth(n int, gpus []int, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node := s.nodes[n]
	for _, g := range gpus {
		one := node.NodeResources.Devices[0].Instances[g]
		one.Healthy, one.HealthDescription = text == "", text
	}
	s.changed()
	node.ModifyIndex = s.index
	s.tell("Node", "NodeRegistration", node.ID, map[string]any{"Node": node})
}

// changed is after each change of what the lists have. The caller has locked mu.
func (s *Nomad) changed() {
	s.index++
	s.lists = map[string][]byte{}
}

func (s *Nomad) tell(topic, kind, key string, payload any) {
	line := jsonOf(map[string]any{"Index": s.index, "Events": []any{map[string]any{"Topic": topic, "Type": kind, "Key": key, "Index": s.index, "Payload": payload}}})
	for stream := range s.streams {
		stream <- line
	}
}

func jsonOf(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // values of the API
	}
	return append(text, '\n')
}

// nomadRequest is what a request is counted as: without IDs.
func nomadRequest(r *http.Request) string {
	all := strings.Split(strings.TrimPrefix(r.URL.Path, "/v1/"), "/")
	q := r.URL.Query()
	switch {
	case all[0] == "var" && r.Method == http.MethodGet:
		return "read variable"
	case all[0] == "var":
		for _, what := range []string{"lock-acquire", "lock-renew", "lock-release"} {
			if q.Has(what) {
				return what
			}
		}
		return "write variable"
	case len(all) > 1 && (all[0] == "node" || all[0] == "allocation" || all[0] == "job"):
		all[1] = "ID"
	case all[0] == "nodes" || all[0] == "allocations":
		all[0] = "list " + all[0]
	}
	return strings.Join(all, "/")
}

func (s *Nomad) serve(w http.ResponseWriter, r *http.Request) {
	all := append(strings.Split(strings.TrimPrefix(r.URL.Path, "/v1/"), "/"), "", "")
	if all[0] == "event" {
		s.stream(w, r)
		return
	}
	if all[0] == "var" {
		s.variable(w, r, strings.TrimPrefix(r.URL.Path, "/v1/var/"))
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("X-Nomad-Index", strconv.FormatUint(s.index, 10))
	if text, ok := s.lists[r.URL.RawQuery+r.URL.Path]; ok {
		sendZipped(w, text)
		return
	}
	body := s.answer(all, r)
	if body == nil {
		http.Error(w, "not found", http.StatusNotFound)
		return
	}
	text := zipped(jsonOf(body))
	if len(all) == 3 { // a list
		s.lists[r.URL.RawQuery+r.URL.Path] = text
	}
	sendZipped(w, text)
}

func zipped(text []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, _ = z.Write(text) // a bytes.Buffer does not fail
	_ = z.Close()
	return out.Bytes()
}

func sendZipped(w http.ResponseWriter, text []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Encoding", "gzip")
	_, _ = w.Write(text)
}

// answer is that to all but the stream and variables; nil = there is nothing of that name.
func (s *Nomad) answer(path []string, r *http.Request) any {
	id := path[1]
	switch path[0] {
	case "nodes":
		return s.nodeStubs()
	case "allocations":
		return s.allocStubs(func(a *api.Allocation) bool { return a.ClientStatus != api.AllocClientStatusComplete })
	case "node":
		return s.node(id, path[2])
	case "allocation":
		if a := s.allocBy[id]; a != nil && path[2] == "stop" && r.Method == http.MethodPut {
			return s.stopAlloc(a)
		} else if a != nil {
			return a
		}
	case "job":
		if job := s.jobs[id]; job != nil && path[2] == "allocations" {
			return s.allocStubs(func(a *api.Allocation) bool { return a.JobID == id })
		} else if job != nil {
			return job
		}
	case "acl":
		return &api.ACLToken{AccessorID: nodeUUID(0), Name: "gpu-fleet", Type: "management"}
	case "operator":
		return api.SchedulerConfigurationResponse{SchedulerConfig: &api.SchedulerConfiguration{}}
	case "client":
		return s.mark(r)
	}
	return nil
}

func (s *Nomad) node(id, what string) any {
	if what != "allocations" {
		if n := s.byID[id]; n != nil {
			return n
		}
		return nil
	}
	all := []*api.Allocation{}
	for _, a := range s.allocs {
		if a.NodeID == id {
			all = append(all, a)
		}
	}
	return all
}

// mark sets metadata of a node.
func (s *Nomad) mark(r *http.Request) any {
	var q api.NodeMetaApplyRequest
	if json.NewDecoder(r.Body).Decode(&q) != nil || s.byID[q.NodeID] == nil {
		return nil
	}
	n := s.byID[q.NodeID]
	for key, value := range q.Meta {
		if delete(n.Meta, key); value != nil {
			n.Meta[key] = *value
		}
	}
	s.changed()
	n.ModifyIndex = s.index
	s.tell("Node", "NodeRegistration", n.ID, map[string]any{"Node": n})
	return api.NodeMetaResponse{Meta: n.Meta}
}

// stopAlloc has an allocation end, and another one run on the free node in its place.
func (s *Nomad) stopAlloc(a *api.Allocation) any {
	s.acted()
	moved := len(s.Acts()) - 1
	free := s.nodes[len(s.nodes)-1]
	next := newAlloc(free, a.Job, fmt.Sprintf("%08d-3333-4333-8333-000000000000", moved), gpuID(len(s.nodes)-1, moved%GPUs), moved%GPUs)
	next.Name, next.PreviousAllocation, next.ClientStatus = a.Name, a.ID, api.AllocClientStatusPending
	a.DesiredStatus, a.NextAllocation = api.AllocDesiredStatusStop, next.ID
	s.changed()
	a.AllocModifyIndex, next.CreateIndex = s.index, s.index
	s.addAlloc(next)
	s.tellAlloc(a)
	s.tellAlloc(next)
	time.AfterFunc(endsAfter, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		a.ClientStatus, next.ClientStatus = api.AllocClientStatusComplete, api.AllocClientStatusRunning
		s.changed()
		s.tellAlloc(a)
		s.tellAlloc(next)
	})
	return api.AllocStopResponse{EvalID: a.ID}
}

// tellAlloc is the event of an allocation, which has no job, and that of its node, which has all of that.
func (s *Nomad) tellAlloc(a *api.Allocation) {
	one := *a
	one.Job = nil
	s.tell("Allocation", "AllocationUpdated", a.ID, map[string]any{"Allocation": one})
	s.tell("Node", "AllocationUpdated", a.NodeID, map[string]any{"Node": s.byID[a.NodeID]})
}

// stream sends a heartbeat every 10 s, and the events.
func (s *Nomad) stream(w http.ResponseWriter, r *http.Request) {
	events := make(chan []byte, 2*GPUs*len(s.nodes)+100)
	s.mu.Lock()
	s.streams[events] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.streams, events)
		s.mu.Unlock()
	}()
	beat := time.NewTicker(10 * time.Second)
	defer beat.Stop()
	flush := http.NewResponseController(w).Flush
	for flush() == nil {
		select {
		case line := <-events:
			_, _ = w.Write(line)
		case <-beat.C:
			_, _ = io.WriteString(w, "{}\n")
		case <-r.Context().Done():
			return
		}
	}
}

// variable reads or writes one.
func (s *Nomad) variable(w http.ResponseWriter, r *http.Request, path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.vars[path]
	if r.Method == http.MethodGet {
		if is == nil {
			http.Error(w, "variable not found", http.StatusNotFound)
			return
		}
		_, _ = w.Write(jsonOf(is))
		return
	}
	next := &api.Variable{}
	if err := json.NewDecoder(r.Body).Decode(next); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	q := r.URL.Query()
	switch {
	case q.Has("lock-acquire") && is != nil && is.Lock != nil, q.Has("cas") && q.Get("cas") != strconv.FormatUint(modifyIndex(is), 10):
		w.WriteHeader(http.StatusConflict)
		_, _ = w.Write(jsonOf(is))
		return
	case q.Has("lock-renew") || q.Has("lock-release"):
		if is == nil || is.Lock == nil || next.Lock == nil || is.Lock.ID != next.Lock.ID {
			http.Error(w, "variable doesn't hold a lock", http.StatusConflict)
			return
		}
		if next = is; q.Has("lock-release") {
			next.Lock = nil
		}
	case q.Has("lock-acquire"):
		next.Lock.ID = strconv.FormatUint(s.index, 10)
	}
	s.index++
	next.Path, next.ModifyIndex = path, s.index
	s.vars[path] = next
	_, _ = w.Write(jsonOf(next))
}

func modifyIndex(v *api.Variable) uint64 {
	if v == nil {
		return 0
	}
	return v.ModifyIndex
}

// nodeStubs are the nodes as a list with resources has them.
func (s *Nomad) nodeStubs() (all []*api.NodeListStub) {
	for _, n := range s.nodes {
		all = append(all, &api.NodeListStub{
			Address: "10.0.0.1", ID: n.ID, Name: n.Name, Datacenter: n.Datacenter, NodeClass: n.NodeClass, NodePool: n.NodePool, Version: "2.0.5",
			SchedulingEligibility: n.SchedulingEligibility, Status: n.Status, Drivers: n.Drivers, NodeResources: n.NodeResources,
			ReservedResources: n.ReservedResources, CreateIndex: n.CreateIndex, ModifyIndex: n.ModifyIndex,
		})
	}
	return all
}

func (s *Nomad) allocStubs(of func(*api.Allocation) bool) (all []*api.AllocationListStub) {
	for _, a := range s.allocs {
		if of(a) {
			all = append(all, &api.AllocationListStub{
				ID: a.ID, EvalID: a.EvalID, Name: a.Name, Namespace: a.Namespace, NodeID: a.NodeID, NodeName: a.NodeName, JobID: a.JobID, JobType: *a.Job.Type,
				JobVersion: *a.Job.Version, TaskGroup: a.TaskGroup, AllocatedResources: a.AllocatedResources, DesiredStatus: a.DesiredStatus,
				ClientStatus: a.ClientStatus, NextAllocation: a.NextAllocation, CreateIndex: a.CreateIndex, ModifyIndex: a.ModifyIndex,
				CreateTime: a.CreateTime, ModifyTime: a.ModifyTime,
			})
		}
	}
	return all
}
