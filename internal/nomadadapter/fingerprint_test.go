package nomadadapter

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func TestFingerprint(t *testing.T) {
	s := newStand(t)
	s.Source.Set(machine(coretest.GPUs(8)))
	next := fingerprint(t, dial(t, s.Plugin))
	gs := next()
	if diff := cmp.Diff(groups(machine(coretest.GPUs(8))), gs); diff != "" {
		t.Errorf("lost on the wire (-sent +received):\n%s", diff)
	}
	if len(gs) != 1 || len(gs[0].Devices) != 8 {
		t.Fatalf("got %v", gs)
	}
}

func TestHealthFlipKeepsIdentity(t *testing.T) {
	t.Parallel() // it waits out the time between fingerprints
	s := newStand(t)
	s.Source.Set(machine(coretest.GPUs(4)))
	next := fingerprint(t, dial(t, s.Plugin))
	well := next()
	s.Source.Set(machine(coretest.GPUs(4), lost(2)))
	sick := next()
	s.Source.Set(machine(coretest.GPUs(4)))
	if diff := cmp.Diff(well, next()); diff != "" {
		t.Errorf("recovery differs (-before +after):\n%s", diff)
	}
	d := sick[0].Devices[2]
	if d.Healthy || d.HealthDesc != lostText {
		t.Errorf("the lost GPU is %+v", d)
	}
	if n := sick[0].Attributes[unhealthy]; n == nil || *n.Int != 1 {
		t.Errorf("unhealthy devices: %v, want 1", n)
	}
	d.Healthy, d.HealthDesc = true, ""
	delete(sick[0].Attributes, unhealthy)
	if diff := cmp.Diff(well, sick); diff != "" {
		t.Errorf("more than the health changed (-before +after):\n%s", diff)
	}
}

// A driver that is gone, back, replaced: the stream tells, and stays.
func TestDriverLossIsNoError(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	s.Source.Set(machine(coretest.GPUs(2)))
	next := fingerprint(t, dial(t, s.Plugin))
	next()
	gone, obs := core.Reconcile(coretest.GPUs(2), core.NoDriver(core.DriverFailed, "ERROR_GPU_IS_LOST"))
	s.Source.Set(machine(gone, obs...))
	for _, d := range next()[0].Devices {
		if d.Healthy || !strings.HasPrefix(d.HealthDesc, "unknown: driver is not usable (ERROR_GPU_IS_LOST) since ") {
			t.Errorf("%s: healthy %t, %q", d.ID, d.Healthy, d.HealthDesc)
		}
	}
	s.Source.Set(machine(core.NoDriver(core.DriverAbsent, "no library")))
	if gs := next(); len(gs) != 0 {
		t.Errorf("without devices: %v", gs)
	}
	s.Source.Set(machine(coretest.GPUs(1)))
	if gs := next(); len(gs) != 1 || !gs[0].Devices[0].Healthy {
		t.Errorf("not recovered: %v", gs)
	}
}

func TestDisabled(t *testing.T) {
	s := newStand(t)
	if err := s.configure(map[string]any{"enabled": false}); err != nil {
		t.Fatal(err)
	}
	p := dial(t, s.Plugin)
	next := fingerprint(t, p)
	if gs := next(); len(gs) != 0 {
		t.Errorf("offers %v", gs)
	}
	if _, err := p.Reserve([]string{"GPU-1"}); err == nil || !contains(err, "device is not enabled") {
		t.Errorf("Reserve: %v", err)
	}
	stats, err := p.Stats(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if r := receive(t, stats); r.Error != nil || len(r.Groups) != 0 {
		t.Errorf("Stats: %+v", r)
	}
	if n := len(s.Started()); n != 0 {
		t.Errorf("%d sources were started", n)
	}
	// The stream is still there: enabling fills it.
	s.Source.Set(machine(coretest.GPUs(1)))
	if err := s.configure(map[string]any{}); err != nil {
		t.Fatal(err)
	}
	if gs := next(); len(gs) != 1 {
		t.Errorf("enabled: %v", gs)
	}
}

// The lists and when they come, on a clock that the test owns.
func TestFirstFingerprint(t *testing.T) {
	type list struct {
		at      time.Duration
		devices int
	}
	for name, tc := range map[string]struct {
		answers time.Duration // of the driver; 0 = never
		want    []list
	}{
		"at once":    {1, []list{{1, 2}}},
		"soon":       {500 * time.Millisecond, []list{{500 * time.Millisecond, 2}}},
		"late":       {3 * time.Second, []list{{firstAnswer, 0}, {3 * time.Second, 2}}},
		"not at all": {0, []list{{firstAnswer, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				begin := time.Now()
				ch, err := s.Fingerprint(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if tc.answers > 0 {
					time.AfterFunc(tc.answers, func() { s.Source.Set(machine(coretest.GPUs(2))) })
				}
				var got []list
				for ctx.Err() == nil {
					select {
					case r := <-ch:
						l := list{at: time.Since(begin)}
						for _, g := range r.Devices {
							l.devices += len(g.Devices)
						}
						got = append(got, l)
					case <-ctx.Done():
					}
				}
				if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(list{})); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		})
	}
}

// Nothing new is nothing to send, and what the reader missed is not sent later.
func TestFingerprintSendsChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t)
		s.Source.Set(machine(coretest.GPUs(2)))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ch, err := s.Fingerprint(ctx)
		if err != nil {
			t.Fatal(err)
		}
		<-ch
		silent := func(what string) {
			t.Helper()
			time.Sleep(time.Minute) // of the bubble's clock
			select {
			case r := <-ch:
				t.Errorf("%s: sent %d groups", what, len(r.Devices))
			default:
			}
		}
		for range 10 {
			s.Source.Set(machine(coretest.GPUs(2)))
			silent("an equal inventory")
		}
		driver := coretest.GPUs(2)
		driver.Links = nil
		s.Source.Set(machine(driver))
		silent("a change that Nomad does not see")

		for i := range 100 { // ends as it began, with 2
			s.Source.Set(machine(coretest.GPUs(2), lost(i%2)))
		}
		synctest.Wait() // the first change is on its way out
		s.Source.Set(machine(coretest.GPUs(1)))
		<-ch
		if r := <-ch; len(r.Devices[0].Devices) != 1 {
			t.Errorf("got %v, want the latest", r.Devices)
		}
		silent("afterwards")
	})
}

