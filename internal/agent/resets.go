package agent

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// newResetter returns what resets GPUs. With a policy that is off it does nothing until a person asks for a reset.
func (a *Agent) newResetter() *resetter.Resetter {
	o := resetter.Options{
		Node: resetting{a}, Policy: a.opts.Reset, Resetter: a.opts.Resetter, Pause: a.opts.ResetPause, Log: a.opts.Log,
		On: []reconcile.Source{a.Changed, a.use.Changed, a.proofsChanged},
	}
	if dir := a.opts.Health.StateDir; dir != "" {
		o.File, o.Folder = filepath.Join(dir, a.opts.Name+".resets.json"), filepath.Join(dir, a.opts.Name+".resets")
		o.Runs = ownershipOptions(a.opts).ResetRuns
	}
	return resetter.New(o)
}

// LocalResetter resets GPUs in this process, which is root on the node, by the program at a path; "" = nvidia-smi where the driver has it.
func LocalResetter(r core.Roots, program, stateDir string) gpureset.Resetter {
	return gpureset.Local{
		Proc: r.Proc, Lock: gpureset.NewLock(stateDir),
		Program: gpureset.Program{Root: r.Driver, Path: program, Libraries: nvidia.LibraryFolders()},
	}
}

// reset resets GPUs until ctx ends. It returns at once without a policy for that.
func (a *Agent) reset(ctx context.Context) {
	if a.opts.After != nil { // an earlier agent of the process may have one run, in the same record
		select {
		case <-a.opts.After:
		case <-ctx.Done():
			return
		}
	}
	a.resetter.Run(ctx, a.Watchdog())
}

// afterResets returns a context that ends after ctx, when no reset of a GPU runs: one that has begun can't be taken back, and the other agents of the node
// open the driver only when this one has recorded the end of the reset. The end of the process does not wait for it.
func (a *Agent) afterResets(ctx context.Context) (context.Context, context.CancelFunc) {
	until, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		defer cancel(context.Cause(ctx))
		select {
		case <-a.resetter.End():
		case <-a.opts.Ending:
		}
	})
	return until, func() { stop(); cancel(nil); a.resetter.End() }
}

// Resets is the latest decision about resets; nil without a policy for that.
func (a *Agent) Resets() *reset.Result {
	r := a.resetter.Decision()
	if !a.opts.Reset.On() && len(r.State.Records) == 0 {
		return nil
	}
	return &r
}

// Resetting reports whether a reset of a GPU runs.
func (a *Agent) Resetting() bool { return a.resetter.Resets() != "" }

// resetting is the agent as a Resetter uses it.
type resetting struct{ *Agent }

// See implements resetter.Node.
func (r resetting) See() reset.Node {
	boot := r.sources.boot()
	n := seenFaults(r.Monitor.State(), r.Use(), r.opts.Core.Health.Mode, reset.Node{Boot: boot.ID, BootTime: boot.Time}, r.resetter.Resets())
	if r.prover != nil && r.prover.Runs() > 0 {
		n.Paused = cmp.Or(n.Paused, "a proof runs")
	}
	n.Cannot = strings.Join(problem.Lines(ResetSettings(r.opts)), "; ")
	return n
}

// proofsChanged is closed when a proof begins or has ended; nil without proofs.
func (a *Agent) proofsChanged() <-chan struct{} {
	if a.prover == nil {
		return nil
	}
	return a.prover.Changed()
}

// seenFaults fills in what a state and a table of use show of the GPUs of an agent, which resets one of them, or none.
func seenFaults(s core.State, table use.Table, mode health.Mode, n reset.Node, resets gpu.DeviceID) reset.Node {
	all := s.Ledger.ForMode(mode).Conditions()
	n.Paused = paused(s, all, resets)
	for _, id := range s.Inventory.GPUs() {
		owner, assigned := s.Allocatable.Owner(id)
		if assigned && !owner.Local {
			continue // another agent has it
		}
		g := reset.GPU{ID: id, Moving: owner.Pending, TakesWork: owner.Taken == ""}
		if !assigned && s.Host.Ownership.Required {
			g.Moving = "which API has it is not known so far"
		}
		faults(&g, all)
		known, _ := s.Ledger.History(id)
		g.Action = known.Sample.RecoveryAction
		unproved, _ := s.Host.Proofs.Withholds(id)
		g.TakesWork = g.TakesWork && unproved == ""
		g.MIG = slices.ContainsFunc(s.Snapshot.Devices, func(d gpu.Device) bool { return d.At.GPU == id && d.Profile != "" })
		g.NVSwitch = slices.ContainsFunc(s.Snapshot.Links, func(l gpu.Link) bool { return l.NVSwitch && (l.A == id || l.B == id) })
		g.Group = islandOf(s.Inventory.Islands(), id)
		u := usedBy(id, s.Allocatable, table, owner.Taken != "")
		g.Holders, g.Processes, g.Unread, g.Never = u.holders, u.processes, u.unread, u.never
		n.GPUs = append(n.GPUs, g)
	}
	return n
}

