package dra

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// consuming makes a result a share of a device with an amount of its capacity "shares".
func consuming(id, shares string) func(*kubeapi.DeviceRequestAllocationResult) {
	return func(r *kubeapi.DeviceRequestAllocationResult) {
		r.ShareID, r.ConsumedCapacity = id, map[string]string{"shares": shares}
	}
}

// Shares are counted as the scheduler has consumed them, in any form of an amount, and those of one claim add up: no device ever gives out
// more than it has.
func TestSharesAreCounted(t *testing.T) {
	type claim = kubeapi.ResourceClaim
	gpu0 := coretest.GPU(0)
	for name, c := range map[string]struct {
		replicas      int
		before, claim claim
		want          string // in the error; "" = prepared
		held          int    // shares of the claim
	}{
		"1k of 1500, after 1k": {
			1500, newClaim("a", result(gpu0, consuming("1", "1k"))), newClaim("b", result(gpu0, consuming("2", "1k"))),
			"1000 of its 1500 shares are held, 1000 more are requested", 0,
		},
		"500 of 1500, after 1k": {1500, newClaim("a", result(gpu0, consuming("1", "1k"))), newClaim("b", result(gpu0, consuming("2", "0.5k"))), "", 500},
		"a fraction is a share": {4, claim{}, newClaim("b", result(gpu0, consuming("1", "2500m"))), "", 3},
		"3 and 3 of 4 in one claim": {
			4, claim{}, newClaim("b", result(gpu0, consuming("1", "3")), result(gpu0, consuming("2", "3"))),
			"3 of its 4 shares are held, 3 more are requested", 0,
		},
		"3 and 1 of 4 in one claim": {4, claim{}, newClaim("b", result(gpu0, consuming("1", "3")), result(gpu0, consuming("2", "1"))), "", 4},
		"more than there are":       {4, claim{}, newClaim("b", result(gpu0, consuming("1", "5"))), "0 of its 4 shares are held, 5 more are requested", 0},
		"no amount":                 {4, claim{}, newClaim("b", result(gpu0, consuming("1", "many"))), `the consumed capacity shares is "many", which is no amount`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.TimeSlicing, c.replicas))))
			if c.before.Metadata.UID != "" {
				r.api.put(c.before)
				r.mustPrepare(c.before.Metadata.Name)
			}
			r.api.put(c.claim)
			_, err := r.prepareOne(c.claim.Metadata.Name)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if n := sharesOf(r.record(c.claim.Metadata.Name)); n != c.held {
				t.Errorf("the record has %d shares, want %d", n, c.held)
			}
		})
	}
}

func sharesOf(c prepared.Claim) (n int) {
	for _, r := range c.Results {
		n += r.Shares
	}
	return n
}
