package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// pausedFor is in the value of a label while the GPU Operator changes the driver (k8s-driver-manager: paused-for-driver-upgrade) or the MIG layout
// (mig-parted: paused-for-mig-change). They put it in the place of true, or append it to another value.
const pausedFor = "paused-for-"

// pauseRetry is the time before another attempt to release or open the driver.
const pauseRetry = 10 * time.Second

// pause releases the driver while a label of the node announces a change of the driver, as an operator does by quiesce, and opens it again
// afterwards. A maintenance that an operator has begun before is left alone. That this one is its own is on disk, beside the maintenance.
type pause struct {
	label    string
	node     *nodeWatch
	file     string // exists while the maintenance is that of the label; "" = nothing is kept
	agent    *agent.Agent
	own      bool // the maintenance is that of the label; of the goroutine of run
	problems problemset.Set
	log      *slog.Logger
}

func (r *run) newPause(a *agent.Agent) *pause {
	p := &pause{label: r.settings.PauseLabel, node: r.node, agent: a, problems: problemset.Set{Log: r.log}, log: r.log}
	if dir := r.settings.Health.StateDir; dir != "" {
		p.file = filepath.Join(dir, Name+".pause.json")
		_, err := os.Stat(p.file)
		p.own = err == nil
	}
	return p
}

// run follows the label until ctx ends.
func (p *pause) run(ctx context.Context) error {
	reconcile.Loop{On: []reconcile.Source{p.node.labels.Changed}}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		labels := p.node.labels.Load()
		if labels == nil {
			return reconcile.Never
		}
		err := p.follow(ctx, labels[p.label])
		if err == nil || ctx.Err() != nil {
			p.problems.End(problem.Pause, "", "")
			if p.own {
				return statefile.LookEvery
			}
			return reconcile.Never
		}
		text := fmt.Sprintf("node label %s = %q: %v", p.label, labels[p.label], err)
		p.problems.Put(problem.Problem{Code: problem.Pause, Text: text}, slog.LevelWarn, text)
		return pauseRetry
	})
	return nil
}

// follow releases the driver or opens it again, as a value of the label asks for.
func (p *pause) follow(ctx context.Context, value string) error {
	active := p.agent.State().Maintenance.Active(time.Now())
	switch paused := strings.Contains(value, pausedFor); {
	case paused && (p.own || !active):
		if err := p.setOwn(true); err != nil {
			return err
		}
		if err := p.agent.Quiesce(ctx, time.Time{}); err != nil {
			return fmt.Errorf("the driver is not released, for which the GPU Operator waits: %w", err)
		}
		if !active {
			p.log.Warn("driver released, because of a label of the node", "label", p.label, "value", value)
		}
	case !paused && p.own:
		if err := p.agent.Resume(ctx); err != nil && !errors.Is(err, monitor.ErrNotQuiesced) {
			return fmt.Errorf("the driver is not opened again: %w", err)
		}
		p.log.Info("driver opened again, because of a label of the node", "label", p.label, "value", value)
		return p.setOwn(false)
	}
	return nil
}

// setOwn records whether the maintenance is that of the label.
func (p *pause) setOwn(own bool) error {
	missing := own && p.file != "" && statefile.IsMissing(p.file)
	if own == p.own && !missing {
		return nil
	}
	var err error
	switch {
	case p.file == "":
	case own:
		err = statefile.Write(p.file, []byte("{}\n"))
	default:
		err = os.Remove(p.file)
	}
	if err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("%s can't be written: %w", p.file, err)
	}
	p.own = own
	return nil
}