// A change goes out at once; what follows within a second goes out as one, at its end.
func TestFingerprintPace(t *testing.T) {
	type sent struct {
		at   time.Duration
		lost int
	}
	for name, tc := range map[string]struct {
		change time.Duration // between changes, of which there are so many
		times  int
		want   []sent
	}{
		"one":          {10 * time.Second, 1, []sent{{10 * time.Second, 1}}},
		"now and then": {2 * time.Second, 3, []sent{{2 * time.Second, 1}, {4 * time.Second, 2}, {6 * time.Second, 3}}},
		"in haste":     {300 * time.Millisecond, 7, []sent{{time.Second, 3}, {2 * time.Second, 6}, {3 * time.Second, 7}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t)
				s.Source.Set(machine(coretest.GPUs(8)))
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				ch, err := s.Fingerprint(ctx)
				if err != nil {
					t.Fatal(err)
				}
				<-ch
				begin := time.Now()
				go func() {
					var obs []core.Observation
					for n := range tc.times {
						time.Sleep(tc.change)
						obs = append(obs, lost(n))
						s.Source.Set(machine(coretest.GPUs(8), obs...))
					}
				}()
				var got []sent
				for ctx.Err() == nil {
					select {
					case r := <-ch:
						got = append(got, sent{time.Since(begin), sick(r.Devices)})
					case <-ctx.Done():
					}
				}
				if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(sent{})); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		})
	}
}

// A fault and its end between two fingerprints is nothing to send.
func TestFlickerIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t)
		s.Source.Set(machine(coretest.GPUs(2)))
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		ch, err := s.Fingerprint(ctx)
		if err != nil {
			t.Fatal(err)
		}
		<-ch
		synctest.Wait()
		s.Source.Set(machine(coretest.GPUs(2), lost(0)))
		time.Sleep(quiet / 2)
		s.Source.Set(machine(coretest.GPUs(2)))
		select {
		case r := <-ch:
			t.Errorf("sent %v", r.Devices)
		case <-ctx.Done():
		}
	})
}

// sick counts the devices that take no work.
func sick(gs []*device.DeviceGroup) (n int) {
	for _, g := range gs {
		for _, d := range g.Devices {
			if !d.Healthy {
				n++
			}
		}
	}
	return n
}

func TestConfigSwapKeepsStreamsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t)
		s.Source.Set(machine(coretest.GPUs(2)))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ch, err := s.Fingerprint(ctx)
		if err != nil {
			t.Fatal(err)
		}
		<-ch
		if err := s.configure(map[string]any{"fingerprint_period": "5m"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := len(s.Started()); n != 2 {
			t.Fatalf("%d sources, want a second", n)
		}
		time.Sleep(time.Minute) // of the bubble's clock: the new source has nothing to say yet
		select {
		case r := <-ch:
			t.Fatalf("took back what was sent: %v", r.Devices)
		default:
		}
		s.sources[1].Set(machine(coretest.GPUs(3)))
		if r := <-ch; len(r.Devices[0].Devices) != 3 {
			t.Errorf("got %v", r.Devices)
		}
	})
}

// A bubble does not end while a goroutine in it lives.
func TestStreamsEndWithTheirContext(t *testing.T) {
	for name, settle := range map[string]func(*coretest.Source){
		"pending": func(*coretest.Source) {},
		"ready":   func(s *coretest.Source) { s.Set(machine(coretest.GPUs(2))) },
	} {
		for _, read := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newStand(t)
					settle(s.Source)
					ctx, cancel := context.WithCancel(t.Context())
					f, err1 := s.Fingerprint(ctx)
					st, err2 := s.Stats(ctx, time.Second)
					if err1 != nil || err2 != nil {
						t.Fatal(err1, err2)
					}
					if read {
						<-f
						<-st
					}
					synctest.Wait()
					cancel()
				})
			})
		}
	}
}

// The end of the plugin's own context, before that of the stream, neither spins nor closes anything.
func TestStreamOutlivesThePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		life, end := context.WithCancel(t.Context())
		s := newStand(t)
		p := New(life, "2.0.0", s.begin, discard)
		s.Source.Set(machine(coretest.GPUs(2)))
		ctx, cancel := context.WithCancel(t.Context())
		ch, err := p.Fingerprint(ctx)
		if err != nil {
			t.Fatal(err)
		}
		<-ch
		end()
		synctest.Wait()
		select {
		case r, ok := <-ch:
			t.Errorf("got %v, %t", r, ok)
		default:
		}
		cancel()
	})
}

func names(gs []*device.DeviceGroup) (all []string) {
	for _, g := range gs {
		all = append(all, g.Name)
	}
	return all
}
