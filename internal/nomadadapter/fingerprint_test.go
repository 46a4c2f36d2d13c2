package nomadadapter

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// sentAt is a fingerprint that was received.
type sentAt struct {
	at                 time.Duration
	devices, unhealthy int
}

// record receives fingerprints until ctx ends.
func record(ctx context.Context, ch <-chan *device.FingerprintResponse) (all []sentAt) {
	for began := time.Now(); ; {
		select {
		case r := <-ch:
			sent := sentAt{at: time.Since(began), unhealthy: countUnhealthy(r.Devices)}
			for _, g := range r.Devices {
				sent.devices += len(g.Devices)
			}
			all = append(all, sent)
		case <-ctx.Done():
			return all
		}
	}
}

// The first fingerprint waits for the driver, for at most firstFingerprintTimeout.
func TestFirstFingerprint(t *testing.T) {
	for name, tc := range map[string]struct {
		answers time.Duration // of the driver; 0 = never
		want    []sentAt
	}{
		"immediately": {1, []sentAt{{1, 2, 0}}},
		"in time":     {4 * time.Second, []sentAt{{4 * time.Second, 2, 0}}},
		"late":        {8 * time.Second, []sentAt{{firstFingerprintTimeout, 0, 0}, {8 * time.Second, 2, 0}}},
		"never":       {0, []sentAt{{firstFingerprintTimeout, 0, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFixture(t, nil)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				ch := fingerprints(ctx, t, s)
				if tc.answers > 0 {
					time.AfterFunc(tc.answers, func() { s.Source.Set(nodeInventory(coretest.GPUs(2))) })
				}
				if got := record(ctx, ch); !slices.Equal(got, tc.want) {
					t.Errorf("got %v, want %v", got, tc.want)
				}
			})
		})
	}
}

// A plugin that has started again and whose driver is slow sends the devices of its history first, unhealthy, and those
// of the driver next. It sends no fingerprint without devices, which would remove them from the node.
func TestFirstFingerprintHasTheDevicesOfTheHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		ch := fingerprints(ctx, t, s)
		state := core.Restore(defaultCore(), core.Checkpoint{BootID: "earlier", Devices: coretest.GPUs(2).Devices}, "boot")
		time.AfterFunc(3*time.Second, func() {
			state = state.ListPrior(defaultCore(), time.Now())
			s.Source.Set(state.Allocatable)
		})
		time.AfterFunc(20*time.Second, func() { s.Source.Set(nodeInventory(coretest.GPUs(2))) })
		want := []sentAt{{firstFingerprintTimeout, 2, 2}, {20 * time.Second, 2, 0}}
		if got := record(ctx, ch); !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

// On a new node the GPUs are read some milliseconds before the agents of the node share their device numbers. A fingerprint
// without them would remove them from the node.
func TestFirstFingerprintWaitsForNumbers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nil)
		ch := fingerprints(t.Context(), t, s)
		cfg := core.DefaultConfig()
		cfg.Policy = inventory.Policy{Rules: []inventory.Rule{{Select: inventory.Selector{Indices: []gpu.DeviceIndex{{GPU: 1, Instance: -1}}}, NotOffered: "for another"}}}
		state := core.NewState(cfg).WithHost(cfg, time.Now(), inventory.Host{SharesNumbers: true}).Read(cfg, time.Now(), coretest.GPUs(2))
		s.Source.Set(state.Allocatable)
		time.Sleep(time.Second / 10)
		shared := inventory.Host{SharesNumbers: true, Numbering: state.ProposedNumbering()}
		s.Source.Set(state.WithHost(cfg, time.Now(), shared).Allocatable)
		if first := <-ch; len(first.Devices) != 1 || len(first.Devices[0].Devices) != 1 {
			t.Errorf("first fingerprint: %v, want the GPU that is not reserved", first.Devices)
		}
	})
}

