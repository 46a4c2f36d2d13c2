package publisher

import (
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// The waits between tries grow by a half each time, up to the longest, and each is a random one between a half and the whole of that: the
// nodes of a cluster do not come back in step.
const (
	retryFirst     = time.Second
	unreachedMost  = 5 * time.Second  // without a connection: a try costs the server nothing, and a taint may wait for the end of the outage
	unansweredMost = 30 * time.Second // the server has the connection, and fails or has too much to do
	refusedMost    = time.Minute      // RBAC, an admission policy or validation refuses it; a server that starts, or a webhook that fails, does so for a moment

	refusedAgain = 10 * time.Second // until devices that the server refuses are tried again
	refusedLong  = 10 * time.Minute
)

// retries are the waits between tries of a request, by why it failed.
type retries struct{ unreached, unanswered, refused *backoff.ExponentialBackOff }

func newRetries() retries {
	return retries{newWait(retryFirst, unreachedMost), newWait(retryFirst, unansweredMost), newWait(retryFirst, refusedMost)}
}

func newWait(first, longest time.Duration) *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.RandomizationFactor = 1. / 3 // of the mean: 2/3 to 4/3 are a half and the whole of the longest
	b.InitialInterval, b.MaxInterval = first, longest*3/4
	return b
}

// next is the wait after a failure; nil is a watch that ended at once.
func (r retries) next(err error) time.Duration {
	switch {
	case errors.Is(err, kubeapi.ErrUnreached):
		return r.unreached.NextBackOff()
	case errors.Is(err, kubeapi.ErrForbidden), errors.Is(err, kubeapi.ErrInvalid):
		return r.refused.NextBackOff()
	}
	return kubeapi.WaitAtLeast(err, r.unanswered.NextBackOff())
}

func (r retries) reset() {
	r.unreached.Reset()
	r.unanswered.Reset()
	r.refused.Reset()
}
