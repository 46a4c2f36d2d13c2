package nomad

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Live reads the node of an act, its allocations, and those of the act. An allocation that was told to move is ending, which only this shows.
func (c *Cluster) Live(ctx context.Context, a rescue.Act) (rescue.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, fleet.CallTimeout)
	defer cancel()
	id, err := c.nodeID(a.Node)
	if err != nil {
		return rescue.Cluster{}, err
	}
	q, err := c.query(ctx)
	if err != nil {
		return rescue.Cluster{}, err
	}
	now := &reading{at: time.Now(), names: map[string]string{id: a.Node}}
	node, _, err := c.client.Nodes().Info(id, q)
	if err != nil {
		return rescue.Cluster{}, fmt.Errorf("read node %s: %w", a.Node, c.note("node:read", "nodes can't be read", err))
	}
	all, _, err := c.client.Nodes().Allocations(id, q)
	if err != nil {
		return rescue.Cluster{}, fmt.Errorf("read the allocations of node %s: %w", a.Node, c.note("read-job", "allocations can't be read", err))
	}
	if all, err = c.liveTargets(ctx, a, all); err != nil {
		return rescue.Cluster{}, err
	}
	c.mu.Lock()
	now.preempts = c.preempts
	c.mu.Unlock()
	now.nodes, now.details = []*api.NodeListStub{stubOf(node)}, map[string]*api.Node{id: node}
	for _, one := range all {
		now.allocs = append(now.allocs, allocStubOf(one))
	}
	return translate(now, c.o.Name, c.o.Mode), nil
}

// liveTargets reads the allocations of an act one by one, in the place of those of the node: without the right to read one, that is an error.
func (c *Cluster) liveTargets(ctx context.Context, a rescue.Act, all []*api.Allocation) ([]*api.Allocation, error) {
	for _, t := range a.Work {
		q, err := c.in(ctx, t.Namespace)
		if err != nil {
			return nil, err
		}
		one, _, err := c.client.Allocations().Info(t.ID, q)
		if status, _ := statusOf(err); status == http.StatusNotFound {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read allocation %s: %w", t.ID, c.note("read-job", "allocations can't be read", err))
		}
		all = append(slices.DeleteFunc(all, func(o *api.Allocation) bool { return o.ID == t.ID }), one)
	}
	return all, nil
}

func (c *Cluster) nodeID(name string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := c.nodeIDs[name]
	if id == "" {
		return "", fmt.Errorf("region %s does not list node %s", c.o.Name, name)
	}
	return id, nil
}

// stubOf returns a node as a list has it.
func stubOf(n *api.Node) *api.NodeListStub {
	return &api.NodeListStub{
		ID: n.ID, Name: n.Name, Datacenter: n.Datacenter, NodeClass: n.NodeClass, NodePool: n.NodePool, Drain: n.Drain || n.DrainStrategy != nil,
		SchedulingEligibility: n.SchedulingEligibility, Status: n.Status, Drivers: n.Drivers, NodeResources: n.NodeResources, ReservedResources: n.ReservedResources,
		CreateIndex: n.CreateIndex, ModifyIndex: n.ModifyIndex,
	}
}

// allocStubOf returns an allocation as a list has it. One that is to migrate has been stopped, though its desired status follows later.
func allocStubOf(a *api.Allocation) *api.AllocationListStub {
	s := &api.AllocationListStub{
		ID: a.ID, Name: a.Name, Namespace: a.Namespace, NodeID: a.NodeID, NodeName: a.NodeName, JobID: a.JobID, TaskGroup: a.TaskGroup,
		AllocatedResources: a.AllocatedResources, DesiredStatus: a.DesiredStatus, ClientStatus: a.ClientStatus, NextAllocation: a.NextAllocation,
		CreateIndex: a.CreateIndex, ModifyIndex: a.ModifyIndex,
	}
	if a.Job != nil {
		s.JobType, s.JobVersion = value(a.Job.Type), value(a.Job.Version)
	}
	if value(a.DesiredTransition.Migrate) && s.DesiredStatus == api.AllocDesiredStatusRun {
		s.DesiredStatus = api.AllocDesiredStatusStop
	}
	return s
}

