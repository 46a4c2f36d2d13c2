package podresources

import (
	"context"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// The kubelet's device manager loses that it is giving a device out if it lists its pods at that time (UpdateAllocatedDevices and
// allocateContainerResources in pkg/kubelet/cm/devicemanager/manager.go, 1.34 to 1.37), and gives it out again:
//
//	Allocate  GetPreferredAllocation . device marked . calls the plugin . . . . . . . recorded for the pod
//	List                                                     after a pod has ended: all marks made anew from what is recorded
//
// A gate keeps the List calls of this process out of that time. The kubelet asks for the preferred allocation before it marks devices; it
// does not ask for those that an init container of the pod has, which are recorded already.
type gate struct {
	mu      sync.Mutex
	calls   int           // of the kubelet, under way
	quietAt time.Time     // settle after the latest one
	listing chan struct{} // closed at the end of the List that is under way; nil = none
}

const (
	// settle is for how long after a call of the kubelet no List begins: it marks or records the devices in well under a millisecond.
	settle = 250 * time.Millisecond
	// retryList is the time between two looks whether a List may begin.
	retryList = 5 * time.Millisecond
	// listAtMost is for how long a call of the kubelet waits for a List, of which only the beginning makes the marks anew.
	listAtMost = 2 * time.Second
)

// enter is called when a call of the kubelet begins, and leave when it ends. It waits for a List that is under way.
func (g *gate) enter(ctx context.Context) (leave func()) {
	g.mu.Lock()
	g.calls++
	listing := g.listing
	g.mu.Unlock()
	if listing != nil {
		watch.Await(ctx, listing, listAtMost)
	}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.calls--
		g.quietAt = time.Now().Add(settle)
	}
}

// beginList waits until no call of the kubelet is under way or can have marked a device, and reports whether that was before ctx ended. Then
// endList must be called.
func (g *gate) beginList(ctx context.Context) bool {
	for {
		wait := g.tryList()
		if wait <= 0 {
			return true
		}
		if !watch.Sleep(ctx, wait) {
			return false
		}
	}
}

// tryList begins a List, or returns for how long to wait.
func (g *gate) tryList() (wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	wait = time.Until(g.quietAt)
	if g.calls > 0 || g.listing != nil {
		wait = max(wait, retryList)
	}
	if wait <= 0 {
		g.listing = make(chan struct{})
	}
	return wait
}

// tryListAlone begins a List within the only call that is under way, and reports whether it did.
func (g *gate) tryListAlone() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.calls != 1 || g.listing != nil {
		return false
	}
	g.listing = make(chan struct{})
	return true
}

func (g *gate) endList() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.listing)
	g.listing = nil
}

func (g *gate) underWay() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls
}
