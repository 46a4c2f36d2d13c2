package deviceplugin

import (
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Answer is the Allocate response for device IDs of a resource, as a running agent with these options would give it, or the error with
// which it would refuse them. Of the options those of an answer count: DevRoot, MPSRoot, Lists. Nothing is recorded.
func Answer(inv *inventory.Allocatable, resource string, ids []string, o Options) (*v1beta1.ContainerAllocateResponse, error) {
	plan, err := inv.Reserve(unitIDs(ids)...)
	if err == nil {
		err = checkResource(resource, plan.Units)
	}
	if err != nil {
		return nil, err
	}
	return allocateResponse(resource, plan, o), nil
}
