package kubeadapter

import (
	"context"
	"errors"
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// HeldByPodError means that the kubelet asks for a device ID that a pod has already.
type HeldByPodError struct {
	ID  inventory.UnitID
	Pod string // "namespace/name"
}

func (e *HeldByPodError) Error() string {
	return fmt.Sprintf("device ID %s: pod %s has it; the kubelet has lost that", e.ID, e.Pod)
}

// checkFree fails if a pod has one of the devices by the kubelet's own list, which the kubelet is asked for only if one was allocated before.
// A kubelet (1.37.1) gives a device out twice after this:
//
//	kubelet   Allocate for pod A . . . . . . . . . . . . . . A has the device | Allocate for pod B: free, as it is not marked
//	kubelet     device marked . waits for the plugin                          |
//	client                      List, after a pod has ended:                  |
//	                            marks made anew from what pods have           |
//
// (UpdateAllocatedDevices and allocateContainerResources in pkg/kubelet/cm/devicemanager.) After the error the kubelet makes the marks anew, and
// the pod is rejected. A device that a container gets from an init container of its pod is no such case: the list does not have init containers,
// but for those that continue to run, and their devices are not given on. Without an answer in time nothing is refused.
func (t *tracker) checkFree(ctx context.Context, keys []deviceKey) error {
	if t.socket == "" || !t.allocatedBefore(keys) {
		return nil
	}
	limit, cancel := context.WithTimeout(ctx, t.timings.checkTimeout)
	defer cancel()
	answer, err := podresources.List(limit, t.socket)
	if err != nil {
		t.requestQuery() // which finds out that there are no answers: then the next Allocate does not wait
		t.log.Warn("devices allocated without the kubelet's list of the pods that have them", "error", err)
		return nil
	}
	holders := make(map[deviceKey]string, len(answer.Devices))
	for _, d := range answer.Devices {
		holders[deviceKey{d.Resource, inventory.UnitID(d.ID)}] = d.Pod
	}
	var errs []error
	for _, k := range keys {
		if pod, held := holders[k]; held {
			errs = append(errs, &HeldByPodError{k.id, pod})
		}
	}
	return errors.Join(errs...)
}

// allocatedBefore reports whether a pod may have one of the devices. If the kubelet did not answer last, it is not asked, as an Allocate must
// not wait.
func (t *tracker) allocatedBefore(keys []deviceKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.unavailable {
		return false
	}
	for _, k := range keys {
		if _, known := t.allocations.byKey[k]; known || t.allocations.pods[k] != "" {
			return true
		}
	}
	return false
}
