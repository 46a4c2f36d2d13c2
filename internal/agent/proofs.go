package agent

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/node/prover"
	"github.com/tandem-gpu/tandem/internal/operator/statuspage"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// newProver returns what proves GPUs; nil without a policy for that.
func (a *Agent) newProver() *prover.Prover {
	if !a.opts.Prove.On() {
		return nil
	}
	o := prover.Options{
		Node: proving{a}, Policy: a.opts.Prove, LibraryPath: os.Getenv("LD_LIBRARY_PATH"), Log: a.opts.Log,
		On: []reconcile.Source{a.Changed, a.use.Changed, a.resetter.Changed}, File: a.proofs(".json"), Folder: a.proofs(""),
	}
	a.SetProofs(&inventory.Proofs{}) // no GPU takes work before the first pass
	return prover.New(o)
}

// proofs is the path of what the agent keeps of proofs in the state directory, by its suffix: ".json" is the record, "" the folder of the command; "" without
// that directory.
func (a *Agent) proofs(suffix string) string {
	if a.opts.Health.StateDir == "" {
		return ""
	}
	return filepath.Join(a.opts.Health.StateDir, a.opts.Name+".proofs"+suffix)
}

// prove proves GPUs until ctx ends. It returns at once without a policy for that.
func (a *Agent) prove(ctx context.Context) {
	if a.prover == nil {
		if a.opts.Earlier != nil {
			<-a.opts.Earlier
		}
		return
	}
	if a.prover.Await(ctx, a.opts.Earlier); ctx.Err() != nil { // it has the same files; its command may take some seconds to end
		return
	}
	if folder := a.proofs(""); folder != "" {
		if err := proofcommand.CleanUp(folder); err != nil {
			a.opts.Log.Warn("processes of earlier proofs can't be ended", "error", err)
		}
	}
	a.prover.Run(ctx, a.Watchdog())
}

// Proofs is the latest decision about proofs; nil without a policy for that.
func (a *Agent) Proofs() *proof.Result {
	if a.prover == nil {
		return nil
	}
	r := a.prover.Decision()
	return &r
}

// proving is the agent as a Prover uses it.
type proving struct{ *Agent }

// See implements prover.Node.
func (p proving) See() proof.Node {
	boot := p.sources.boot()
	n := seen(p.Monitor.State(), p.Use(), p.opts.Core.Health.Mode, proof.Node{Name: statuspage.NodeName(), Boot: boot.ID, BootTime: boot.Time})
	if p.Resetting() {
		n.Cancel = cmp.Or(n.Cancel, proof.Resetting)
	}
	if why := ProofSettings(p.opts); len(why) > 0 {
		for i := range n.GPUs {
			n.GPUs[i].Unread, n.GPUs[i].Never = why[0].String(), true
		}
	}
	return n
}

// seen fills in what a state and a table of use show of the GPUs of an agent.
func seen(s core.State, table use.Table, mode health.Mode, n proof.Node) proof.Node {
	all := s.Ledger.ForMode(mode).Conditions()
	if s.Snapshot.Driver.State != gpu.DriverReady || slices.ContainsFunc(all, func(c health.Condition) bool { return c.Reason == health.ReasonMaintenance }) {
		n.Cancel = proof.Maintenance
	}
	if s.Allocatable.ResetOf() != "" { // also by another agent of the node
		n.Cancel = proof.Resetting
	}
	for _, id := range s.Inventory.GPUs() {
		owner, assigned := s.Allocatable.Owner(id)
		if assigned && !owner.Local {
			continue // another agent has it
		}
		g := proof.GPU{ID: id}
		if owner.Pending != "" {
			g.Cancel = proof.Move
		}
		for _, c := range all {
			// A proof ends these conditions, so they do not keep it from the GPU.
			byProof := c.Reason == health.ReasonProofFailed || c.Reason == health.ReasonFaultUnknown
			if c.At.GPU == id && c.IgnoredUntil.IsZero() && !byProof && c.State > g.Health {
				g.Health, g.Cause = c.State, c.Cause()
			}
		}
		known, _ := s.Ledger.History(id)
		g.Reset = known.LastReset
		u := usedBy(id, s.Allocatable, table, owner.Taken != "")
		g.Pools, g.Holders, g.Processes, g.Unread, g.Never = u.pools, u.holders, u.processes, u.unread, u.never
		n.GPUs = append(n.GPUs, g)
	}
	return n
}

// Take implements prover.Node.
func (p proving) Take(ctx context.Context, id gpu.DeviceID) (prover.Taken, error) {
	return p.Agent.Take(ctx, id, inventory.Proof)
}

// Failed implements prover.Node. The failure is in the history when it returns: a process that ends now and finds a failure in its record of proofs only
// would take it for one that an operator has cleared.
func (p proving) Failed(ctx context.Context, id gpu.DeviceID, f health.ProofFailure) error {
	err := p.ProofFailed(ctx, id, f)
	if err == nil {
		_ = p.Save(ctx) // the history reports that it can't be written; the failure counts while this process runs
	}
	return err
}

// Passed implements prover.Node.
func (p proving) Passed(ctx context.Context, id gpu.DeviceID) error { return p.ProofPassed(ctx, id) }

// HasFailed implements prover.Node. A GPU that is not listed now may have failed.
func (p proving) HasFailed(id gpu.DeviceID) bool {
	s := p.Monitor.State()
	return !slices.Contains(s.Inventory.GPUs(), id) || slices.ContainsFunc(s.Ledger.Conditions(), func(c health.Condition) bool {
		return c.At.GPU == id && (c.Reason == health.ReasonProofFailed || c.Reason == health.ReasonNeedsService)
	})
}

// Decided implements prover.Node.
func (p proving) Decided(n proof.Node, withheld []proof.Withheld, s proof.State) {
	p.SetProofs(proofsOf(n, withheld, s))
}

// proofsOf is what the inventory needs of a decision.
func proofsOf(n proof.Node, withheld []proof.Withheld, s proof.State) *inventory.Proofs {
	is := inventory.Proofs{Withheld: map[gpu.DeviceID]string{}, Passed: map[gpu.DeviceID]string{}}
	for i := range n.GPUs {
		is.Withheld[n.GPUs[i].ID] = ""
	}
	for _, w := range withheld {
		is.Withheld[w.GPU] = w.Text
	}
	for _, r := range s.Records {
		if r.Last != nil && r.Last.Passed {
			is.Passed[r.GPU] = r.Last.At.UTC().Format(time.DateOnly)
		}
	}
	return &is
}
