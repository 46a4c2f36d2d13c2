//go:build !before1.37

package scheduling

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	devices "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const boot = "boot"

// churn is a node whose policy and MIG layout change while claims come and go.
type churn struct {
	*cluster
	random    *rand.Rand
	in        devices.Input
	published []kubeapi.Device
	granted   int
}

// Case 35: through random changes of the policy (shared, exclusive, pools, numbers of shares), of the MIG layout and of the GPUs that are
// offered, with claims alive, the scheduler's allocator never gives hardware to two claims, unless they have shares of one device, and
// not more of these than the device has when the last of them gets one.
func TestPolicyReloadsNeverDoubleBook(t *testing.T) {
	classes := classLister{}
	for _, c := range []core.Config{config(inventory.Rule{Pool: "a"}), config(inventory.Rule{Pool: "b"}), config(inventory.Rule{Sharing: timeSlicing(2)})} {
		maps.Copy(classes, printedClasses(t, c))
	}
	names := slices.Sorted(maps.Keys(classes))
	granted := 0
	for seed := range uint64(60) {
		c := &churn{cluster: newCluster(t, classes, nil), random: rand.New(rand.NewPCG(seed, 35))} //nolint:gosec // reproducible
		for step := range 25 {
			if c.random.IntN(3) == 0 || step == 0 {
				c.reload()
			}
			c.publish()
			for range c.random.IntN(8) {
				if c.claim(fmt.Sprintf("%d-%d", step, c.granted), names[c.random.IntN(len(names))]) {
					c.publish() // a prepared claim is on disk before the next change
				}
			}
			c.check(fmt.Sprintf("seed %d, step %d", seed, step))
			c.in.Prepared = slices.DeleteFunc(slices.Clone(c.in.Prepared), func(p prepared.Claim) bool {
				ends := c.random.IntN(2) == 0
				if ends {
					delete(c.allocated, p.UID)
				}
				return ends
			})
		}
		granted += c.granted
	}
	if granted < 500 {
		t.Errorf("only %d claims were granted", granted)
	}
	t.Log(granted, "claims were granted")
}

// reload changes the policy, the layout of the GPUs, or which of them are offered.
func (c *churn) reload() {
	r := c.random
	s := coretest.GPUs(3)
	if n := r.IntN(4); n < 3 {
		s = coretest.WithMIG(s, n, "1g.10gb", "3g.40gb")
	}
	var rules []inventory.Rule
	for n := range 3 {
		one := rule(inventory.Rule{Pool: []string{"", "a", "b"}[r.IntN(3)]}, n)
		if r.IntN(2) == 0 {
			one.Sharing = &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2 + r.IntN(3)}
			if r.IntN(2) == 0 {
				one.Sharing.Mode, one.Sharing.Memory = inventory.MPS, 10<<30
			}
		}
		rules = append(rules, one)
	}
	of := config(rules...)
	if r.IntN(5) == 0 {
		of.API = inventory.DevicePlugin
	}
	if r.IntN(3) == 0 {
		of.Exclude = []gpu.DeviceID{coretest.GPU(r.IntN(3))}
	}
	host := inventory.Host{MPS: []string{"a", "b", "gpu.mps", "mig-1g.10gb.mps", "mig-3g.40gb.mps"}}
	c.in.Allocatable = core.Build(s, health.Ledger{}, of).WithHost(host, inventory.OverlapWarn)
	c.in.BootID, c.in.SharesAsDevices = boot, r.IntN(6) == 0
}

func (c *churn) publish() {
	c.published = devices.Devices(c.in)
	c.slices = publish(c, c.published)
}

// claim allocates a claim, and prepares it if it is allocated.
func (c *churn) claim(uid, class string) (allocated bool) {
	results, err := c.allocate(uid, one(class))
	if err != nil {
		c.Fatal(err)
	}
	if results == nil {
		return false
	}
	c.granted++
	p := prepared.Claim{Version: 1, BootID: boot, UID: uid, Name: uid, State: prepared.Complete}
	for _, r := range results {
		u, ok := devices.Resolve(c.in.Allocatable, r.Device)
		if !ok {
			c.Fatalf("%s was allocated, and is no name of a unit", r.Device)
		}
		i := slices.IndexFunc(c.published, func(d kubeapi.Device) bool { return d.Name == r.Device })
		p.Results = append(p.Results, prepared.Result{
			Request: r.Request, Pool: r.Pool, Device: r.Device, Unit: u.ID, At: u.Device.At,
			Exclusive: u.Sharing.Mode == inventory.Exclusive, Published: devices.Published(c.published[i]),
		})
	}
	c.in.Prepared = append(c.in.Prepared, p)
	held := p.Results[0].Device
	if d := c.device(held); p.Results[0].Exclusive && d.AllowMultipleAllocations != nil {
		c.Fatalf("%s has %s, which is published in another form than that of its unit", uid, held)
	} else if shares, n := d.Capacity["shares"].Value, c.holders(held); d.AllowMultipleAllocations != nil && n > shares.Value() {
		c.Fatalf("%d claims have shares of %s, which has %s", n, held, shares.String())
	}
	return true
}

// holders returns how many claims have a device.
func (c *churn) holders(device string) (n int64) {
	for _, p := range c.in.Prepared {
		if p.Results[0].Device == device {
			n++
		}
	}
	return n
}

// check fails the test if two claims have the same hardware.
func (c *churn) check(about string) {
	c.Helper()
	for i, p := range c.in.Prepared {
		x := p.Results[0]
		for _, q := range c.in.Prepared[i+1:] {
			y := q.Results[0]
			sameDevice := x.Device == y.Device && !x.Exclusive && !y.Exclusive && c.allocated[p.UID][0].ShareID != nil && c.allocated[q.UID][0].ShareID != nil
			if beside := x.Device != y.Device && x.Unit != y.Unit && x.At == y.At && !x.Exclusive && !y.Exclusive; beside {
				continue // shares that are devices
			}
			if x.At.Overlaps(y.At) && !sameDevice {
				c.Fatalf("%s: %s has %s, and %s has %s", about, p.UID, x.Device, q.UID, y.Device)
			}
		}
	}
}
