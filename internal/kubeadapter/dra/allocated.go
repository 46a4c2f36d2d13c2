package dra

import (
	"fmt"
	"math/big"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
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
		u.ID, u.Sharing, u.Replica, u.Memory = inventory.UnitID(u.Device.ID), inventory.Sharing{}, 0, 0
	case u.Sharing.Mode == inventory.Exclusive:
		return u, &NotSharedError{r.Device}
	}
	return u, nil
}

// setShare stores what a result has of a shared unit.
func setShare(r *prepared.Result, one kubeapi.DeviceRequestAllocationResult, u inventory.Unit) (err error) {
	r.Sharing = u.Sharing.Mode.String()
	if r.Shares, err = consumedShares(one); err != nil || one.AdminAccess {
		return err
	}
	r.Memory, err = consumedMemory(one, u, r.Shares)
	r.MustLimit = r.Memory > 0 && u.Sharing.Limit == inventory.LimitRequired
	return err
}

// consumedShares returns how many shares of its device a result has: of one that is a device of its own, or has no such capacity, 1. A part of
// a share is one.
func consumedShares(r kubeapi.DeviceRequestAllocationResult) (int, error) {
	amount, err := consumed(r, "shares")
	if err != nil || amount == nil {
		return 1, err
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

// consumedMemory returns to how many bytes the pod of a claim is limited for a result with so many shares of a unit: what the scheduler has counted. That is none
// without consumable capacity, and for a claim that was allocated before the policy had limits; then it is what its shares have by the policy.
func consumedMemory(r kubeapi.DeviceRequestAllocationResult, u inventory.Unit, shares int) (uint64, error) {
	if u.Memory == 0 {
		return 0, nil
	}
	amount, err := consumed(r, "memory")
	if err != nil {
		return 0, err
	}
	most, n := u.Device.Memory/gpu.MiB, new(big.Int)
	if amount != nil { // whole MiB by the step of the capacity
		n.Div(amount.Num(), new(big.Int).Mul(amount.Denom(), big.NewInt(gpu.MiB)))
	}
	switch {
	case n.Sign() <= 0:
		n.Mul(new(big.Int).SetUint64(u.Memory/gpu.MiB), big.NewInt(int64(shares)))
		fallthrough
	case n.IsUint64():
		return min(n.Uint64(), most) * gpu.MiB, nil
	}
	return most * gpu.MiB, nil
}

// consumed returns how much of a capacity a result has; nil if it has no such capacity.
func consumed(r kubeapi.DeviceRequestAllocationResult, capacity string) (*big.Rat, error) {
	for _, name := range []string{capacity, resourceslice.Driver + "/" + capacity} {
		text, ok := r.ConsumedCapacity[name]
		if !ok {
			continue
		}
		amount, ok := kubeapi.ParseQuantity(text)
		if !ok {
			return nil, fmt.Errorf("device %s: the consumed capacity %s is %q, which is no amount", r.Device, name, text)
		}
		return amount, nil
	}
	return nil, nil //nolint:nilnil // see above
}

// maxShares is more than any device has, and can be added up.
const maxShares = 1 << 31
