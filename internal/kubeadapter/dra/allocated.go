package dra

import (
	"fmt"
	"math/big"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// A policy may change between the allocation of a claim and its Prepare. What was allocated is in the results: a share of a device that
// several claims may have has an ID (structured/internal in k8s.io/dynamic-resource-allocation 0.34 to 0.37 makes one for each such device,
// and for no other), and a share that is a device of its own has its number in the name.

// isWhole reports whether a result is the whole device of a unit.
func isWhole(r kubeapi.DeviceRequestAllocationResult, u inventory.Unit) bool {
	return r.ShareID == "" && r.Device == resourceslice.DeviceName(u)
}

// asAllocated returns the unit of a result as it was allocated: the whole device, although it is shared by now, or a share. What was
// allocated as a share is never the whole device: the scheduler gives that to others. Admin access has the device as it is.
func asAllocated(r kubeapi.DeviceRequestAllocationResult, u inventory.Unit) (inventory.Unit, error) {
	switch {
	case r.AdminAccess:
	case isWhole(r, u):
		u.ID, u.Sharing, u.Replica = inventory.UnitID(u.Device.ID), inventory.Sharing{}, 0
	case u.Sharing.Mode == inventory.Exclusive:
		return u, &NotSharedError{r.Device}
	}
	return u, nil
}

// consumedShares returns how many shares of its device a result has: of one that is a device of its own, or has no such capacity, 1. A part of
// a share is one.
func consumedShares(r kubeapi.DeviceRequestAllocationResult) (int, error) {
	for _, name := range []string{"shares", resourceslice.Driver + "/shares"} {
		text, ok := r.ConsumedCapacity[name]
		if !ok {
			continue
		}
		amount, ok := kubeapi.ParseQuantity(text)
		if !ok {
			return 0, fmt.Errorf("device %s: the consumed capacity %s is %q, which is no amount", r.Device, name, text)
		}
		n, part := new(big.Int).DivMod(amount.Num(), amount.Denom(), new(big.Int))
		if part.Sign() > 0 {
			n.Add(n, big.NewInt(1))
		}
		if !n.IsInt64() || n.Int64() > maxShares {
			return maxShares, nil
		}
		return max(int(n.Int64()), 1), nil
	}
	return 1, nil
}

// maxShares is more than any device has, and can be added up.
const maxShares = 1 << 31
