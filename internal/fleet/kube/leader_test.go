package kube

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/test/check"
)

var shortTimes = times{leaseFor: 3 * time.Second, leadFor: 1500 * time.Millisecond, renewEach: 100 * time.Millisecond}

func newLeader(client *fake.Clientset, identity string) *leader {
	l, _ := newCluster(Options{Name: "east"}, client, client).Leader("ns", "lease", identity).(*leader)
	l.times = shortTimes
	return l
}

// One process leads at a time, and gives up the lead when its context ends, but only after its function has returned.
func TestLeader(t *testing.T) {
	client := fake.NewClientset()
	a, b := newLeader(client, "a"), newLeader(client, "b")
	long := times{leaseFor: time.Minute, leadFor: 30 * time.Second, renewEach: 100 * time.Millisecond} // on a busy machine a renewal may be late
	a.times, b.times = long, long
	first, endFirst := context.WithCancel(t.Context())
	second, endSecond := context.WithCancel(t.Context())
	defer endSecond()
	var leading atomic.Int32
	led, both := make(chan string, 2), make(chan struct{})
	lead := func(ctx context.Context, l *leader) {
		_ = l.Lead(ctx, func(ctx context.Context) {
			if leading.Add(1) > 1 {
				close(both)
			}
			led <- l.identity
			<-ctx.Done()
			time.Sleep(300 * time.Millisecond) // its calls end
			leading.Add(-1)
		})
	}
	var all sync.WaitGroup
	all.Go(func() { lead(first, a) })
	if got := <-led; got != "a" {
		t.Fatalf("%s leads", got)
	}
	all.Go(func() { lead(second, b) })
	check.Within(t, 20*time.Second, "b sees a lead", func() bool { return b.Holder() == "a" })
	endFirst()
	select {
	case <-led:
	case <-time.After(long.leadFor):
		t.Fatal("the lead was not given up")
	}
	endSecond()
	all.Wait()
	select {
	case <-both:
		t.Error("both lead")
	default:
	}
	lease, err := client.CoordinationV1().Leases("ns").Get(context.Background(), "lease", metav1.GetOptions{})
	if err != nil || *lease.Spec.HolderIdentity != "" {
		t.Errorf("%+v, %v", lease, err)
	}
}

// A leader whose server does not answer stops before another one can lead.
func TestLeaderCutOff(t *testing.T) {
	client := fake.NewClientset()
	var cut atomic.Bool
	client.PrependReactor("*", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		return cut.Load(), nil, errors.New("no answer")
	})
	l := newLeader(client, "a")
	began := make(chan time.Time, 1)
	err := l.Lead(t.Context(), func(ctx context.Context) {
		time.Sleep(500 * time.Millisecond)
		cut.Store(true)
		began <- time.Now()
		<-ctx.Done()
	})
	if took := time.Since(<-began); err != nil || took > shortTimes.leadFor+time.Second*2 {
		t.Errorf("%v after %v", err, took)
	}
}

// The function's context ends by the time of this process, whatever the election does.
func TestTermExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan struct{})
		te := &term{end: func(error) {}, leadFor: 200 * time.Millisecond, over: make(chan struct{})}
		te.renewed(time.Now())
		began := time.Now()
		go te.run(t.Context(), func(ctx context.Context) { <-ctx.Done(); close(ended) })
		time.Sleep(100 * time.Millisecond)
		te.renewed(time.Now())
		<-ended
		if took := time.Since(began); took != 300*time.Millisecond {
			t.Errorf("it ended after %v", took)
		}
		if te.run(t.Context(), func(context.Context) { t.Error("it runs again") }); !te.done {
			t.Error("it is not done")
		}
	})
}

// A function that returns gives up the lead; a right that is missing is an error, for no election is possible.
func TestLeaderEnds(t *testing.T) {
	client := fake.NewClientset()
	if err := newLeader(client, "a").Lead(t.Context(), func(context.Context) {}); err != nil {
		t.Error(err)
	}
	if lease, err := client.CoordinationV1().Leases("ns").Get(t.Context(), "lease", metav1.GetOptions{}); err != nil || *lease.Spec.HolderIdentity != "" {
		t.Errorf("%+v, %v", lease, err)
	}
	denied := fake.NewClientset()
	denied.PrependReactor("*", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "leases"}, "lease", errors.New("no"))
	})
	if err := newLeader(denied, "a").Lead(t.Context(), func(context.Context) { t.Error("it leads") }); err == nil || !strings.Contains(err.Error(), "forbidden") {
		t.Error(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := newLeader(fake.NewClientset(), "a").Lead(ended, func(context.Context) {}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
