package report

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Of describes a view.
func Of(v fleet.View) Document {
	d := Document{
		At: v.At, Identity: v.Identity, Leads: v.Leads, Leader: v.Leader,
		Ledger: ledgerOf(v), Clusters: []Cluster{}, Nodes: []Node{},
		Wake: v.Result.Wake, Budget: budgetOf(v), History: historyOf(v.Result.State.Ledger),
		Problems: append([]problem.Problem{}, v.Problems...), Counts: countsOf(v.Counts), DecisionSeconds: v.Decided.Seconds(),
	}
	if s := v.Result.State.Ledger.Stop; s != nil {
		d.Stop = &Stop{At: s.At, By: s.By, Text: s.Text}
	}
	for _, c := range v.Clusters {
		nodes := nodesOf(c)
		d.Clusters = append(d.Clusters, clusterOf(c, nodes, v.At))
		d.Nodes = append(d.Nodes, nodes...)
	}
	d.decided(v.Result)
	d.Alerts = d.alerts(v.Result.Problem)
	return d
}

// decided adds what a decision has due, waiting and refused.
func (d *Document) decided(r rescue.Result) {
	d.Acts = each(r.Acts, func(a rescue.Act) Act {
		return Act{subjectOf(a.Subject), each(a.Work, workloadOf), a.Device, a.Try, a.Victims, a.Listed}
	})
	d.Waits = each(r.Waits, func(w rescue.Wait) Wait { return Wait{subjectOf(w.Subject), w.Reason, w.Text, w.Until, w.Alert} })
	d.Refusals = each(r.Refusals, func(f rescue.Refusal) Refusal { return Refusal{subjectOf(f.Subject), f.Reason, f.Text} })
	d.Marks = each(r.Marks, markOf)
	d.Free = each(r.Free, subjectOf)
}

// alerts are what needs a person: what stops everything first.
func (d *Document) alerts(undecided string) []Alert {
	all := []Alert{}
	if d.Stop != nil {
		all = append(all, Alert{Code: string(rescue.ReasonStopped), Text: "all acts are stopped by " + d.Stop.By + ": " + d.Stop.Text, Since: d.Stop.At,
			Remedy: "remove the cause, then run gpu-fleet resume"})
	}
	for _, p := range d.Problems {
		if ofLedger(p) {
			all = append(all, alertOf(p))
		}
	}
	if undecided != "" && d.Leads && d.Ledger.Error == "" {
		all = append(all, Alert{Code: Undecided, Text: undecided})
	}
	if !d.Leads && d.Leader == "" {
		all = append(all, Alert{Code: NoLeader, Text: "no act is made: no process is known to lead"})
	}
	for _, w := range d.Waits {
		if w.Alert || w.Reason == rescue.ReasonUnread {
			all = append(all, Alert{Code: string(w.Reason), Subject: w.Subject, Text: w.Text, Remedy: d.takeUnread(w)})
		}
	}
	for _, p := range d.Problems {
		if !ofLedger(p) {
			all = append(all, alertOf(p))
		}
	}
	return all
}

// takeUnread removes the problem that is the same as the wait of a cluster that can't be read, and returns its remedy.
func (d *Document) takeUnread(w Wait) (remedy string) {
	d.Problems = slices.DeleteFunc(d.Problems, func(p problem.Problem) bool {
		same := w.Reason == rescue.ReasonUnread && p.Code == problem.ClusterUnread && p.Object == w.Cluster
		if same {
			remedy = p.Remedy
		}
		return same
	})
	return remedy
}

func ofLedger(p problem.Problem) bool {
	return p.Code == problem.Ledger || p.Code == problem.LedgerStore
}

func alertOf(p problem.Problem) Alert {
	return Alert{Code: string(p.Code), Text: p.Text, Remedy: p.Remedy}
}

// Brief returns the document without the nodes that are ready, take work, and have neither a mark nor a fault.
func (d Document) Brief() Document {
	all := d.Nodes
	d.Nodes = []Node{}
	for _, n := range all {
		if n.tells() {
			d.Nodes = append(d.Nodes, n)
		}
	}
	d.More = len(all) - len(d.Nodes)
	return d
}

func (n *Node) tells() bool {
	return !n.Ready || !n.Schedulable || n.Draining || n.Mark != health.NoRepair ||
		len(n.Faults) > 0 || slices.ContainsFunc(n.GPUs, func(g GPU) bool { return g.Health != health.Healthy || len(g.Faults) > 0 })
}

func ledgerOf(v fleet.View) Ledger {
	text, _ := json.Marshal(v.Result.State.Ledger) // of strings, numbers and times that were read from JSON
	return Ledger{Where: v.Store, Error: v.StoreErr, Bytes: len(text), Limit: rescue.LedgerBytes}
}

