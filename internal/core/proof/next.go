package proof

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// decision is one step. It changes only its own copy of the state.
type decision struct {
	Policy
	node  Node
	now   time.Time // UTC
	open  time.Time // when a window is open: now, or later
	state State
	out   Result
}

// candidate is a GPU whose proof may begin now, but for what other GPUs need.
type candidate struct {
	gpu    *GPU
	reason Reason
	last   time.Time // its last verdict
}

// Next decides. It is pure, and gives the same result for the same values. The location of now is that of the windows; now and Node.BootTime are read
// together.
func (p Policy) Next(s State, n Node, now time.Time) Result {
	d := &decision{Policy: p, node: n, now: durable.Clock(now), open: p.opens(now).UTC(), state: s.clone()}
	durable.SetClock(times{&d.state}, n.Boot, n.BootTime, d.now)
	d.start()
	if p.On() {
		d.see()
		d.follow()
		d.begin(d.candidates())
		d.out.Withheld, d.out.Failures = p.Withheld(d.state, n), p.Failures(d.state, n)
	} else {
		d.node.Cancel = cmp.Or(n.Cancel, Reload)
		d.follow()
	}
	d.out.State = d.state
	return d.out
}

// start makes the first decision of a process: proofs that are in its state were interrupted, by the end of the agent or of the node. They could not run:
// otherwise one that ends the node would do so after each boot.
func (d *decision) start() {
	if !d.state.started.IsZero() {
		return
	}
	d.state.started = d.now
	for i := range d.state.Records {
		if r := &d.state.Records[i]; r.Running != nil {
			r.count(r.Running.Reason, d.now)
			r.Running = nil
			r.notRun(d.now, d.node.Boot, "the agent or the node ended during the proof")
		}
	}
}

// see records the GPUs: which are there, since when no work holds them, and when they became unhealthy.
func (d *decision) see() {
	was := d.state.seen
	d.state.seen = make(map[gpu.DeviceID]seen, len(d.node.GPUs))
	for i := range d.node.GPUs {
		g := &d.node.GPUs[i]
		r := d.record(g.ID)
		now := was[g.ID]
		if r.Running != nil || g.held() {
			now.free = time.Time{}
		} else if now.free.IsZero() {
			now.free = d.now
		}
		sick := g.Health >= health.Unhealthy
		if sick && (!now.sick || r.Fault.Before(r.Since)) {
			r.Fault = d.now
		}
		now.sick = sick
		d.state.seen[g.ID] = now
	}
	d.forget()
}

// record returns the record of a GPU, which is a new one if there is none. It is good until another one is added.
func (d *decision) record(id gpu.DeviceID) *Record {
	i, known := d.state.find(id)
	if !known {
		d.state.Records = slices.Insert(d.state.Records, i, Record{GPU: id, Since: d.now})
	}
	return &d.state.Records[i]
}

// forget removes records of GPUs that are not there, the oldest first, while there are too many.
func (d *decision) forget() {
	for len(d.state.Records) > maxRecords {
		oldest := -1
		for i := range d.state.Records {
			r := &d.state.Records[i]
			if d.node.gpuOf(r.GPU) == nil && r.Running == nil && (oldest < 0 || r.Since.Before(d.state.Records[oldest].Since)) {
				oldest = i
			}
		}
		if oldest < 0 {
			return
		}
		d.state.Records = slices.Delete(d.state.Records, oldest, oldest+1)
	}
}

// follow finds the proofs that are to end, and those that have not ended in their time.
func (d *decision) follow() {
	for i := range d.state.Records {
		r := &d.state.Records[i]
		if r.Running == nil {
			continue
		}
		number, ends := r.Running.Number, r.Running.Began.Add(TakeWithin+d.Timeout+EndsWithin)
		if !d.now.Before(ends) {
			d.out.Cancel = append(d.out.Cancel, Cancelling{r.GPU, number, Overdue})
			r.count(r.Running.Reason, d.now)
			r.Running = nil
			r.notRun(d.now, d.state.Boot, Overdue.String())
			continue
		}
		d.out.wake(ends)
		r.Running.Cancel = cmp.Or(r.Running.Cancel, d.cancel(d.node, d.node.gpuOf(r.GPU), r.Running.Reason))
		if r.Running.Cancel != "" {
			d.out.Cancel = append(d.out.Cancel, Cancelling{r.GPU, number, r.Running.Cancel})
		}
	}
}

