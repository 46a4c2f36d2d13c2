package prover

import (
	"context"
	"errors"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// errWantedBack is the cause of a proof that ended because its GPU is wanted back.
var errWantedBack = errors.New("the GPU is wanted back")

// prove takes a GPU and runs the command.
func (p *Prover) prove(ctx context.Context, b proof.Begin) ended {
	end := ended{End: proof.End{GPU: b.GPU, Number: b.Number, Outcome: proof.Cancelled}, release: func() {}}
	taken, err := p.take(ctx, b)
	if err != nil {
		end.Outcome, end.Detail = p.notTaken(ctx, b.GPU), err.Error()
		return end
	}
	end.release = taken.Release
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-taken.WantedBack():
			cancel(errWantedBack)
		case <-ctx.Done():
		}
	}()
	p.mu.Lock()
	p.taken = append(p.taken, b)
	p.mu.Unlock()
	watch.Notify(p.changed)
	p.opts.Log.Info("proof begins", "id", b.GPU, "reason", b.Reason)
	r := p.opts.Command(ctx, proofcommand.Proof{
		Command: p.opts.Policy.Command, GPU: b.GPU, Reason: b.Reason.String(), Timeout: p.opts.Policy.Timeout,
		LibraryPath: p.opts.LibraryPath, Folder: p.opts.Folder,
	})
	if len(r.Left) > 0 {
		p.opts.Log.Error("processes of a proof can't be ended, and may still use the GPU", "id", b.GPU, "pids", r.Left)
	}
	if r.Outcome == proofcommand.CouldNotRun {
		p.opts.Log.Warn("output of the check", "id", b.GPU, "output", lastOf(r.Output))
	}
	end.Outcome, end.Took, end.Summary, end.Values, end.Detail = outcomes[r.Outcome], r.Duration, r.Summary, r.Values, r.Text
	return end
}

// take takes a GPU, and looks once more whether its proof may begin.
func (p *Prover) take(ctx context.Context, b proof.Begin) (Taken, error) {
	ctx, cancel := context.WithTimeout(ctx, proof.TakeWithin)
	defer cancel()
	taken, err := p.opts.Node.Take(ctx, b.GPU)
	if err != nil {
		return nil, err
	}
	if why, ok := p.opts.Policy.Still(p.Decision().State, p.opts.Node.See(), b.GPU); !ok {
		taken.Release()
		return nil, errors.New(why.String())
	}
	return taken, nil
}

// notTaken is the outcome of a proof whose GPU was not taken: the check could not run if nothing is seen that has the GPU. Otherwise it would begin again
// and again, and a GPU that waits for it would take no work for ever.
func (p *Prover) notTaken(ctx context.Context, id gpu.DeviceID) proof.Outcome {
	if ctx.Err() != nil {
		return proof.Cancelled
	}
	if _, free := p.opts.Policy.Still(p.Decision().State, p.opts.Node.See(), id); !free {
		return proof.Cancelled
	}
	return proof.NotRun
}

// lastOf is the end of an output, for the log.
func lastOf(output string) string { return output[max(0, len(output)-1000):] }

var outcomes = map[proofcommand.Outcome]proof.Outcome{
	proofcommand.Passed: proof.Passed, proofcommand.Failed: proof.Failed, proofcommand.Cancelled: proof.Cancelled, proofcommand.CouldNotRun: proof.NotRun,
}