// Do stops the allocation of an act, so that its job gets another one in its place. To stop it again has no effect. It makes no call if ctx has ended: after this
// process was stopped for some time, another one may lead.
func (c *Cluster) Do(ctx context.Context, a rescue.Act) rescue.Answer {
	if err := ctx.Err(); err != nil {
		return rescue.Answer{Kind: rescue.NotMade, Text: err.Error()}
	}
	ctx, cancel := context.WithTimeout(ctx, fleet.CallTimeout)
	defer cancel()
	if len(a.Work) != 1 || a.Device != "" {
		return rescue.Answer{Kind: rescue.Denied, Text: "an act in a Nomad region is on one allocation"}
	}
	q, err := c.in(ctx, a.Work[0].Namespace)
	if err != nil {
		return rescue.Answer{Kind: rescue.NotMade, Text: err.Error()}
	}
	_, err = c.client.Allocations().Stop(&api.Allocation{ID: a.Work[0].ID}, q)
	return answerOf(c.note("alloc-lifecycle", "allocations in namespace "+a.Work[0].Namespace+" can't be stopped", err))
}

// answerOf is what the answer of the servers to a stop means.
func answerOf(err error) rescue.Answer {
	status, body := statusOf(err)
	switch {
	case err == nil:
		return rescue.Answer{Kind: rescue.Accepted}
	case status == http.StatusNotFound:
		return rescue.Answer{Kind: rescue.NotFound, Text: body}
	case status == http.StatusTooManyRequests:
		return rescue.Answer{Kind: rescue.Blocked, Text: body}
	}
	return rescue.Answer{Kind: rescue.Failed, Text: err.Error()}
}

// note reports a right that the token lacks while that lasts: an error that is it, and the end of it without an error. It returns the error.
func (c *Cluster) note(right, what string, err error) error {
	object := c.o.Name + " " + right
	if err == nil {
		c.problems.End(problem.MissingRight, object, "the token has the right", "right", right)
		return nil
	}
	if !isDenied(err) {
		return err
	}
	p := problem.Problem{Code: problem.MissingRight, Object: object, Text: "region " + c.o.Name + ": " + what, Remedy: "permit " + right + " in a policy of the token"}
	c.problems.Put(p, slog.LevelWarn, "the token lacks a right", "right", right, "error", err)
	return &RightsError{What: what, Err: err}
}

// marked is the mark that this program has set last: the servers show it after 5 to 10 s.
type marked struct {
	repair health.Repair
	at     time.Time
}

const markShown = 30 * time.Second

// Mark marks a node, and changes its eligibility: a node becomes ineligible after its mark, and eligible before the mark goes.
func (c *Cluster) Mark(ctx context.Context, m rescue.Mark) (index uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, fleet.CallTimeout)
	defer cancel()
	id, err := c.nodeID(m.Node)
	if err != nil {
		return 0, err
	}
	if m.Eligible == rescue.MakeEligible {
		if index, err = c.setEligible(ctx, id, true); err != nil {
			return 0, err
		}
	}
	if err := c.setMark(ctx, m.Node, id, m.Repair); err != nil {
		return index, err
	}
	if m.Eligible == rescue.MakeIneligible {
		return c.setEligible(ctx, id, false)
	}
	return index, nil
}

func (c *Cluster) setEligible(ctx context.Context, id string, eligible bool) (uint64, error) {
	q, err := c.write(ctx, "")
	if err != nil {
		return 0, err
	}
	answer, err := c.client.Nodes().ToggleEligibility(id, eligible, q)
	if err = c.note("node:write", "the eligibility of nodes can't be changed", err); err != nil {
		return 0, err
	}
	return answer.LastIndex, nil
}

// setMark writes the metadata. Each change of it makes the servers evaluate the jobs of the node, so it is not written again before they show it. A mark that
// the servers show already, of whomever, stays.
func (c *Cluster) setMark(ctx context.Context, name, id string, repair health.Repair) error {
	c.mu.Lock()
	before, ok := c.marked[id]
	c.mu.Unlock()
	if ok && time.Since(before.at) < markShown {
		if before.repair == repair {
			return nil
		}
	} else if c.showsMark(name, repair) {
		return nil
	}
	q, err := c.query(ctx)
	if err != nil {
		return err
	}
	meta := map[string]*string{markKey: nil, byKey: nil}
	if repair != health.NoRepair {
		text, by := repair.String(), byUs
		meta[markKey], meta[byKey] = &text, &by
	}
	_, err = c.client.Nodes().Meta().Apply(&api.NodeMetaApplyRequest{NodeID: id, Meta: meta}, q)
	if err = c.note("node:write", "the metadata of nodes can't be changed", err); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.marked[id] = marked{repair, time.Now()}
	return nil
}

func (c *Cluster) showsMark(node string, repair health.Repair) bool {
	return slices.ContainsFunc(c.shown.Load().Nodes, func(n rescue.Node) bool { return n.Name == node && n.Mark == repair })
}