func clusterOf(c fleet.ClusterView, nodes []Node, now time.Time) Cluster {
	out := Cluster{Name: c.Name, Kind: c.Kind, Mode: c.Mode, Problem: c.Problem, ReadAt: c.ReadAt}
	if c.Mode == rescue.ModeOff {
		out.Problem = "" // it is not to be read
	}
	if !c.ReadAt.IsZero() {
		out.AgeSeconds = max(0, now.Sub(c.ReadAt)).Seconds()
	}
	for _, n := range nodes {
		out.Nodes++
		for state, count := range n.ByHealth() {
			out.GPUs += count
			if state > health.Degraded {
				out.FaultyGPUs += count
			}
		}
		out.HeldGPUs += n.held()
	}
	return out
}

// ByHealth counts the GPUs of the node. Where the servers tell numbers, those are of the devices that take work.
func (n *Node) ByHealth() map[health.State]int {
	all := map[health.State]int{}
	for _, g := range n.GPUs {
		all[g.Health]++
	}
	if len(n.Resources) == 0 {
		return all
	}
	all[health.Healthy] = -all[health.Degraded] // they are in the numbers
	for _, r := range n.Resources {
		all[health.Healthy] += r.Units
	}
	all[health.Healthy] = max(all[health.Healthy], 0)
	return all
}

// held is how many GPUs work has.
func (n *Node) held() (count int) {
	for _, g := range n.GPUs {
		if len(n.Resources) == 0 && len(g.Holders) > 0 {
			count++
		}
	}
	for _, r := range n.Resources {
		count += r.Held
	}
	return count
}

// OutOfService reports whether the GPU, or an instance of it, takes no work because of a fault.
func (g GPU) OutOfService() bool {
	return g.Health > health.Degraded
}

