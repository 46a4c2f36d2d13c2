package podresources

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// No List begins while the kubelet gives a device out, nor for a while after: it marks the device after GetPreferredAllocation, and records it
// after Allocate.
func TestNoListDuringCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g gate
		began := time.Now()
		preferred := g.enter(t.Context())
		allocate := func() {
			time.Sleep(time.Second)
			preferred()
			time.Sleep(settle / 2)
			leave := g.enter(t.Context())
			time.Sleep(time.Second)
			leave()
		}
		go allocate()
		if !g.beginList(t.Context()) {
			t.Fatal("no List")
		}
		if took := time.Since(began); took < 2*time.Second+settle/2+settle || took > 3*time.Second {
			t.Errorf("a List began after %v", took)
		}
		g.endList()
		leave := g.enter(t.Context())
		defer leave()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if g.beginList(ctx) {
			t.Error("a List began during a call")
		}
	})
}

// A call of the kubelet waits for the List that is under way, and not for one that hangs.
func TestCallsWaitForAList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g gate
		for _, c := range []struct{ list, want time.Duration }{{time.Second, time.Second}, {time.Hour, listAtMost}} {
			if !g.beginList(t.Context()) {
				t.Fatal("no List")
			}
			ended := make(chan struct{})
			go func() { defer close(ended); time.Sleep(c.list); g.endList() }()
			began := time.Now()
			leave := g.enter(t.Context())
			if waited := time.Since(began); waited != c.want {
				t.Errorf("waited %v for a List of %v", waited, c.list)
			}
			leave()
			<-ended
		}
	})
}

// Two readings are made one after the other.
func TestOneListAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g gate
		var under, most int
		done := make(chan struct{})
		for range 3 {
			go func() {
				g.beginList(t.Context())
				under++
				most = max(most, under)
				time.Sleep(time.Second)
				under--
				g.endList()
				done <- struct{}{}
			}()
		}
		for range 3 {
			<-done
		}
		if most != 1 {
			t.Errorf("%d at a time", most)
		}
	})
}