// A GPU takes work when this agent has recorded it, milliseconds after it was read: no fingerprint has it as unhealthy until then. Where it
// can't be recorded there is one.
func TestFingerprintWaitsForRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nil)
		ch := fingerprints(t.Context(), t, s)
		with := func(gpus int, own inventory.Recorded) *inventory.Allocatable {
			return nodeInventory(coretest.GPUs(gpus)).WithHost(inventory.Host{Recorded: own}, inventory.OverlapRefuse)
		}
		one := []gpu.Placement{gpu.WholeGPU(coretest.GPU(0))}
		s.Source.Set(with(1, inventory.Recorded{Reason: "x", Pending: true}))
		time.Sleep(time.Second)
		receiveNothing(t, ch, "before the first record")
		s.Source.Set(with(1, inventory.Recorded{Reason: "x", Pending: true, At: one}))
		if first := <-ch; len(first.Devices) != 1 || !first.Devices[0].Devices[0].Healthy {
			t.Errorf("first fingerprint: %v", first.Devices)
		}
		s.Source.Set(with(2, inventory.Recorded{Reason: "x", Pending: true, At: one}))
		time.Sleep(10 * time.Second)
		receiveNothing(t, ch, "before the second record")
		s.Source.Set(with(2, inventory.Recorded{Reason: "x", At: one}))
		if next := <-ch; len(next.Devices[0].Devices) != 2 || next.Devices[0].Devices[0].Healthy == next.Devices[0].Devices[1].Healthy {
			t.Errorf("without the second record: %v", next.Devices[0].Devices)
		}
	})
}

// An inventory that is equal for Nomad is not sent, and an inventory that was replaced before it was sent is dropped.
func TestFingerprintSendsChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nodeInventory(coretest.GPUs(2)))
		ch := fingerprints(t.Context(), t, s)
		<-ch
		silent := func(when string) {
			t.Helper()
			time.Sleep(time.Minute)
			receiveNothing(t, ch, when)
		}
		for range 10 {
			s.Source.Set(nodeInventory(coretest.GPUs(2)))
			silent("an equal inventory")
		}
		driver := coretest.GPUs(2)
		driver.Links = nil
		s.Source.Set(nodeInventory(driver))
		silent("a change that is not in a fingerprint")

		for i := range 100 { // the last has two healthy GPUs
			s.Source.Set(nodeInventory(coretest.GPUs(2), lost(i%2)))
		}
		s.Source.Set(nodeInventory(coretest.GPUs(1)))
		synctest.Wait()
		if r := <-ch; len(r.Devices[0].Devices) != 1 {
			t.Errorf("got %v, want the latest", r.Devices)
		}
		silent("afterwards")

		s.Source.Set(nodeInventory(gpu.NoDriver(gpu.DriverAbsent, "no library")))
		if r := <-ch; len(r.Devices) != 0 || r.Error != nil {
			t.Errorf("without a driver: %+v", r)
		}
		s.Source.Set(nodeInventory(coretest.GPUs(1)))
		if r := <-ch; len(r.Devices) != 1 {
			t.Errorf("with a driver again: %+v", r)
		}
	})
}

// A change is sent immediately; changes within fingerprintInterval after it are sent as one at its end, and not if the last
// one undoes the others.
func TestFingerprintPace(t *testing.T) {
	type change struct {
		at   time.Duration
		lost int // number of GPUs
	}
	const ms = time.Millisecond
	for name, tc := range map[string]struct {
		changes []change
		want    []sentAt
	}{
		"one":     {[]change{{10 * time.Second, 1}}, []sentAt{{10 * time.Second, 8, 1}}},
		"slow":    {[]change{{2000 * ms, 1}, {4000 * ms, 2}, {6000 * ms, 3}}, []sentAt{{2000 * ms, 8, 1}, {4000 * ms, 8, 2}, {6000 * ms, 8, 3}}},
		"fast":    {[]change{{300 * ms, 1}, {600 * ms, 2}, {900 * ms, 3}, {1200 * ms, 4}, {1500 * ms, 5}, {1800 * ms, 6}, {2100 * ms, 7}}, []sentAt{{1000 * ms, 8, 3}, {2000 * ms, 8, 6}, {3000 * ms, 8, 7}}},
		"flicker": {[]change{{1 * ms, 1}, {500 * ms, 0}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFixture(t, nodeInventory(coretest.GPUs(8)))
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				ch := fingerprints(ctx, t, s)
				<-ch
				for _, c := range tc.changes {
					var obs []health.Observation
					for n := range c.lost {
						obs = append(obs, lost(n))
					}
					time.AfterFunc(c.at, func() { s.Source.Set(nodeInventory(coretest.GPUs(8), obs...)) })
				}
				if got := record(ctx, ch); !slices.Equal(got, tc.want) {
					t.Errorf("got %v, want %v", got, tc.want)
				}
			})
		})
	}
}

