package publisher

import (
	"context"
	"errors"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// recover handles the failure of a write: what is in the API is another thing than was observed.
func (p *Publisher) recover(ctx context.Context, w write, err error) (again bool, _ error) {
	name := w.slice.Metadata.Name
	switch {
	case errors.Is(err, kubeapi.ErrNotFound) && !unserved(err):
		p.seen.recordDelete(name)
		return true, p.surprised(err)
	case errors.Is(err, kubeapi.ErrConflict), errors.Is(err, kubeapi.ErrExists):
	default:
		return false, err
	}
	var is kubeapi.ResourceSlice
	getErr := p.await(ctx, func() (err error) {
		is, err = p.opts.API.Slice(ctx, name)
		return err
	})
	switch {
	case errors.Is(getErr, kubeapi.ErrNotFound):
		p.seen.recordDelete(name)
	case getErr != nil:
		return false, getErr
	case is.Spec.NodeName != p.opts.Node || is.Spec.Driver != p.opts.Driver:
		i, _ := p.names.index(name)
		p.taken[i] = p.names.other(i)
		p.log.Warn("another client has the name of a resource slice: it gets another one",
			"slice", name, "node-of-it", is.Spec.NodeName, "driver-of-it", is.Spec.Driver, "instead", p.taken[i])
	default:
		p.seen.recordWrite(is)
	}
	return true, p.surprised(err)
}

// surprised returns err if the API was another than observed many times in a row.
func (p *Publisher) surprised(err error) error {
	if p.unexpected++; p.unexpected%5 == 0 {
		return err
	}
	return nil
}

func unserved(err error) bool {
	var status *kubeapi.StatusError
	return errors.As(err, &status) && status.Unserved()
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
