package kube

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// kubeAPIOptions are what the settings mean for the client of Kubernetes' API.
func kubeAPIOptions(s config.Kubernetes) kubeapi.Options {
	return kubeapi.Options{Address: s.DRA.API.Address, TokenFile: s.DRA.API.TokenFile, CAFile: s.DRA.API.CAFile}
}

// userAgent is this program in requests to Kubernetes' API.
func userAgent(version string) string { return Name + "/" + version }

// openAPI makes the client of Kubernetes' API, if the settings need one. With device plugins only an operator's explicit settings of the API
// ask for it.
func (r *run) openAPI() error {
	s := r.settings
	if s.DRA.Node == "" || !r.dra && !s.DRA.API.Configured() {
		return nil
	}
	o := kubeAPIOptions(s)
	o.Agent, o.Log = userAgent(r.opts.Version), r.log
	api, err := kubeapi.New(o)
	switch {
	case err == nil:
		r.api = api
	case s.Core.API == inventory.DRA:
		return err
	default:
		r.log.Warn("Kubernetes' API can't be called", "error", err)
	}
	return nil
}

// removeSlices deletes the ResourceSlices that an earlier run with the API dra has left: a device must not be offered through both APIs. It
// returns when there is none, or ctx ends.
func (r *run) removeSlices(ctx context.Context) error {
	retry := backoff.NewExponentialBackOff()
	retry.MaxInterval = time.Minute
	for logged := ""; ; {
		n, err := publisher.Remove(ctx, r.api, r.settings.DRA.Node, resourceslice.Driver)
		switch {
		case n > 0:
			r.log.Info("resource slices of an earlier run deleted: the API is device-plugin", "slices", n)
		case err == nil:
			return nil
		}
		if err != nil && ctx.Err() == nil && err.Error() != logged {
			logged = err.Error()
			r.log.Warn("resource slices of an earlier run can't be deleted, retrying", "error", err)
		}
		if !watch.Sleep(ctx, retry.NextBackOff()) {
			return nil
		}
	}
}