// cancel is why a proof on a GPU can't go on; "" = it can. The GPU is nil if it is not there.
func (p Policy) cancel(n Node, g *GPU, reason Reason) Cancel {
	switch {
	case n.Cancel != "":
		return n.Cancel
	case g == nil:
		return Gone
	case g.Cancel != "" && (g.Cancel != Demand || !p.holdsBack(reason)):
		return g.Cancel
	case !g.takesWork():
		return Fault
	case len(g.Holders) > 0:
		return Held
	case g.Unread != "":
		return Unread
	}
	return ""
}

// Still reports whether a proof that was begun may run: else why it is cancelled. It is asked after the owner was written, with what the node shows then.
func (p Policy) Still(s State, n Node, id gpu.DeviceID) (Cancel, bool) {
	r, _ := s.Of(id)
	if r.Running == nil {
		return Overdue, false
	}
	g := n.gpuOf(id)
	why := cmp.Or(r.Running.Cancel, p.cancel(n, g, r.Running.Reason))
	if why == "" && len(g.Processes) > 0 {
		why = Held
	}
	return why, why == ""
}

// candidates are the GPUs whose proof may begin, the first that is to begin first. The others wait.
func (d *decision) candidates() (all []candidate) {
	for i := range d.node.GPUs {
		g := &d.node.GPUs[i]
		r := d.record(g.ID)
		if r.Running != nil {
			continue
		}
		reason, required := d.required(r, g, d.node.Boot)
		if !required && !d.asks(Idle) && !r.Failed() {
			continue
		}
		if w, waits := d.waits(g, r, reason, required); waits {
			w.GPU, w.Reason = g.ID, reason
			d.out.wait(w)
			continue
		}
		c := candidate{gpu: g, reason: reason}
		if r.Last != nil {
			c.last = r.Last.At
		}
		all = append(all, c)
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return cmp.Or(cmp.Compare(a.reason, b.reason), a.last.Compare(b.last)) })
	return all
}

// waits returns what a GPU waits for by itself.
func (d *decision) waits(g *GPU, r *Record, reason Reason, required bool) (Wait, bool) {
	if w, ok := d.notYet(g, r, required); ok {
		return w, true
	}
	if until, often := r.often(d.now); often && required && reason == Recovery && !r.tried(g, d.node.Boot) {
		text := fmt.Sprintf("it was proved %d times within a day, and has failed again each time: "+
			"a person decides about it, and goes on with a reset", mostInDay)
		return Wait{Code: WaitOften, Text: text, Until: until, Alert: true}, true
	}
	cancel := cmp.Or(d.node.Cancel, g.Cancel)
	switch {
	case cancel == Demand && d.holdsBack(reason):
	case cancel != "":
		return Wait{Code: WaitPaused, Text: cancel.String()}, true
	}
	switch {
	case !g.takesWork():
		return Wait{Code: WaitFault, Text: cmp.Or(g.Cause, "it is "+g.Health.String())}, true
	case g.Unread != "":
		return Wait{Code: WaitUnread, Text: "what has it is not known: " + g.Unread, Alert: g.Never}, true
	case len(g.Holders) > 0:
		return Wait{Code: WaitHeld, Text: oneline.Few(g.Holders) + " has it"}, true
	case len(g.Processes) > 0:
		return Wait{Code: WaitProcesses, Text: "in use by " + oneline.Few(g.Processes)}, true
	}
	return d.notLongFree(g, reason)
}

// notYet returns what a GPU waits for that no look at it changes: a person, or a time.
func (d *decision) notYet(g *GPU, r *Record, required bool) (Wait, bool) {
	switch due := d.due(r, d.node.Name); {
	case r.NeedsService:
		return Wait{Code: WaitService, Text: "it failed again after a reset or a boot: it needs service", Alert: true}, true
	case !required && r.Failed():
		return Wait{Code: WaitRepair, Text: "it failed: it is proved again after a reset or a boot"}, true
	case r.tried(g, d.node.Boot) && d.now.Before(r.Tries.Retry):
		return Wait{Code: WaitBackOff, Text: "the check could not run: " + r.Tries.Detail, Until: r.Tries.Retry}, true
	case !required && d.now.Before(due):
		return Wait{Code: WaitDue, Text: "its last proof is not old enough", Until: due}, true
	}
	return Wait{}, false
}

