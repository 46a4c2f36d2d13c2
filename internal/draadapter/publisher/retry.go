package publisher

import (
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// The waits between tries grow by a half each time, up to the longest, and each is a random one between a half and the whole of that: the
// nodes of a cluster do not come back in step.
const (
	retryFirst     = time.Second
	unreachedMost  = 5 * time.Second  // without a connection: a try costs the server nothing, and a taint may wait for the end of the outage
	unansweredMost = 30 * time.Second // the server has the connection, and fails or has too much to do
	refusedMost    = time.Minute      // RBAC or an admission policy refuses it; a server that starts does so for a moment
)

// retries are the waits between tries of a request, by why it failed.
type retries struct{ unreached, unanswered, refused *backoff.ExponentialBackOff }

func newRetries() retries {
	wait := func(longest time.Duration) *backoff.ExponentialBackOff {
		b := backoff.NewExponentialBackOff()
		b.RandomizationFactor = 1. / 3 // of the mean: 2/3 to 4/3 are a half and the whole of the longest
		b.InitialInterval, b.MaxInterval = retryFirst, longest*3/4
		return b
	}
	return retries{wait(unreachedMost), wait(unansweredMost), wait(refusedMost)}
}

// next is the wait after a failure; nil is a watch that ended at once.
func (r retries) next(err error) time.Duration {
	switch {
	case errors.Is(err, kubeapi.ErrUnreached):
		return r.unreached.NextBackOff()
	case errors.Is(err, kubeapi.ErrForbidden):
		return r.refused.NextBackOff()
	}
	return kubeapi.WaitAtLeast(err, r.unanswered.NextBackOff())
}

func (r retries) reset() {
	r.unreached.Reset()
	r.unanswered.Reset()
	r.refused.Reset()
}
