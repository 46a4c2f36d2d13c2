package nomad

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// readers is how many questions are asked at a time.
const readers = 8

// reader reads the region. Only the goroutine of Run uses it.
type reader struct {
	*Cluster
	ended    time.Time            // of the latest read
	details  map[string]*api.Node // by ID
	followed map[string]*followed
	jobs     map[jobName]*jobVersions // of the work that is followed
	rightsAt time.Time                // when they were looked at; zero = they are not as they should be
	visible  map[string]bool          // namespaces that had allocations in the latest list
}

func newReader(c *Cluster) *reader {
	return &reader{Cluster: c, details: map[string]*api.Node{}, followed: map[string]*followed{}, visible: map[string]bool{}}
}

// read lists everything, and asks for what lists lack.
func (r *reader) read(ctx context.Context) (rescue.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*callLimit)
	defer cancel()
	now := &reading{at: time.Now(), followed: r.followed}
	if err := r.list(ctx, now); err != nil {
		return rescue.Cluster{}, err
	}
	if err := r.checkRights(ctx, now); err != nil {
		return rescue.Cluster{}, err
	}
	if err := r.readDetails(ctx, now.nodes); err != nil {
		return rescue.Cluster{}, err
	}
	if err := r.readFollowed(ctx, now); err != nil {
		return rescue.Cluster{}, err
	}
	now.details, now.preempts = r.details, r.preemption()
	r.remember(now)
	return translate(now, r.o.Name, r.o.Mode), nil
}

// filters of the lists. Allocations that have ended are not read: a region may have any number of them.
const (
	withDevices = "NodeResources.Devices is not empty"
	notEnded    = `ClientStatus != "complete" and ClientStatus != "failed"`
)

func (r *reader) list(ctx context.Context, now *reading) error {
	q, err := r.query(ctx, "resources", "true")
	if err != nil {
		return err
	}
	q.Filter = withDevices
	var meta *api.QueryMeta
	if now.nodes, meta, err = r.client.Nodes().List(q); err != nil {
		return denied(err, "the nodes can't be read")
	}
	index := meta.LastIndex
	if q, err = r.query(ctx, "resources", "true", "task_states", "false"); err != nil {
		return err
	}
	q.Namespace, q.Filter = api.AllNamespacesNamespace, notEnded
	if now.allocs, meta, err = r.client.Allocations().List(q); err != nil {
		return denied(err, "the allocations can't be read")
	}
	r.setIndex(min(index, meta.LastIndex))
	return nil
}

// denied is an error with what it means, if a right is missing.
func denied(err error, what string) error {
	if isDenied(err) {
		return &RightsError{What: what, Err: err}
	}
	return err
}

// setIndex sets the index from which on the stream of events is read.
func (r *reader) setIndex(index uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.index == 0 {
		close(r.indexed)
	}
	r.index = max(index, 1)
}

// readDetails reads the nodes that have changed.
func (r *reader) readDetails(ctx context.Context, nodes []*api.NodeListStub) error {
	next, changed := map[string]*api.Node{}, []string{}
	for _, n := range nodes {
		if !hasGPUs(n) {
			continue
		}
		if d := r.details[n.ID]; d != nil && d.ModifyIndex >= n.ModifyIndex {
			next[n.ID] = d
		} else {
			changed = append(changed, n.ID)
		}
	}
	var mu sync.Mutex
	err := each(ctx, changed, func(ctx context.Context, id string) error {
		q, err := r.query(ctx)
		if err != nil {
			return err
		}
		n, _, err := r.client.Nodes().Info(id, q)
		if status, _ := statusOf(err); status == http.StatusNotFound {
			return nil
		}
		if err != nil {
			return fmt.Errorf("node %s: %w", id, err)
		}
		mu.Lock()
		defer mu.Unlock()
		next[id] = kept(n)
		return nil
	})
	r.details = next // after an error, too: so the first read of a large region gets ahead though it takes longer than its time
	return err
}

// kept is what is kept of a node: what the list lacks.
func kept(n *api.Node) *api.Node {
	return &api.Node{
		ID: n.ID, Name: n.Name, Datacenter: n.Datacenter, NodeClass: n.NodeClass, NodePool: n.NodePool, ModifyIndex: n.ModifyIndex, NodeMaxAllocs: n.NodeMaxAllocs,
		Attributes: once(n.Attributes), Meta: once(n.Meta), HostVolumes: n.HostVolumes, Events: keptEvents(n.Events),
	}
}

// each calls f for all IDs, several at a time, and returns the first error.
func each(ctx context.Context, ids []string, f func(context.Context, string) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	todo := make(chan string)
	var workers sync.WaitGroup
	for range min(readers, len(ids)) {
		workers.Go(func() {
			for id := range todo {
				if ctx.Err() == nil {
					if err := f(ctx, id); err != nil {
						cancel(err)
					}
				}
			}
		})
	}
	for _, id := range ids {
		todo <- id
	}
	close(todo)
	workers.Wait()
	return context.Cause(ctx)
}

func (r *reader) preemption() api.PreemptionConfig {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.preempts
}

// remember keeps what single reads and calls need of a list.
func (r *reader) remember(now *reading) {
	ids := map[string]string{}
	for id, name := range now.nodeNames() {
		ids[name] = id
	}
	jobs := map[jobName]bool{}
	for _, f := range r.followed {
		jobs[jobName{f.alloc.Namespace, f.alloc.JobID}] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodeIDs, r.Cluster.jobs = ids, jobs
}
