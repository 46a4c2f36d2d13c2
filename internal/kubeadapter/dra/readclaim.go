package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// readClaim reads the claim from the API server. While that does not answer, it tries again until ctx ends: without a connection, which costs
// the server nothing, each second at last, and else ever more rarely, and not before the server wants it.
func (a *Adapter) readClaim(ctx context.Context, ref claimRef) (kubeapi.ResourceClaim, error) {
	began := time.Now()
	unreached, unanswered := a.newRetry(3), a.newRetry(32)
	for {
		limit, cancel := context.WithTimeout(ctx, a.limits.apiCall)
		claim, err := a.opts.API.Claim(limit, ref.namespace, ref.name)
		cancel()
		switch {
		case err == nil && claim.Metadata.UID != ref.uid:
			return claim, &UIDError{ref.namespace + "/" + ref.name, ref.uid, claim.Metadata.UID}
		case err == nil && claim.Status.Allocation == nil:
			return claim, ErrNotAllocated
		case err == nil:
			return claim, nil
		case errors.Is(err, kubeapi.ErrNotFound):
			return claim, fmt.Errorf("the claim does not exist any more: %w", err)
		case errors.Is(err, kubeapi.ErrForbidden), errors.Is(err, kubeapi.ErrInvalid):
			return claim, err
		}
		wait := unreached.NextBackOff()
		if !errors.Is(err, kubeapi.ErrUnreached) {
			wait = kubeapi.WaitAtLeast(err, unanswered.NextBackOff())
		}
		if !watch.Sleep(ctx, wait) {
			return claim, &PendingError{What: "the API server does not answer", Waited: time.Since(began), Err: err}
		}
	}
}

// newRetry returns waits that grow to a multiple of the first, at random, so that claims which wait do not ask in step.
func (a *Adapter) newRetry(most time.Duration) *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = a.limits.apiRetry, most*a.limits.apiRetry
	return b
}

// allocatedAnew reads the claim of a record from the API server once, and reports whether it was allocated to other devices since, or to other
// pods than the one that is limited for it. A record outlives its allocation if the kubelet never asked to unprepare the claim, because its pod
// was deleted by force and its own record lost, or because it had no answer to Prepare: the new pod would get devices that are another's by now,
// or no limit.
//
// The kubelet has read the claim right before its call, and waits for the answer: if the server does not answer soon, or has no allocation
// of the claim, the record counts.
func (a *Adapter) allocatedAnew(ctx context.Context, ref claimRef, c prepared.Claim) (kubeapi.ResourceClaim, bool) {
	limit, cancel := context.WithTimeout(ctx, a.limits.repeat)
	defer cancel()
	claim, err := a.opts.API.Claim(limit, ref.namespace, ref.name)
	if err != nil || claim.Metadata.UID != ref.uid || claim.Status.Allocation == nil {
		return claim, false
	}
	was, is := recorded(c), allocated(claim.Status.Allocation.Devices.Results)
	if slices.Equal(was, is) && !hasEnded(c.Pod, claim.Status.ReservedFor) {
		return claim, false
	}
	a.opts.Log.Warn("prepared claim was allocated anew, or its pod has ended, and is prepared again: the kubelet has not asked to unprepare it", "namespace", ref.namespace,
		"claim", ref.name, "uid", ref.uid, "before", deviceNames(was), "now", deviceNames(is))
	return claim, true
}

// hasEnded reports whether the pod whose memory a record limits has ended, and another one has its claim.
func hasEnded(p *prepared.Pod, users []kubeapi.ClaimConsumerReference) bool {
	return p != nil && len(users) > 0 && !slices.ContainsFunc(users, func(u kubeapi.ClaimConsumerReference) bool { return u.UID == p.UID })
}

// allocatedDevice is what identifies a result of an allocation: a share gets another ID each time.
type allocatedDevice struct{ request, pool, device, share string }

func recorded(c prepared.Claim) (all []allocatedDevice) {
	for _, r := range c.Results {
		all = append(all, allocatedDevice{r.Request, r.Pool, r.Device, r.ShareID})
	}
	return all
}

func allocated(results []kubeapi.DeviceRequestAllocationResult) (all []allocatedDevice) {
	for _, r := range results {
		if r.Driver == resourceslice.Driver {
			request, _, _ := strings.Cut(r.Request, "/") // as in the record
			all = append(all, allocatedDevice{request, r.Pool, r.Device, r.ShareID})
		}
	}
	return all
}

func deviceNames(all []allocatedDevice) (names []string) {
	for _, d := range all {
		names = append(names, d.device)
	}
	return names
}
