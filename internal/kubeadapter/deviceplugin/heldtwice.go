package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// HeldByPodError means that the kubelet asks for a device ID that another pod has. Its text goes to the pod that does not get the device, and does
// not name the other one.
type HeldByPodError struct {
	ID  inventory.UnitID
	Pod string // "namespace/name", for the log; "" = not known
}

func (e *HeldByPodError) Error() string {
	return fmt.Sprintf("device ID %s: another pod has it, which the kubelet no longer records", e.ID)
}

// The kubelet (1.34 to 1.37) gives a device out twice if a client of its pod-resources API lists the pods while the device is being allocated: see
// podresources. This agent does not; others do (dcgm-exporter). So devices that a pod has or may have are preferred last, and those that a
// pod has, as the kubelet confirms, are refused. The kubelet makes its marks anew after an error, and the pod is rejected.

// preferable returns the IDs among which the preferred ones are chosen: those that no pod has or may have; if these are too few, with as many as
// are needed of those of which that is not known, those that were allocated first; and if that is too few, all. Before it takes more than
// the first, the kubelet's records are read: pods may have ended just now.
func (t *tracker) preferable(ctx context.Context, call podresources.Call, resource string, request preferredRequest) []inventory.UnitID {
	if t.pods.Absent() { // nothing shows the end of a pod
		return request.available
	}
	free, unknown := t.free(resource, request)
	if len(free) < request.size && len(free) < len(request.available) && t.pods.Latest().Err == nil {
		t.apply(call.Read(ctx))
		free, unknown = t.free(resource, request)
	}
	switch {
	case len(free) >= request.size:
		return free
	case len(free)+len(unknown) >= request.size:
		return append(free, unknown[:request.size-len(free)]...)
	}
	return request.available
}

// preferredRequest is what the kubelet asks to choose from.
type preferredRequest struct {
	available, must []inventory.UnitID // must is part of available
	size            int
}

// free returns the available IDs that no pod has, with those that must be taken, and those of which it is not known whether a pod has them, by the
// time of their Allocate.
func (t *tracker) free(resource string, r preferredRequest) (free, unknown []inventory.UnitID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range r.available {
		switch one, known := t.allocations.byKey[deviceKey{resource, id}]; {
		case !known || one.ended || slices.Contains(r.must, id):
			free = append(free, id)
		case !one.certain():
			unknown = append(unknown, id)
		}
	}
	slices.SortStableFunc(unknown, func(a, b inventory.UnitID) int {
		return t.allocations.byKey[deviceKey{resource, a}].allocatedAt.Compare(t.allocations.byKey[deviceKey{resource, b}].allocatedAt)
	})
	return free, unknown
}

// checkFree fails if a pod has one of the devices: by the latest list of the kubelet, and by its answer about that pod now, which unlike a list
// makes it lose nothing. A device that a container gets from an init container of its pod is no such case: the kubelet's list does not have init
// containers, but for those that continue to run, and their devices are not given on. Without an answer in time nothing is refused.
func (t *tracker) checkFree(ctx context.Context, keys []deviceKey) error {
	pods := t.podsOf(keys)
	if len(pods) == 0 {
		return nil
	}
	has, err := t.pods.Has(ctx, pods)
	if err != nil {
		t.log.Warn("devices allocated without the kubelet's answer about the pods that had them", "error", err)
	}
	var errs []error
	for _, k := range keys {
		if pod, held := has[podresources.Key{Resource: k.resource, ID: string(k.id)}]; held {
			errs = append(errs, &HeldByPodError{k.id, pod})
		}
	}
	return errors.Join(errs...)
}

// checkSince fails if one of the units was allocated since a call began, by another call at the same time: the kubelet allocates to one
// container after the other, but for a container that starts again after it has lost its record.
func (t *tracker) checkSince(began time.Time, units []inventory.Unit) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for i := range units {
		if at := t.allocations.byKey[keyOf(units[i])].allocatedAt; at.After(began) {
			errs = append(errs, &HeldByPodError{ID: units[i].ID})
		}
	}
	return errors.Join(errs...)
}

// podsOf returns the pods that had one of the devices by the latest list, sorted.
func (t *tracker) podsOf(keys []deviceKey) (pods []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range keys {
		pods = append(pods, t.allocations.byKey[k].pods...)
	}
	slices.Sort(pods)
	return slices.Compact(pods)
}
