package rescue

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// decision is one step. It changes only its own copy of the state.
type decision struct {
	Policy
	fleet  Fleet
	now    time.Time
	state  State
	ledger *Ledger // of state
	out    Result

	faulty  []faulty       // GPUs with a fault that counts, the one that was first seen first
	at      map[gpuKey]int // into faulty
	byGPU   map[gpu.DeviceID][]int
	size    int               // bytes of the ledger; 0 = not computed yet
	most    int               // nodes on which acts may be under way at a time; 0 = not computed yet
	wouldBe []string          // nodes that would be busy, had the acts of this decision been made
	rooms   map[string]*rooms // of clusters in which a place was looked for
}

// faulty is a GPU with faults that count.
type faulty struct {
	c      *cluster
	node   int
	gpu    gpu.DeviceID
	faults []*Fault // the worst first
	since  time.Time
}

func (g *faulty) key() gpuKey { return gpuKey{g.c.Name, g.c.Nodes[g.node].Name, g.gpu} }

func (g *faulty) subject() Subject {
	return Subject{Cluster: g.c.Name, Node: g.c.Nodes[g.node].Name, GPU: g.gpu, Cause: g.faults[0].Cause}
}

// Next decides. It is pure, and gives the same result for the same values.
func (p Policy) Next(s State, f Fleet, now time.Time) Result {
	if err := s.Ledger.Check(); err != nil {
		return Result{State: s, Problem: "no act is made: the ledger can't be used: " + err.Error()}
	}
	if s.Term == 0 || s.Term != s.Ledger.Term {
		return Result{State: s, Problem: "no act is made: another process leads"}
	}
	d := p.decision(s, f, now)
	d.forget()
	d.see()
	d.quorum()
	d.follow()
	d.repeat()
	d.out.Ended = EndedMoves(s.Ledger, d.state.Ledger)
	d.shorten()
	d.begin()
	d.mark()
	d.out.State = d.state
	return d.out
}

func (p Policy) decision(s State, f Fleet, now time.Time) *decision {
	d := &decision{
		Policy: p, fleet: f, now: clock(now), state: s.clone(),
		rooms: map[string]*rooms{},
	}
	d.ledger = &d.state.Ledger
	return d
}

// current reports whether a cluster can be read now. Nothing is concluded from one that can't: neither that a fault is there nor that it has ended.
func (d *decision) current(c *cluster) bool {
	return c != nil && c.Mode != ModeOff && c.Problem == "" && d.within(c.ReadAt, readFor)
}

// within reports whether a time is not longer ago than a limit. One that is as far in the future is of before the clock was set back.
func (d *decision) within(at time.Time, limit time.Duration) bool {
	age := d.now.Sub(at)
	return -limit <= age && age <= limit
}

// reported reports whether what a node shows of its faults is of now.
func (d *decision) reported(c *cluster, n *Node) bool {
	if c.AgentReports {
		return d.within(n.ReportedAt, reportFor)
	}
	return n.Ready
}

// clock is the time of a decision: whole seconds, as they are in the ledger.
func clock(now time.Time) time.Time { return now.UTC().Truncate(time.Second) }

// forget removes what does not count any more, and moves times of before the clock was set back to now.
func (d *decision) forget() {
	d.ledger.Rescues = slices.DeleteFunc(d.ledger.Rescues, d.forgotten)
	d.ledger.ResumedAt = d.notAfterNow(d.ledger.ResumedAt)
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		r.Began, r.Reserved = d.notAfterNow(r.Began), d.notAfterNow(r.Reserved)
		for j := range r.Moves {
			m := &r.Moves[j]
			m.Sent, m.Accepted, m.Gone, m.Ended = d.notAfterNow(m.Sent), d.notAfterNow(m.Accepted), d.notAfterNow(m.Gone), d.notAfterNow(m.Ended)
			if m.Retry.After(d.now.Add(hour)) {
				m.Retry = d.now
			}
		}
	}
}

// forgotten reports whether a rescue does not count any more: it was only listed, and the mode is another one now; or it is a day old, and has ended or is
// of a cluster that is off.
func (d *decision) forgotten(r Rescue) bool {
	c := d.fleet.cluster(r.Cluster)
	off := c == nil || c.Mode == ModeOff
	if r.Listed && c != nil && c.Mode != ModeReport {
		return true
	}
	return (off || !r.open()) && d.now.Sub(r.Reserved) >= day
}

// shorten removes ended moves from the oldest rescues, as long as there are too many in all.
func (d *decision) shorten() {
	n := d.moves()
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		before := len(r.Moves)
		if n > maxMoves/2 {
			r.Moves = slices.DeleteFunc(r.Moves, func(m Move) bool { return m.Outcome != Open && !d.busy(&m) && (!m.holds() || !r.Over.IsZero()) })
		}
		r.Done += before - len(r.Moves)
		n -= before - len(r.Moves)
	}
}

// moves is how many the ledger has.
func (d *decision) moves() (n int) {
	for i := range d.ledger.Rescues {
		n += len(d.ledger.Rescues[i].Moves)
	}
	return n
}

func (d *decision) notAfterNow(t time.Time) time.Time {
	if t.After(d.now) {
		return d.now
	}
	return t
}

