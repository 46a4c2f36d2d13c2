package nomadadapter

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// No goroutine remains: synctest.Test fails if one does.
func TestStreamsEndWithTheirContext(t *testing.T) {
	for name, settle := range map[string]func(*coretest.Source){
		"pending": func(*coretest.Source) {},
		"ready":   func(s *coretest.Source) { s.Set(nodeInventory(coretest.GPUs(2))) },
	} {
		for _, read := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newFixture(t)
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

// A stream stays open, and sends nothing, when the context of New ends before that of the stream.
func TestStreamOutlivesThePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctxPlugin, end := context.WithCancel(t.Context())
		s := newFixture(t)
		p := New(ctxPlugin, "2.0.0", s.startSource, discardLog)
		s.Source.Set(nodeInventory(coretest.GPUs(2)))
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, p)
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

// Streams that Nomad opens and cancels over gRPC, read and unread, leave no goroutines.
func TestStreamsLeaveNothing(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(nodeInventory(coretest.GPUs(8)))
	p := nomadtest.Serve(t, s.Plugin)
	open := func(read bool) {
		ctx, cancel := context.WithCancel(t.Context())
		f, err1 := p.Fingerprint(ctx)
		n, err2 := p.Stats(ctx, time.Second)
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		if read {
			receive(t, f)
			receive(t, n)
		}
		cancel()
		for range f { // Nomad's own goroutine blocks until its last message is read
		}
		for range n {
		}
	}
	if _, err := p.Reserve([]string{gpuID(0)}); err != nil { // connects
		t.Fatal(err)
	}
	before := runtime.NumGoroutine()
	for i := range 500 {
		open(i%2 == 0)
	}
	const slack = 4 // goroutines of gRPC
	deadline := time.After(testTimeout)
	for tick := time.NewTicker(10 * time.Millisecond); runtime.NumGoroutine() > before+slack; {
		select {
		case <-tick.C:
		case <-deadline:
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, %d after 500 pairs of streams:\n%s", before, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
		}
	}
}

// 25 pairs of streams that are not read block neither reservations nor other streams on the same connection.
func TestUnreadStreamsBlockNothing(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(nodeInventory(coretest.GPUs(8)))
	p := nomadtest.Serve(t, s.Plugin)
	for range 25 {
		if _, err := p.Fingerprint(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Stats(t.Context(), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	numbers := openStats(t.Context(), t, p, time.Second)
	var longest time.Duration
	for range 3 { // seconds, in which the unread streams fill their buffers
		receive(t, numbers)
		for i := range 64 {
			begin := time.Now()
			if _, err := p.Reserve([]string{gpuID(i % 8)}); err != nil {
				t.Fatal(err)
			}
			longest = max(longest, time.Since(begin))
		}
	}
	if longest >= testTimeout {
		t.Error("a reservation was blocked by unread streams")
	}
	t.Logf("the longest of 192 reservations took %s", longest)
}
