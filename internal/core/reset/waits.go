package reset

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// waits returns what a GPU waits for: first what a person has to do, then a time, then what changes by itself.
func (d *decision) waits(g *GPU, r *Record, need repair, b Begin) (Wait, bool) {
	all := slices.Concat(d.leftToPerson(g, r, need), d.cannot(&d.node, g), d.notYet(r), d.node.busy(g, b.With))
	turn := ""
	if running, runs := d.state.Running(); runs {
		turn = string(running.GPU)
	} else if len(d.out.Begin) > 0 {
		turn = string(d.out.Begin[0].GPU)
	}
	if turn != "" {
		all = append(all, Wait{Code: WaitTurn, Text: turn + " is reset"})
	}
	if len(all) == 0 {
		return Wait{}, false
	}
	all[0].GPU = g.ID
	return all[0], true
}

// leftToPerson is why a GPU is not reset for its fault any more, or at all.
func (p Policy) leftToPerson(g *GPU, r *Record, need repair) []Wait {
	alert := func(code Code, text string) []Wait { return []Wait{{Code: code, Text: text, Alert: true}} }
	switch {
	case need == service:
		return alert(WaitService, "it needs service: a reset does not repair it")
	case need == handOver && g.Action == health.RecoveryUnknown:
		return alert(WaitHandedOver, "the driver reports no recovery action, so a person decides what is done about "+g.cause())
	case need == handOver:
		return alert(WaitHandedOver, "the driver asks for another repair than a reset: "+actionOf(g).String())
	case r.Attempts > 0 && r.Last.Outcome == Refused:
		return alert(WaitRefused, "nvidia-smi does not reset it: "+r.Last.Text)
	case need == proved && r.Attempts > 0 && r.Last.Outcome == Done:
		return []Wait{{Code: WaitProof, Text: "it was reset because it failed its proof, and is proved next"}}
	case r.Attempts >= p.attempts(g):
		tries := "a reset"
		if r.Attempts > 1 {
			tries = fmt.Sprintf("%d resets, the last one", r.Attempts)
		}
		return alert(WaitAttempts, fmt.Sprintf("%s is still there after %s: %s", g.cause(), tries, r.Last))
	case r.Often:
		return alert(WaitOften, fmt.Sprintf("%s comes after %d resets within a day, and the GPU has failed again each time; the last one: %s",
			g.cause(), mostInDay, r.Last))
	}
	return nil
}

// cannot is what a person has to do before this agent can reset a GPU, for a person, too.
func (p Policy) cannot(n *Node, g *GPU) (all []Wait) {
	if n.Cannot != "" {
		all = append(all, Wait{Code: WaitCannot, Text: n.Cannot, Alert: true})
	}
	if g.MIG && !p.LoseMIG {
		all = append(all, Wait{Code: WaitMIG, Text: "a reset removes its MIG instances", Alert: true})
	}
	return all
}

// notYet is what a GPU waits for after a reset or a refusal.
func (d *decision) notYet(r *Record) []Wait {
	back := []Wait{{Code: WaitBackOff, Until: r.Retry}}
	switch {
	case !d.now.Before(r.Retry):
		return nil
	case r.NotBegun != "":
		back[0].Text = "its reset did not begin: " + r.NotBegun
	case r.Last.Outcome == Done:
		back[0].Text = "it was reset, and the driver's recovery action is read again"
	default:
		back[0].Text, back[0].Alert = "its last reset: "+r.Last.String(), r.Refusals >= alertAfter
	}
	return back
}

// busy is what changes by itself, and keeps any reset of a GPU from beginning.
func (n *Node) busy(g *GPU, with []gpu.DeviceID) (all []Wait) {
	if n.Paused != "" {
		all = append(all, Wait{Code: WaitPaused, Text: n.Paused})
	}
	all = append(all, g.busy()...)
	for _, id := range with {
		other := n.gpuOf(id)
		if other == nil {
			all = append(all, Wait{Code: WaitGroup, Text: string(id) + " of its P2P group is not this agent's"})
			continue
		}
		for _, w := range other.busy() {
			all = append(all, Wait{Code: WaitGroup, Text: string(id) + " of its P2P group: " + w.Text, Alert: w.Alert})
		}
	}
	return all
}

// busy is what has a GPU, or may have it.
func (g *GPU) busy() (all []Wait) {
	if g.Moving != "" {
		all = append(all, Wait{Code: WaitMoving, Text: g.Moving})
	}
	if g.Unread != "" {
		all = append(all, Wait{Code: WaitUnread, Text: "what has it is not known: " + g.Unread, Alert: g.Never})
	}
	if len(g.Holders) > 0 {
		all = append(all, Wait{Code: WaitHeld, Text: oneline.Few(g.Holders) + " has it"})
	}
	if len(g.Processes) > 0 {
		all = append(all, Wait{Code: WaitProcesses, Text: "in use by " + oneline.Few(g.Processes)})
	}
	return all
}
