package nomadadapter

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Another configuration starts another source: the streams continue, and the groups have the same names. Statistics have the
// names of fingerprints.
func TestStreamsContinueWithAnotherConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nodeInventory(coretest.GPUs(2)))
		ch := fingerprints(t.Context(), t, s.Plugin)
		<-ch
		s.mustConfigure(t, map[string]any{"fingerprint_period": "5m"})
		synctest.Wait()
		if n := len(s.Started()); n != 2 {
			t.Fatalf("%d sources, want 2", n)
		}
		time.Sleep(time.Minute)
		receiveNothing(t, ch, "before the second source has an inventory")
		s.source(1).Set(nodeInventory(withDevice(coretest.GPUs(3), 0, memory(40960))))
		want := inGroups(" (40960 MiB)", "", "")
		checkEqual(t, "fingerprint", want, groupByDevice(t, (<-ch).Devices))
		got := map[string]string{}
		for _, g := range (<-openStats(t.Context(), t, s.Plugin, time.Second)).Groups {
			for device := range g.InstanceStats {
				got[device] = g.Name
			}
		}
		checkEqual(t, "statistics", want, got)
	})
}

// A disabled plugin has no devices, refuses reservations, and starts no source; its streams continue when it is enabled.
func TestDisabled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nodeInventory(coretest.GPUs(1)))
		s.mustConfigure(t, map[string]any{"enabled": false})
		ch := fingerprints(t.Context(), t, s)
		if r := <-ch; len(r.Devices) != 0 || r.Error != nil {
			t.Errorf("disabled: %+v", r)
		}
		if _, err := s.Reserve([]string{"GPU-1"}); !errorContains(err, "device is not enabled") {
			t.Errorf("Reserve: %v", err)
		}
		if r := <-openStats(t.Context(), t, s, time.Hour); r.Error != nil || len(r.Groups) != 0 {
			t.Errorf("Stats: %+v", r)
		}
		if n := len(s.Started()); n != 0 {
			t.Errorf("%d sources were started", n)
		}
		s.mustConfigure(t, map[string]any{})
		if r := <-ch; len(r.Devices) != 1 {
			t.Errorf("enabled: %+v", r)
		}
	})
}

// No goroutine remains: synctest.Test fails if one does.
func TestStreamsEndWithTheirContext(t *testing.T) {
	for name, inv := range map[string]*inventory.Allocatable{"pending": nil, "ready": nodeInventory(coretest.GPUs(2))} {
		for _, read := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newFixture(t, inv)
					ctx, cancel := context.WithCancel(t.Context())
					lists, numbers := fingerprints(ctx, t, s), openStats(ctx, t, s, time.Second)
					if read {
						<-lists
						<-numbers
					}
					synctest.Wait()
					cancel()
				})
			})
		}
	}
}

// A stream stays open, and sends nothing, when the context of New ends before that of the stream.
func TestStreamOutlivesThePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctxPlugin, end := context.WithCancel(t.Context())
		s := newFixtureUntil(ctxPlugin, nodeInventory(coretest.GPUs(2)))
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, s)
		<-ch
		end()
		synctest.Wait()
		receiveNothing(t, ch, "after the end")
		cancel()
	})
}

// 25 pairs of streams that are not read block neither reservations, many at once, nor other streams on the same connection.
func TestUnreadStreamsBlockNothing(t *testing.T) {
	s := newFixture(t, nodeInventory(coretest.GPUs(8)))
	p := nomadtest.Serve(t, s.Plugin)
	for range 25 {
		fingerprints(t.Context(), t, p)
		openStats(t.Context(), t, p, time.Second)
	}
	numbers := openStats(t.Context(), t, p, time.Second)
	var reservations sync.WaitGroup
	for range 3 { // seconds, in which the unread streams fill their buffers
		receive(t, numbers)
		for i := range 64 {
			reservations.Go(func() {
				want := map[string]bool{gpuID(i % 8): true, gpuID((i + 1) % 8): true}
				r, err := p.Reserve([]string{gpuID(i % 8), gpuID((i + 1) % 8)})
				if err != nil {
					t.Error(err)
					return
				}
				for id := range strings.SplitSeq(r.Envs[inventory.VisibleDevices], ",") {
					delete(want, id)
				}
				if len(want) > 0 {
					t.Errorf("%d: got %v", i, r.Envs)
				}
			})
			if i%8 == 0 {
				s.Source.Set(nodeInventory(coretest.GPUs(8))) // replaced during reservations
			}
		}
	}
	done := make(chan struct{})
	go func() {
		reservations.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Error("reservations were blocked by unread streams")
	}
}

// Nomad may reserve devices of a process whose devices it does not read: that is a warning, from some time after the first reservation until
// it reads them.
func TestWarningIfDevicesAreNotRead(t *testing.T) {
	for name, tc := range map[string]struct {
		opens time.Duration // of the stream, after the reservation; negative = before it
		want  bool
	}{
		"a stream from the start":             {-1, false},
		"a stream right after a reservation":  {unreadAfter - time.Second, false},
		"a stream long after the reservation": {unreadAfter + time.Minute, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFixture(t, nodeInventory(coretest.GPUs(2)))
				open := func() { <-fingerprints(t.Context(), t, s.Plugin) }
				if tc.opens < 0 {
					open()
				}
				for range 3 {
					if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(max(tc.opens, 0))
				synctest.Wait()
				if warnings := problem.Lines(s.Problems()); (len(warnings) == 1) != tc.want {
					t.Errorf("before the stream: warnings %q", warnings)
				}
				if tc.opens >= 0 {
					open()
				}
				time.Sleep(time.Hour)
				if warnings := problem.Lines(s.Problems()); len(warnings) > 0 {
					t.Errorf("with a stream: warnings %q", warnings)
				}
				if logged := strings.Count(s.Log.String(), "Restart the Nomad agent"); (logged == 1) != tc.want {
					t.Errorf("%d warnings in the log:\n%s", logged, s.Log)
				}
			})
		})
	}
}
