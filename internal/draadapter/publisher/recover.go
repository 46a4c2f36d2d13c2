package publisher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// recover handles the failure of a write: what is in the API is another thing than was observed.
func (p *Publisher) recover(ctx context.Context, w write, err error) (again bool, _ error) {
	name := w.slice.Metadata.Name
	switch {
	case errors.Is(err, kubeapi.ErrNotFound) && !unserved(err):
		p.seen.gone(name)
		return true, p.surprised(err)
	case errors.Is(err, kubeapi.ErrConflict), errors.Is(err, kubeapi.ErrExists):
	default:
		return false, err
	}
	p.task.Heartbeat(callTimeout)
	is, getErr := p.opts.API.Slice(ctx, name)
	switch {
	case errors.Is(getErr, kubeapi.ErrNotFound):
		p.seen.gone(name)
	case getErr != nil:
		return false, getErr
	case is.Spec.NodeName != p.opts.Node || is.Spec.Driver != p.opts.Driver:
		return false, fmt.Errorf("%w: it is of node %q and driver %q", err, is.Spec.NodeName, is.Spec.Driver)
	default:
		p.seen.wrote(is)
	}
	return true, p.surprised(err)
}

// surprised returns err if the API was another than observed many times in a row.
func (p *Publisher) surprised(err error) error {
	if p.surprises++; p.surprises%5 == 0 {
		return err
	}
	return nil
}

func unserved(err error) bool {
	var status *kubeapi.StatusError
	return errors.As(err, &status) && status.Unserved()
}

// interrupted takes what came in meanwhile and reports whether it asks for another plan.
func (p *Publisher) interrupted(observations <-chan observation) bool {
	before := p.due
	p.takeDevices()
	p.takeObservations(observations)
	return p.due.Before(before) && !p.due.After(time.Now())
}

// takeObservations takes what is there of the slices in the API.
func (p *Publisher) takeObservations(observations <-chan observation) {
	for {
		select {
		case o := <-observations:
			p.apply(o)
		default:
			return
		}
	}
}
