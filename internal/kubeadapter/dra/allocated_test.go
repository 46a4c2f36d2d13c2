package dra

import (
	"os"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// sharesAsDevices publishes each share as a device.
func sharesAsDevices(a *Adapter) { a.opts.SharesAsDevices = watch.NewValue(true) }

// share makes a result the n-th share of its device, where shares are devices.
func share(n string) func(*kubeapi.DeviceRequestAllocationResult) {
	return func(r *kubeapi.DeviceRequestAllocationResult) { r.Device += "-s" + n }
}

// taintsOf are the keys of the taints that a device has in the slices, without the domain; "absent" if it is not there.
func (r *rig) taintsOf(name string) string {
	r.Helper()
	for _, d := range r.adapter.Desired().Load() {
		if d.Name == name {
			var keys []string
			for _, t := range d.Taints {
				keys = append(keys, strings.TrimPrefix(t.Key, resourceslice.Driver+"/"))
			}
			return strings.Join(keys, ",")
		}
	}
	return "absent"
}

// A GPU that was allocated as a whole is prepared as a whole, or not at all, also if the policy shares it by then: it never is in use together
// with a share. That holds for both forms of shares, over a restart, and if the record was lost.
func TestWholeGPUIsNotPreparedWithAShare(t *testing.T) {
	whole, gpu0 := newClaim("whole", result(coretest.GPU(0))), deviceName(coretest.GPU(0))
	for name, c := range map[string]struct {
		mode   inventory.SharingMode
		change func(*Adapter)
		share  kubeapi.ResourceClaim
		shares string // a device of shares
	}{
		"shares are devices":           {inventory.TimeSlicing, sharesAsDevices, newClaim("share", result(coretest.GPU(0), share("0"))), gpu0 + "-s1"},
		"shares are devices, MPS":      {inventory.MPS, sharesAsDevices, newClaim("share", result(coretest.GPU(0), share("0"))), gpu0 + "-s1"},
		"shares are a capacity":        {inventory.TimeSlicing, func(*Adapter) {}, newClaim("share", result(coretest.GPU(0), consuming("1", "1"))), gpu0},
		"shares are a capacity of MPS": {inventory.MPS, func(*Adapter) {}, newClaim("share", result(coretest.GPU(0), consuming("1", "1"))), gpu0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()), c.change)
			r.api.put(whole)
			r.api.put(c.share)
			r.src.Set(build(coretest.GPUs(1), health.Ledger{}, config(shared(c.mode, 4))))

			r.mustPrepare("share")
			r.mustRefuse("whole", "held by other work")
			r.must(r.unprepare("share"))

			if names := r.mustPrepare("whole")[0].GetCdiDeviceIds(); len(names) != 1 {
				t.Errorf("the whole GPU as a client of an MPS control daemon: %q", names)
			}
			held := func() {
				t.Helper()
				r.mustRefuse("share", "held by other work")
				r.await("the whole GPU, withdrawn", func() bool { return strings.Contains(r.taintsOf(gpu0), "withdrawn") })
				if taints := r.taintsOf(c.shares); c.shares != gpu0 && taints != "held" {
					t.Errorf("taints of a share: %q", taints)
				}
			}
			held()
			r.start()
			held()

			p := &pods{}
			p.set(nil, podClaim("whole", gpu0))
			r.stop()
			r.must(os.RemoveAll(r.adapter.claimsDir()))
			r.change = append(r.change, func(a *Adapter) { a.opts.PodClaims = p.list })
			r.start()
			r.await("the record again", func() bool { return r.record("whole").UID != "" })
			held()
			r.must(r.unprepare("whole"))
			p.set(nil)
			r.mustPrepare("share")
			r.wantHolder(0, "claim default/share")
		})
	}
}

// The published form of a whole GPU that is prepared while the policy shares it has what every device has: an expression that reads an attribute
// or a capacity which one device lacks is an error for the pod.
func TestWholeGPUStaysInTheSlices(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.TimeSlicing, 4))), sharesAsDevices)
	r.api.put(newClaim("whole", result(coretest.GPU(0))))
	r.mustPrepare("whole")
	name := deviceName(coretest.GPU(0))
	r.await("the whole GPU", func() bool { return r.taintsOf(name) != "absent" })
	devices := resourceslice.ByName(r.adapter.Desired().Load())
	whole, part := devices[name], devices[name+"-s0"]
	if text := func(d kubeapi.Device, attribute string) string { return *d.Attributes[attribute].String }; text(whole, "type") != "gpu" || text(whole, "sharing") != "exclusive" ||
		text(whole, "productName") != text(part, "productName") || whole.Capacity["memory"].Value != part.Capacity["memory"].Value {
		t.Errorf("%+v", whole)
	}
}

// A share of a device that is not shared any more is not prepared: the claim would get a whole GPU that the scheduler gives to another one.
func TestShareOfAGPUThatIsNotShared(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Adapter)
		claim  kubeapi.ResourceClaim
		want   string
	}{
		"shares are devices":    {sharesAsDevices, newClaim("a", result(coretest.GPU(0), share("0"))), "-s0: not offered by this node"},
		"shares are a capacity": {func(*Adapter) {}, newClaim("a", result(coretest.GPU(0), consuming("1", "1"))), "allocated as a share, and is not shared any more"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()), c.change)
			r.api.put(c.claim)
			r.mustRefuse("a", c.want)
			r.must(r.unprepare("a"))
			r.src.Set(build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.TimeSlicing, 4))))
			r.mustPrepare("a")
		})
	}
}
