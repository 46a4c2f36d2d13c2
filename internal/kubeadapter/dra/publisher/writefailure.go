package publisher

import (
	"context"
	"errors"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// handleFailure brings the cache up to date after a write that has failed because the API has another slice than the cache.
func (p *Publisher) handleFailure(ctx context.Context, w write, err error) (again bool, _ error) {
	name := w.slice.Metadata.Name
	switch {
	case errors.Is(err, kubeapi.ErrNotFound) && !unserved(err):
		p.cache.recordDelete(name)
		return true, p.countStale(err)
	case errors.Is(err, kubeapi.ErrConflict), errors.Is(err, kubeapi.ErrExists):
	default:
		return false, err
	}
	is, getErr := answer(ctx, p, func() (kubeapi.ResourceSlice, error) { return p.opts.API.Slice(ctx, name) })
	switch {
	case errors.Is(getErr, kubeapi.ErrNotFound):
		p.cache.recordDelete(name)
	case getErr != nil:
		return false, getErr
	case is.Spec.NodeName != p.opts.Node || is.Spec.Driver != p.opts.Driver:
		i, _ := p.names.index(name)
		p.otherNames[i] = p.names.alternative(i)
		p.log.Warn("another client has the name of a resource slice: it gets another one",
			"slice", name, "node-of-it", is.Spec.NodeName, "driver-of-it", is.Spec.Driver, "instead", p.otherNames[i])
	default:
		p.cache.recordWrite(is)
	}
	return true, p.countStale(err)
}

// countStale counts a write that failed because the cache was behind the API. It returns err for each fifth in a row.
func (p *Publisher) countStale(err error) error {
	if p.staleWrites++; p.staleWrites%5 == 0 {
		return err
	}
	return nil
}

func unserved(err error) bool {
	status, ok := errors.AsType[*kubeapi.StatusError](err)
	return ok && status.Unserved()
}

// applyChanges applies the changes that have arrived.
func (p *Publisher) applyChanges(changes <-chan change) {
	for {
		select {
		case c := <-changes:
			p.apply(c)
		default:
			return
		}
	}
}