// paused is why no reset begins on the node, by the conditions of a state; "" = one may.
func paused(s core.State, all []health.Condition, resets gpu.DeviceID) string {
	owners := s.Host.Ownership
	taken := func(local bool) int {
		return slices.IndexFunc(owners.GPUs, func(o inventory.GPUOwner) bool { return o.Taken == inventory.Reset && o.Local == local })
	}
	other, earlier := taken(false), taken(true)
	switch released := owners.DriverReleased; {
	case slices.ContainsFunc(all, func(c health.Condition) bool { return c.Reason == health.ReasonMaintenance }):
		return "maintenance"
	case earlier >= 0 && resets == "":
		id := owners.GPUs[earlier].GPU
		return "an earlier process of the agent has begun a reset of " + string(id) + ", which may still run"
	case released != "" && released != resets:
		return "another agent of the node resets " + string(released)
	case other >= 0:
		return "another agent of the node resets " + string(owners.GPUs[other].GPU)
	case s.Snapshot.Driver.State != gpu.DriverReady:
		return "the driver is not ready: " + s.Snapshot.Driver.Reason
	}
	return ""
}

// faults fills in what the conditions of a node show of a GPU.
func faults(g *reset.GPU, all []health.Condition) {
	worst := health.Healthy
	for i := range all {
		c := &all[i]
		if c.At.GPU != g.ID || !c.IgnoredUntil.IsZero() {
			continue
		}
		g.ProofFailed = g.ProofFailed || c.Reason == health.ReasonProofFailed
		g.NeedsService = g.NeedsService || c.Reason == health.ReasonNeedsService
		g.TakesWork = g.TakesWork && c.State <= health.Degraded
		if c.State > worst {
			worst, g.Cause, g.Repair = c.State, c.Cause(), c.Repair()
		}
	}
}

// islandOf returns the other GPUs of the island of one.
func islandOf(islands [][]gpu.DeviceID, id gpu.DeviceID) []gpu.DeviceID {
	for _, all := range islands {
		if slices.Contains(all, id) {
			return slices.DeleteFunc(slices.Clone(all), func(other gpu.DeviceID) bool { return other == id })
		}
	}
	return nil
}

// Take implements resetter.Node.
func (r resetting) Take(ctx context.Context, id gpu.DeviceID) (resetter.Taken, error) {
	t, err := r.Agent.Take(ctx, id, inventory.Reset)
	switch {
	case errors.Is(err, ownership.ErrEnding):
		return nil, resetter.ErrEnding
	case err != nil:
		return nil, err // not t: a nil *Taken in an interface is not nil
	}
	return t, nil
}

// Target implements resetter.Node. A GPU that is divided has the number of its own device node, too.
func (r resetting) Target(id gpu.DeviceID) (gpureset.Target, bool) {
	for _, d := range r.Monitor.State().Snapshot.Devices {
		if d.ID == id {
			return gpureset.Target{GPU: id, Minor: d.Minor, Persistence: d.PersistenceMode == gpu.Enabled}, d.Minor >= 0
		}
	}
	return gpureset.Target{}, false
}

// IsAgent implements resetter.Node. What takes the name of an agent is found when the agents have closed the driver.
func (resetting) IsAgent(c gpureset.Client) bool {
	return c.PID == os.Getpid() || slices.Contains(ownership.Agents(), c.Name)
}

// EndsWhenTaken implements resetter.Node. What takes the name of a control daemon is found when the GPU was taken.
func (r resetting) EndsWhenTaken(id gpu.DeviceID, c gpureset.Client) bool {
	inv := r.Current()
	pools := mpsPools(id, inv)
	return use.IsMPS(c.Name) && len(pools) > 0 && !slices.ContainsFunc(pools, func(pool string) bool {
		_, work := poolWork(pool, inv, r.Use())
		return work != ""
	})
}

// WasReset implements resetter.Node.
func (r resetting) WasReset(id gpu.DeviceID) {
	r.Report(health.Observation{At: gpu.WholeGPU(id), Kind: health.WasReset})
}