// A fault is sent at once. What becomes known of it in the next moment changes its description once, or not at all: each change makes Nomad's servers
// evaluate the jobs of the node.
func TestDescriptionSettles(t *testing.T) {
	const ms = time.Millisecond
	xid := health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 95}
	asks := func(v health.RecoveryAction) health.Observation {
		return health.Observation{At: xid.At, Kind: health.Checked, Sample: health.Sample{RecoveryAction: v}}
	}
	other := health.Observation{At: xid.At, Kind: health.XID, Code: 79}
	for name, tc := range map[string]struct {
		changes map[time.Duration][]health.Observation
		want    []sentAt
	}{
		"the recovery action that goes with the XID": {
			map[time.Duration][]health.Observation{0: {xid}, 300 * ms: {xid, asks(health.RecoveryReset)}}, []sentAt{{0, 2, 1}},
		},
		"a greater recovery action": {
			map[time.Duration][]health.Observation{0: {xid}, 300 * ms: {xid, asks(health.RecoveryReboot)}}, []sentAt{{0, 2, 1}, {2300 * ms, 2, 1}},
		},
		"more and more": {
			map[time.Duration][]health.Observation{0: {xid}, 300 * ms: {xid, other}, 1300 * ms: {xid, other, asks(health.RecoveryReboot)}}, []sentAt{{0, 2, 1}, {2300 * ms, 2, 1}},
		},
		"another GPU does not wait": {
			map[time.Duration][]health.Observation{0: {xid}, 300 * ms: {xid, other}, 1500 * ms: {xid, other, lost(0)}}, []sentAt{{0, 2, 1}, {1500 * ms, 2, 2}},
		},
		"nor does the end of the fault": {
			map[time.Duration][]health.Observation{0: {xid}, 300 * ms: {xid, other}, 1500 * ms: nil}, []sentAt{{0, 2, 1}, {1500 * ms, 2, 0}},
		},
		"one that is undone": {
			map[time.Duration][]health.Observation{0: {xid}, 300 * ms: {xid, other}, 1500 * ms: {xid}, 9000 * ms: {xid, other}}, []sentAt{{0, 2, 1}, {11000 * ms, 2, 1}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFixture(t, nodeInventory(coretest.GPUs(2)))
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				ch := fingerprints(ctx, t, s)
				<-ch
				time.Sleep(fingerprintInterval)
				for at, obs := range tc.changes {
					obs = append([]health.Observation{asks(health.RecoveryNone)}, obs...)
					time.AfterFunc(at, func() { s.Source.Set(nodeInventory(coretest.GPUs(2), obs...)) })
				}
				if got := record(ctx, ch); !slices.Equal(got, tc.want) {
					t.Errorf("got %v, want %v", got, tc.want)
				}
			})
		})
	}
}

// A Nomad that does not read for an hour blocks neither reservations nor other streams, and then gets the latest inventory.
func TestSlowReader(t *testing.T) {
	for name, tc := range map[string]struct {
		last []health.Observation // when it reads again
		want int                  // unhealthy devices; -1 = nothing is sent
	}{
		"other health": {[]health.Observation{lost(0), lost(1), lost(2)}, 3},
		"no change":    {nil, -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFixture(t, nodeInventory(coretest.GPUs(4)))
				lists := fingerprints(t.Context(), t, s)
				<-lists
				unread := openStats(t.Context(), t, s, time.Second)
				numbers := openStats(t.Context(), t, s, time.Second)
				<-numbers
				for i := range 3600 {
					s.Source.Set(nodeInventory(coretest.GPUs(4), lost(i%2)))
					begin := time.Now()
					if _, err := s.Reserve([]string{gpuID(3)}); err != nil {
						t.Fatal(err)
					}
					if d := time.Since(begin); d > 0 {
						t.Fatalf("a reservation took %s", d)
					}
					<-numbers
					if d := time.Since(begin); d > time.Second {
						t.Fatalf("a sample took %s", d)
					}
				}
				s.Source.Set(nodeInventory(coretest.GPUs(4), tc.last...))
				synctest.Wait()
				select {
				case r := <-lists:
					if n := countUnhealthy(r.Devices); n != tc.want {
						t.Errorf("%d unhealthy devices, want %d", n, tc.want)
					}
				default:
					if tc.want >= 0 {
						t.Error("nothing is sent")
					}
				}
				<-unread // which was not read for an hour
				time.Sleep(fingerprintInterval)
				synctest.Wait()
				receiveNothing(t, lists, "sent again")
			})
		})
	}
}

// countUnhealthy returns the number of unhealthy devices.
func countUnhealthy(gs []*device.DeviceGroup) (n int) {
	for _, g := range gs {
		for _, d := range g.Devices {
			if !d.Healthy {
				n++
			}
		}
	}
	return n
}
