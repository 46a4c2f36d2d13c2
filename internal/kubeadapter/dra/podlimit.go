package dra

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// A pod in a pool with a limit of memory is limited by its control group, which the kubelet makes before it calls Prepare (pkg/kubelet/kubelet.go, EnsureExists
// before the containers' SyncPod), and removes after Unprepare. So the limit is there before the first container, and holds for all of them together.
//
// Which pods are to be limited follows from the records of claims (LimitedPods), which the limiter reads at each pass, and after each change. Prepare and Unprepare
// only wait for it.

// Limiter limits the device memory of pods: *limits.Limiter.
type Limiter interface {
	// LimitPod limits the group of a pod on a GPU to what all its claims have there, of which this is one: Work.Claim, with so many bytes. The same call again
	// checks the limit. An error means that the pod is not limited so far; gpu.ErrNoDriver, that the driver is not open, and limit.ErrElsewhere, that another
	// process of the agent has to end first: both pass. With errors.ErrUnsupported it never is.
	LimitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID, bytes uint64) error

	// ReleasePod ends what a claim that is not prepared any more has of a pod's limits.
	ReleasePod(ctx context.Context, pod holders.Work) error
}

// LimitedPods returns the limits of pods by all claims that are prepared in this boot, or of which the preparation has begun. complete is that there are no others. It
// reads the folder of the records.
func (a *Adapter) LimitedPods() (pods []limit.Pod, complete bool) {
	if !a.isLoaded() {
		return nil, false
	}
	store := a.store.Load()
	err := store.Refresh() // during an update another process may have prepared some
	for _, c := range store.All() {
		pod, bytes := c.Limited()
		if !c.Holds(a.opts.BootID) || pod.ID == "" {
			continue
		}
		for id, n := range bytes {
			pods = append(pods, limit.Pod{Work: pod, GPU: id, Bytes: n})
		}
	}
	return pods, err == nil && len(store.Unread()) == 0
}

// userPod is the resource of a pod among the users of a claim.
const userPod = "pods"

// podToLimit returns the pod of a claim whose results have limits; nil if none has one, or need not have one and can't.
func (a *Adapter) podToLimit(users []kubeapi.ClaimConsumerReference, c prepared.Claim) (*prepared.Pod, error) {
	if a.opts.Limits == nil || !slices.ContainsFunc(c.Results, func(r prepared.Result) bool { return r.Memory > 0 }) {
		return nil, nil //nolint:nilnil // see above
	}
	if len(users) == 1 && users[0].Resource == userPod {
		return &prepared.Pod{Name: users[0].Name, UID: users[0].UID}, nil
	}
	return nil, a.notLimited(users, c)
}

// notLimited is the error of a claim with users that can't be limited; nil if none of them must be.
func (a *Adapter) notLimited(users []kubeapi.ClaimConsumerReference, c prepared.Claim) error {
	err := &UsersError{users}
	if slices.ContainsFunc(c.Results, func(r prepared.Result) bool { return r.MustLimit }) {
		return err
	}
	a.opts.Log.Warn("pods are not limited", "namespace", c.Namespace, "claim", c.Name, "uid", c.UID, "error", err)
	return nil
}

// mustLimit reports whether a claim must not be prepared without a limit on a GPU.
func mustLimit(c prepared.Claim, id gpu.DeviceID) bool {
	return slices.ContainsFunc(c.Results, func(r prepared.Result) bool { return r.MustLimit && r.At.GPU == id })
}

// limitPod limits the pod of a prepared claim, also if it was limited before: what has happened to its group since is not known. claim is what the API server
// has now, if it has answered. The caller has the lock of the claim.
func (a *Adapter) limitPod(ctx context.Context, c prepared.Claim, claim kubeapi.ResourceClaim, step *step) error {
	if c.Pod == nil || a.opts.Limits == nil {
		return nil
	}
	other := func(u kubeapi.ClaimConsumerReference) bool { return u.UID != c.Pod.UID }
	if users := claim.Status.ReservedFor; claim.Metadata.UID == c.UID && slices.ContainsFunc(users, other) {
		if err := a.notLimited(users, c); err != nil { // another pod has come beside it, which the kubelet may start without a call: the table of limits shows it
			return err
		}
	}
	step.set("the limit of the pod's memory is not set; does the driver respond?")
	pod, bytes := c.Limited()
	began, errs := time.Now(), []error(nil)
	for _, id := range slices.Sorted(maps.Keys(bytes)) {
		err := a.opts.Limits.LimitPod(ctx, pod, id, bytes[id])
		for a.limitsSoon(err, mustLimit(c, id), began) && watch.Sleep(ctx, a.limits.retry) {
			err = a.opts.Limits.LimitPod(ctx, pod, id, bytes[id])
		}
		switch {
		case err == nil:
		case mustLimit(c, id):
			errs = append(errs, &LimitError{id, err})
		default:
			a.opts.Log.Warn("pod is not limited", "namespace", pod.Namespace, "pod", pod.Name, "claim", c.Name, "id", id, "error", err)
		}
	}
	return join(errs)
}

// limitsSoon reports whether a limit that is not set is to be waited for. One that is required is while what keeps it away passes: the agent has just started, or is
// updated. Any other one is for some seconds, because the pod is never prepared again, unless it can't be set at all.
func (a *Adapter) limitsSoon(err error, required bool, began time.Time) bool {
	switch {
	case err == nil:
		return false
	case required:
		return errors.Is(err, gpu.ErrNoDriver) || errors.Is(err, limit.ErrElsewhere)
	}
	return !errors.Is(err, errors.ErrUnsupported) && time.Since(began) < a.limits.bestEffort
}

// releasePod ends the limits that a claim has brought its pod, before the kubelet removes the pod's group. The claim has no record of them any more, so the limiter
// ends them later if this fails: the pod would never end if Unprepare failed.
func (a *Adapter) releasePod(ctx context.Context, c prepared.Claim) {
	if c.Pod == nil || a.opts.Limits == nil {
		return
	}
	pod, _ := c.Limited()
	ctx, cancel := context.WithTimeout(ctx, a.limits.release)
	defer cancel()
	if err := a.opts.Limits.ReleasePod(ctx, pod); err != nil {
		a.opts.Log.Warn("limit of a pod not ended", "namespace", pod.Namespace, "pod", pod.Name, "claim", c.Name, "error", err)
	}
}
