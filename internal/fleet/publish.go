package fleet

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// publish shows a decision.
func (c *Controller) publish(clusters []rescue.Cluster, r rescue.Result, at time.Time, took time.Duration) {
	v := View{
		At: at, Identity: c.Identity, Leads: c.lead != nil && c.lead.begun, Leader: c.Leader.Holder(), Policy: c.Policy, Result: r, Decided: took,
		Store: c.Store.String(), Problems: c.allProblems(), Counts: c.events.copied(),
	}
	if c.ledger.err != nil {
		v.StoreErr = c.ledger.err.Error()
	}
	for i, one := range c.Clusters {
		v.Clusters = append(v.Clusters, ClusterView{Cluster: clusters[i], Kind: one.Kind()})
	}
	c.view.Store(v)
}

// allProblems are those of this program, and of it with each cluster.
func (c *Controller) allProblems() []problem.Problem {
	all := c.problems.List()
	for _, one := range c.Clusters {
		all = append(all, one.Problems()...)
	}
	return all
}

// Plan is the decision that would follow a view if the clusters that are not off were in another mode.
func Plan(v View, mode rescue.Mode) rescue.Result {
	if v.Result.Problem != "" {
		return rescue.Result{State: v.Result.State, Problem: v.Result.Problem}
	}
	all := make([]rescue.Cluster, len(v.Clusters))
	for i := range v.Clusters {
		all[i] = v.Clusters[i].Cluster
	}
	return v.Policy.Next(v.Result.State, rescue.NewFleet(all...).InMode(mode), v.At)
}

// tellWork tells each cluster of which work more is needed: of that on GPUs with faults, and of that which is moved.
func (c *Controller) tellWork(clusters []rescue.Cluster) {
	for i, one := range c.Clusters {
		work := onFaulty(&clusters[i])
		for _, r := range c.state.Ledger.Rescues {
			for _, m := range r.Moves {
				if r.Cluster != one.Name() || m.Outcome != rescue.Open {
					continue
				}
				for _, t := range m.Work {
					work = append(work, t.ID)
				}
			}
		}
		slices.Sort(work)
		work = slices.Compact(work)
		if was, told := c.follows[one.Name()]; !told || !slices.Equal(was, work) {
			c.follows[one.Name()] = work
			one.Follow(work)
		}
	}
}

// onFaulty is the work of a cluster that holds hardware with a fault.
func onFaulty(c *rescue.Cluster) (work []string) {
	faulty := map[string]*rescue.Node{}
	for i := range c.Nodes {
		if n := &c.Nodes[i]; slices.ContainsFunc(n.Faults, func(f rescue.Fault) bool { return f.State >= health.Unhealthy }) {
			faulty[n.Name] = n
		}
	}
	if len(faulty) == 0 || c.Mode == rescue.ModeOff {
		return nil
	}
	for i := range c.Work {
		w := &c.Work[i]
		if n := faulty[w.Node]; n != nil && w.Phase != rescue.Ended && holdsFaulty(n, w) {
			work = append(work, w.ID)
		}
	}
	return work
}

// holdsFaulty reports whether work on a node holds hardware that has a fault.
func holdsFaulty(n *rescue.Node, w *rescue.Work) bool {
	return slices.ContainsFunc(w.Holds, func(h rescue.Hold) bool {
		i := slices.IndexFunc(n.Devices, func(d rescue.Device) bool { return d.ID == h.Device })
		return i >= 0 && slices.ContainsFunc(n.Faults, func(f rescue.Fault) bool {
			return f.State >= health.Unhealthy && f.At.Overlaps(n.Devices[i].At)
		})
	})
}
