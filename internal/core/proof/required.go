package proof

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// required returns the reason other than Idle for which a GPU is to be proved; false if there is none. One that failed is proved again only after a reset or
// a boot, with any policy: otherwise a failure that comes and goes would pass in time.
func (p Policy) required(r *Record, g *GPU, boot string) (Reason, bool) {
	failed := r.Failed()
	switch {
	case r.NeedsService:
		return Idle, false
	case g.Reset.After(r.Since) && (failed || p.asks(Reset)):
		return Reset, true
	case !failed && p.asks(Recovery) && g.takesWork() && !r.Fault.IsZero() && !r.Fault.Before(r.Since):
		return Recovery, true
	case boot != "" && boot != r.Boot && (failed || p.asks(Boot)):
		return Boot, true
	}
	return Idle, false
}

// tried reports whether a proof was tried for what it is required for, and could not run. A reset, a fault or a boot after it is another reason.
func (r *Record) tried(g *GPU, boot string) bool {
	t := r.Tries
	return t != nil && !g.Reset.After(t.At) && !r.Fault.After(t.At) && (boot == "" || boot == t.Boot)
}

// Withheld returns the GPUs that take no new work until they are proved. It needs no decision before: a GPU whose reset is seen for the first time is among
// them, and so is one with a fault, which would take work else from its recovery to the next decision. A GPU whose check could not run is not, nor one
// whose holders will never be known: no GPU is missing because its check fails.
func (p Policy) Withheld(s State, n Node) (all []Withheld) {
	if !p.On() {
		return nil
	}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		r, known := s.Of(g.ID)
		if !known {
			r.Since = g.Reset // one before the first decision does not count
		}
		recovered := *g
		recovered.Health = health.Healthy
		reason, required := p.required(&r, &recovered, n.Boot)
		if required && p.holdsBack(reason) && !r.tried(g, n.Boot) && !g.Never {
			all = append(all, Withheld{g.ID, reason, withheldTexts[reason]})
		}
	}
	return all
}

var withheldTexts = map[Reason]string{
	Reset: "since its reset", Recovery: "since its recovery", Boot: "since the boot",
}

// Failures returns the GPUs that failed and are there. It needs no decision before.
func (p Policy) Failures(s State, n Node) (all []Failure) {
	for i := range n.GPUs {
		r, _ := s.Of(n.GPUs[i].ID)
		if r.Failed() {
			all = append(all, p.Failure(r))
		}
	}
	return all
}

// Failure is what the failure of a GPU means, by a record that has one.
func (p Policy) Failure(r Record) Failure {
	f := Failure{GPU: r.GPU, State: p.OnFail, NeedsService: r.NeedsService, Since: r.Last.At, Summary: r.Last.Summary}
	if f.NeedsService {
		f.State = health.Unhealthy
	}
	return f
}

// due is when a GPU is to be proved for the reason idle: before Policy.Every has passed, by up to an eighth of it, by the name of the node.
func (p Policy) due(r *Record, node string) time.Time {
	after := spread(node, p.Every/8)
	if r.Last == nil {
		return r.Since.Add(after)
	}
	return r.Last.At.Add(p.Every - p.Every/8 + after)
}

// apart is the time between two proofs of a node for the reason idle. In a quarter of Policy.Every all GPUs have had their turn.
func (p Policy) apart(gpus int) time.Duration {
	return min(mostApart, p.Every/time.Duration(4*max(gpus, 1)))
}

// spread is a part of a time by the name of a node: equal names have equal parts, and the parts of many names are spread evenly.
func spread(node string, d time.Duration) time.Duration {
	hash := uint32(2166136261) // FNV-1a
	for i := range len(node) {
		hash = (hash ^ uint32(node[i])) * 16777619
	}
	hash ^= hash >> 15 // names that differ in the last letter differ in the first bits, too
	hash *= 0x85ebca6b
	hash ^= hash >> 13
	hash *= 0xc2b2ae35
	return d / (1 << 16) * time.Duration(hash>>16)
}

// gpuOf returns a GPU of a node; nil if it is not there.
func (n *Node) gpuOf(id gpu.DeviceID) *GPU {
	for i := range n.GPUs {
		if n.GPUs[i].ID == id {
			return &n.GPUs[i]
		}
	}
	return nil
}
