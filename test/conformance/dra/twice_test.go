package dra

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// The kubelet loses that it has allocated a device if it lists its pods for a client, after one has ended, while the plugin's Allocate is
// under way. The next pod that it gives the device is refused; after that the kubelet knows again which devices are free.
func TestKubeletGivesADeviceOutTwice(t *testing.T) {
	t.Parallel()
	b := newBothNode(t, "h100x8")
	b.startKubelets()
	b.startAgentOf("device-plugin")
	b.awaitCapacity(8, 8)
	end, clients := make(chan struct{}), sync.WaitGroup{}
	defer func() { close(end); clients.Wait() }()
	for range 2 {
		clients.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
					if _, err := podresources.List(b.Context(), b.podResourcesSocket()); err != nil && b.Context().Err() == nil {
						t.Errorf("list of pods: %v", err)
						return
					}
				}
			}
		})
	}
	refused := 0
	for round := range 60 {
		ended := b.extendedPod(fmt.Sprintf("ended-%d", round), 4)
		b.Must(b.allocate(ended))
		go func() {
			time.Sleep(rand.N(3 * time.Millisecond))
			b.removePod(ended)
		}()
		var pods []*v1.Pod
		for held := map[string]string{}; len(held) < 8; {
			p := b.extendedPod(fmt.Sprintf("pod-%d-%d", round, len(pods)), 1)
			err := b.allocate(p)
			switch {
			case err == nil:
				pods = append(pods, p)
				for _, id := range b.held(p) {
					if other, twice := held[id]; twice {
						t.Fatalf("round %d: pods %s and %s have %s", round, other, p.Name, id)
					}
					held[id] = p.Name
				}
			case strings.Contains(err.Error(), "the kubelet has lost that"):
				refused++
			case !strings.Contains(err.Error(), "requested number of devices unavailable"): // until the pod is removed
				t.Fatal(err)
			}
		}
		for _, p := range pods {
			b.removePod(p)
		}
	}
	t.Logf("allocations refused: %d", refused)
}