// notLongFree returns what a GPU that no work has waits for.
func (d *decision) notLongFree(g *GPU, reason Reason) (Wait, bool) {
	wait := func(code Code, text string, until time.Time) (Wait, bool) {
		return Wait{Code: code, Text: text, Until: until}, d.now.Before(until)
	}
	free := d.state.seen[g.ID].free
	if w, ok := wait(WaitSettle, fmt.Sprintf("it is free for less than %v", SettleTime), free.Add(SettleTime)); ok {
		return w, true
	}
	if !d.holdsBack(reason) {
		if w, ok := wait(WaitIdle, fmt.Sprintf("it is free for less than %v", d.IdleFor), free.Add(d.IdleFor)); ok {
			return w, true
		}
	}
	switch reason {
	case Boot:
		return wait(WaitSpread, "nodes that boot together are not proved at once", d.state.started.Add(SettleTime+spread(d.node.Name, d.Timeout)))
	case Idle:
		return wait(WaitWindow, "no window is open", d.open)
	default:
		return Wait{}, false
	}
}

// taking are the GPUs that take work now, and how many of each pool.
func (d *decision) taking() (map[gpu.DeviceID]bool, map[string]int) {
	all, byPool := map[gpu.DeviceID]bool{}, map[string]int{}
	for i := range d.node.GPUs {
		g := &d.node.GPUs[i]
		r := d.record(g.ID)
		all[g.ID] = r.Running == nil && !g.held() && g.takesWork() && g.Cancel != Move
	}
	for _, w := range d.Withheld(d.state, d.node) {
		all[w.GPU] = false
	}
	for _, f := range d.Failures(d.state, d.node) {
		all[f.GPU] = all[f.GPU] && f.State < health.Unhealthy
	}
	for i := range d.node.GPUs {
		if g := &d.node.GPUs[i]; all[g.ID] {
			for _, pool := range g.Pools {
				byPool[pool]++
			}
		}
	}
	return all, byPool
}

// begin begins proofs, as many as may run.
func (d *decision) begin(all []candidate) {
	if len(all) == 0 {
		return
	}
	takes, free := d.taking()
	running := d.running()
	for _, c := range all {
		if w, waits := d.waitsForOthers(c, running, free); waits {
			w.GPU, w.Reason = c.gpu.ID, c.reason
			d.out.wait(w)
			continue
		}
		running++
		d.beginOne(c)
		if takes[c.gpu.ID] {
			for _, pool := range c.gpu.Pools {
				free[pool]--
			}
		}
	}
}

// running is how many proofs run on the node.
func (d *decision) running() int {
	n := d.node.Elsewhere
	for i := range d.state.Records {
		if d.state.Records[i].Running != nil {
			n++
		}
	}
	return n
}

func (d *decision) beginOne(c candidate) {
	d.state.Begun++
	d.record(c.gpu.ID).Running = &Running{Number: d.state.Begun, Reason: c.reason, Began: d.now}
	one := d.state.seen[c.gpu.ID]
	one.free = time.Time{}
	d.state.seen[c.gpu.ID] = one
	if c.reason == Idle {
		d.state.IdleBegan = d.now
	}
	d.out.Begin = append(d.out.Begin, Begin{c.gpu.ID, d.state.Begun, c.reason})
	d.out.wake(d.now.Add(d.Timeout + EndsWithin))
}

// waitsForOthers returns what a GPU waits for because of other GPUs of the node.
func (d *decision) waitsForOthers(c candidate, running int, free map[string]int) (Wait, bool) {
	next := d.state.IdleBegan.Add(d.apart(len(d.node.GPUs)))
	last := func(pool string) bool { return free[pool] < 2 } // c is one
	switch {
	case c.reason == Idle && !d.state.IdleBegan.IsZero() && d.now.Before(next):
		return Wait{Code: WaitSpaced, Text: "another GPU was proved just now", Until: next}, true
	case c.reason == Idle && slices.ContainsFunc(c.gpu.Pools, last):
		pool := c.gpu.Pools[slices.IndexFunc(c.gpu.Pools, last)]
		return Wait{Code: WaitLastFree, Text: "it is the last free GPU of " + pool}, true
	case running >= d.MaxPerNode:
		return Wait{Code: WaitTurn, Text: fmt.Sprintf("%d run, and maxPerNode is %d", running, d.MaxPerNode)}, true
	}
	return Wait{}, false
}