func nodesOf(c fleet.ClusterView) []Node {
	held, units := holdersOf(c), unitsOf(c)
	out := make([]Node, 0, len(c.Nodes))
	for i := range c.Nodes {
		n := &c.Nodes[i]
		one := Node{
			Cluster: c.Name, Name: n.Name, Hardware: n.Hardware, Ready: n.Ready, Schedulable: n.Schedulable, Draining: n.Draining, ReportedAt: n.ReportedAt,
			Mark: n.Mark, MarkIsOurs: n.MarkIsOurs, GPUs: gpusOf(n, held[n.Name]), Resources: resourcesOf(n, units),
		}
		for _, f := range n.Faults {
			if f.At.GPU == "" {
				one.Faults = append(one.Faults, faultOf(f))
			}
		}
		out = append(out, one)
	}
	slices.SortStableFunc(out, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// holdersOf returns the holders of devices by node.
func holdersOf(c fleet.ClusterView) map[string][]Holder {
	all := map[string][]Holder{}
	for i := range c.Work {
		w := &c.Work[i]
		if w.Phase == rescue.Ended {
			continue
		}
		for _, h := range w.Holds {
			all[w.Node] = append(all[w.Node], Holder{w.ID, w.Namespace, w.Name, w.Phase.String(), h.Device})
		}
	}
	return all
}

// onNode is a device of a node.
type onNode struct {
	node   string
	device gpu.DeviceID
}

// unitsOf returns how many units of devices work has.
func unitsOf(c fleet.ClusterView) map[onNode]int {
	all := map[onNode]int{}
	for i := range c.Work {
		w := &c.Work[i]
		if w.Phase == rescue.Ended {
			continue
		}
		for _, h := range w.Holds {
			all[onNode{w.Node, h.Device}] += max(h.Units, 1)
		}
	}
	return all
}

// resourcesOf returns the numbers of devices of a node, as far as its servers tell no more.
func resourcesOf(n *rescue.Node, held map[onNode]int) (all []Resource) {
	for _, dev := range n.Devices {
		if dev.Counted() {
			all = append(all, Resource{dev.Kind, dev.Units, held[onNode{n.Name, dev.ID}]})
		}
	}
	return all
}

// gpusOf returns the physical GPUs of a node in the order of its devices, then those that only faults name.
func gpusOf(n *rescue.Node, held []Holder) []GPU {
	all, at := []GPU{}, map[gpu.DeviceID]int{}
	of := func(id gpu.DeviceID) *GPU {
		i, ok := at[id]
		if !ok {
			i = len(all)
			at[id], all = i, append(all, GPU{ID: id})
		}
		return &all[i]
	}
	whose := map[gpu.DeviceID]gpu.DeviceID{} // GPU of a device
	for _, dev := range n.Devices {
		if dev.Counted() {
			continue
		}
		whose[dev.ID] = dev.At.GPU
		of(dev.At.GPU).add(dev)
	}
	for _, f := range n.Faults {
		if f.At.GPU != "" {
			of(f.At.GPU).fault(f)
		}
	}
	for _, h := range held {
		id, ok := whose[h.Device]
		if !ok {
			continue // the decision waits for it as HOLDERS_UNKNOWN
		}
		if h.Device == id {
			h.Device = ""
		}
		g := of(id)
		g.Holders = append(g.Holders, h)
	}
	return all
}

func (g *GPU) add(dev rescue.Device) {
	if !dev.Healthy {
		g.Health = health.Unhealthy
	}
	if dev.At == gpu.WholeGPU(g.ID) {
		g.Kind = dev.Kind
		return
	}
	g.Devices = append(g.Devices, Device{dev.ID, dev.Kind, dev.Healthy})
}

func (g *GPU) fault(f rescue.Fault) {
	if !f.Advisory {
		g.Health = max(g.Health, f.State)
	}
	g.Faults = append(g.Faults, faultOf(f))
}

func faultOf(f rescue.Fault) Fault {
	out := Fault{
		Cause: f.Cause, State: f.State, Repair: f.Repair, Since: f.Since, Simulated: f.Simulated, Advisory: f.Advisory, Unconfirmed: f.Unconfirmed,
	}
	if f.At.GPU != "" {
		out.At = strings.TrimSpace(strings.TrimPrefix(f.At.String(), string(f.At.GPU)))
	}
	return out
}

func subjectOf(s rescue.Subject) Subject {
	return Subject{s.Cluster, s.Node, s.GPU, s.Cause, s.Work, s.Name}
}

func workloadOf(t rescue.Target) Workload { return Workload{t.ID, t.Namespace, t.Name} }

func markOf(m rescue.Mark) Mark {
	out := Mark{Cluster: m.Cluster, Node: m.Node, Repair: m.Repair, Listed: m.Listed}
	if m.Eligible != rescue.Unchanged {
		out.Eligible = new(m.Eligible == rescue.MakeEligible)
	}
	return out
}

func budgetOf(v fleet.View) Budget {
	b := v.Policy.Budget(v.Result.State, rescue.NewFleet(each(v.Clusters, func(c fleet.ClusterView) rescue.Cluster { return c.Cluster })...), v.At)
	return Budget{
		Nodes: usedOf("", b.Nodes), Rescues: usedOf("", b.Rescues), Moves: usedOf("", b.Moves),
		GPUs:     each(b.GPUs, func(u rescue.NodeUsed) Used { return usedOf(u.Hardware, u.Used) }),
		Attempts: each(b.Attempts, func(u rescue.GPUUsed) Used { return usedOf(string(u.GPU), u.Used) }),
		Quorum:   each(b.Quorum, func(u rescue.CauseUsed) Used { return usedOf(u.Cause, u.Used) }),

		LimitGPUs: v.Policy.MaxGPUs, LimitAttempts: v.Policy.Attempts, LimitQuorum: v.Policy.QuorumNodes,
	}
}

func usedOf(of string, u rescue.Used) Used {
	return Used{of, u.Used, u.Listed, u.Limit, max(0, u.Limit-u.Used)}
}

func historyOf(l rescue.Ledger) []Rescue {
	all := each(l.Rescues, func(r rescue.Rescue) Rescue {
		return Rescue{r.Cluster, r.Node, r.GPU, r.Cause, r.Began, r.Reserved, r.Over, r.Listed, each(r.Moves, moveOf), r.Done}
	})
	slices.Reverse(all) // of one time: the one that was reserved last
	slices.SortStableFunc(all, func(a, b Rescue) int { return b.Reserved.Compare(a.Reserved) })
	return all
}

func moveOf(m rescue.Move) Move {
	return Move{each(m.Work, workloadOf), m.Device, m.Outcome, m.Tries, m.Answer, m.Remedy, m.Accepted, m.Ended}
}

func countsOf(c fleet.Counts) Counts {
	out := Counts{Acts: []ActCount{}, Outcomes: []OutcomeCount{}, Conflicts: c.Conflicts, Replaced: each(c.Replaced, func(r fleet.Replaced) Replaced {
		return Replaced{r.Cluster, r.At, r.Fault.Seconds(), r.Call.Seconds()}
	})}
	for _, k := range slices.SortedFunc(maps.Keys(c.Acts), func(a, b fleet.ActKey) int {
		return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Answer, b.Answer))
	}) {
		out.Acts = append(out.Acts, ActCount{k.Cluster, k.Answer, c.Acts[k]})
	}
	for _, k := range slices.SortedFunc(maps.Keys(c.Outcomes), func(a, b fleet.OutcomeKey) int {
		return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Outcome, b.Outcome))
	}) {
		out.Outcomes = append(out.Outcomes, OutcomeCount{k.Cluster, k.Outcome, c.Outcomes[k]})
	}
	return out
}

// each returns what becomes of each; it is never nil, which JSON has as null.
func each[A, B any](all []A, f func(A) B) []B {
	out := make([]B, 0, len(all))
	for _, a := range all {
		out = append(out, f(a))
	}
	return out
}