// see finds the GPUs with faults that count, and since when they have them.
func (d *decision) see() {
	was := d.state
	seen, named, causes := make(map[gpuKey]time.Time, len(was.seen)), make(map[namedKey]time.Time, len(was.named)), make(map[causeKey]time.Time, len(was.causes))
	d.state.seen, d.state.named, d.state.causes = seen, named, causes
	d.faulty = make([]faulty, 0, len(was.seen))
	for k, at := range was.causes {
		if at = d.notAfterNow(at); d.now.Sub(at) < d.QuorumTime {
			causes[k] = at
		}
	}
	for i := range d.fleet.clusters {
		c := &d.fleet.clusters[i]
		if c.Mode == ModeOff {
			continue
		}
		if !d.current(c) {
			d.keepSeen(was, c.Name)
			d.out.wait(Subject{Cluster: c.Name}, ReasonUnread, "cluster "+c.Name+" can't be read: "+cmp.Or(c.Problem, "its servers have not answered since "+c.ReadAt.UTC().Format(time.RFC3339)), time.Time{})
			continue
		}
		for n := range c.Nodes {
			d.seeNode(was, c, n)
		}
	}
	slices.SortStableFunc(d.faulty, func(a, b faulty) int { return a.since.Compare(b.since) })
	d.at, d.byGPU = make(map[gpuKey]int, len(d.faulty)), make(map[gpu.DeviceID][]int, len(d.faulty))
	for i := range d.faulty {
		d.at[d.faulty[i].key()] = i
		d.byGPU[d.faulty[i].gpu] = append(d.byGPU[d.faulty[i].gpu], i)
	}
}

// keepSeen keeps what was seen of a cluster that can't be read.
func (d *decision) keepSeen(was State, cluster string) {
	for k, at := range was.seen {
		if k.cluster == cluster {
			d.state.seen[k] = at
		}
	}
	for k, at := range was.named {
		if k.cluster == cluster {
			d.state.named[k] = at
		}
	}
}

func (d *decision) seeNode(was State, c *cluster, n int) {
	node, first := &c.Nodes[n], len(d.faulty)
	for i := range node.Faults {
		f := &node.Faults[i]
		if ok, why := d.counts(f); !ok {
			if f.State >= health.Unhealthy {
				d.out.refuse(Subject{Cluster: c.Name, Node: node.Name, GPU: f.At.GPU, Cause: f.Cause}, ReasonNotCounted, why)
			}
			continue
		}
		g := d.faultyGPU(c, n, f.At.GPU, first)
		g.faults = append(g.faults, f)
		d.seeCause(was, causeKey{f.Cause, c.hardware(node)}, f.Since)
	}
	for i := first; i < len(d.faulty); i++ {
		d.seeGPU(was, &d.faulty[i])
	}
}

// faultyGPU returns the GPU of a node among those found after the first.
func (d *decision) faultyGPU(c *cluster, n int, id gpu.DeviceID, first int) *faulty {
	for i := first; i < len(d.faulty); i++ {
		if d.faulty[i].gpu == id {
			return &d.faulty[i]
		}
	}
	d.faulty = append(d.faulty, faulty{c: c, node: n, gpu: id})
	return &d.faulty[len(d.faulty)-1]
}

// seeCause records when a node got a fault of a cause: by the time of the fault, if that is before now.
func (d *decision) seeCause(was State, k causeKey, since time.Time) {
	at, ok := was.causes[k]
	if !ok {
		at = d.began(since)
	}
	if now, ok := d.state.causes[k]; !ok || at.Before(now) {
		d.state.causes[k] = d.notAfterNow(at)
	}
}

// began is the beginning of a fault that is seen for the first time.
func (d *decision) began(since time.Time) time.Time {
	if since.IsZero() || since.After(d.now) {
		return d.now
	}
	return since.UTC()
}

// seeGPU records since when a GPU has had faults, whatever their causes: two that alternate are one fault that lasts.
func (d *decision) seeGPU(was State, g *faulty) {
	slices.SortStableFunc(g.faults, func(a, b *Fault) int {
		return cmp.Or(-cmp.Compare(a.Repair, b.Repair), a.Since.Compare(b.Since), cmp.Compare(a.Cause, b.Cause))
	})
	key, node := g.key(), &g.c.Nodes[g.node]
	g.since = d.now
	for _, f := range g.faults {
		if at := d.began(f.Since); at.Before(g.since) {
			g.since = at
		}
		for _, id := range f.Holders {
			k := namedKey{key, id}
			at, ok := was.named[k]
			if !ok || at.After(node.ReportedAt) {
				at = node.ReportedAt
			}
			d.state.named[k] = at
		}
	}
	if at, ok := was.seen[key]; ok && at.Before(g.since) {
		g.since = at
	}
	d.state.seen[key] = g.since
}

// quorum stops all acts if more nodes than allowed got a fault of one cause within some time.
func (d *decision) quorum() {
	if d.ledger.Stop != nil {
		return
	}
	nodes := d.nodesByCause()
	for _, cause := range keys(nodes) {
		if n := len(nodes[cause]); n > d.QuorumNodes {
			d.ledger.Stop = &Stop{At: d.now, By: ByQuorum, Text: fmt.Sprintf("%d nodes got %s within %v, and quorum_nodes is %d: "+
				"look for a change of driver, kernel or agent, then resume", n, cause, d.QuorumTime, d.QuorumNodes)}
			return
		}
	}
}

// nodesByCause returns the nodes that got a fault of a cause within the time of the quorum, and after acts were resumed.
func (d *decision) nodesByCause() map[string]map[string]bool {
	nodes := map[string]map[string]bool{}
	add := func(k causeKey, at time.Time) {
		if d.now.Sub(at) >= d.QuorumTime || !at.After(d.ledger.ResumedAt) {
			return
		}
		if nodes[k.cause] == nil {
			nodes[k.cause] = map[string]bool{}
		}
		nodes[k.cause][k.hardware] = true
	}
	for k, at := range d.state.causes {
		add(k, at)
	}
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		add(causeKey{r.Cause, r.Hardware}, r.Began) // also if what was seen is lost since
	}
	return nodes
}
