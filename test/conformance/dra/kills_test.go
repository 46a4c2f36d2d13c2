package dra

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// newPartitioned returns a node with 112 MIG instances, and their names in slices.
func newPartitioned(t *testing.T) (*node, *agent, []string) {
	t.Helper()
	n, a := newReady(t, "a100x16-mig", 112, "--mig-strategy=mixed")
	return n, a, slices.Sorted(maps.Keys(n.api.devices()))
}

// claimsOn makes a claim for each of some devices, and stores them in the API.
func (n *node) claimsOn(prefix string, devices []string) (claims []*resourceapi.ResourceClaim) {
	for i, d := range devices {
		c := claim(fmt.Sprintf("%s-%d", prefix, i), result("gpu", d))
		n.api.putClaim(c)
		claims = append(claims, c)
	}
	return claims
}

func requests(claims []*resourceapi.ResourceClaim) (all []*drapb.Claim) {
	for _, c := range claims {
		all = append(all, request(c))
	}
	return all
}

// The agent is killed at any time in the calls for many claims, and again and again. What the kubelet asks for in the end is there; what
// it gives back is gone.
func TestCase10KillsAtAnyTime(t *testing.T) {
	for _, count := range []int{1, 8, 64} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			t.Parallel()
			n, a, devices := newPartitioned(t)
			claims := n.claimsOn("warm", devices[:count])
			began := time.Now()
			n.prepareAtOnce(claims)
			usual := time.Since(began)
			n.unprepareAtOnce(claims)
			seen := map[prepared.State]int{}
			starts := 1
			for round := range 6 {
				rand.Shuffle(len(devices), func(i, j int) { devices[i], devices[j] = devices[j], devices[i] })
				claims = n.claimsOn(fmt.Sprintf("round-%d", round), devices[:count])
				for range 2 { // the second time on what the first has left
					done := make(chan struct{})
					go func() { defer close(done); n.tryPrepare(claims) }()
					sleep(t, rand.N(usual))
					n.End(a, syscall.SIGKILL)
					<-done
					for _, c := range claims {
						r, _ := n.record(c)
						seen[r.State]++
					}
					a = n.startAgent("--mig-strategy=mixed")
					starts++
					n.kubelet.awaitRegistrations(t, starts)
				}
				if round%2 == 0 { // without a Prepare that succeeded: the pod was deleted
					n.prepareAtOnce(claims)
				}
				n.unprepareAtOnce(claims)
			}
			t.Logf("records at the kills: %d none, %d started, %d complete", seen[""], seen[prepared.Started], seen[prepared.Complete])
			n.prepareAtOnce(n.claimsOn("last", devices)) // nothing is held
		})
	}
}

// tryPrepare calls Prepare for each claim on its own, all at once, and ignores errors: the process is killed.
func (n *node) tryPrepare(claims []*resourceapi.ResourceClaim) {
	driver, err := n.driverOrError()
	if err != nil {
		return
	}
	var all sync.WaitGroup
	for _, c := range claims {
		all.Go(func() {
			_, _ = driver.NodePrepareResources(n.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{request(c)}})
		})
	}
	all.Wait()
}

// prepareAtOnce calls Prepare for each claim on its own, all at once, checks the answers, and returns how long each took.
func (n *node) prepareAtOnce(claims []*resourceapi.ResourceClaim) (took spread) {
	n.Helper()
	driver := n.driver()
	var mu sync.Mutex
	var all sync.WaitGroup
	names := map[string]string{} // claim by CDI name
	for _, c := range claims {
		all.Go(func() {
			began := time.Now()
			answer, err := driver.NodePrepareResources(n.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{request(c)}})
			elapsed := time.Since(began)
			mu.Lock()
			defer mu.Unlock()
			took = append(took, elapsed)
			r := answer.GetClaims()[string(c.UID)]
			if err != nil || r.GetError() != "" || len(r.GetDevices()) != 1 {
				n.Errorf("%s: %v %v", c.Name, r, err)
				return
			}
			name := cdiNames(r.Devices[0])[0]
			if other, twice := names[name]; twice {
				n.Errorf("%s and %s have %s", c.Name, other, name)
			}
			names[name] = c.Name
		})
	}
	all.Wait()
	n.mustResolve(slices.Collect(maps.Keys(names)))
	for _, c := range claims {
		if r, _ := n.record(c); r.State != prepared.Complete {
			n.Errorf("%s: the record is %q", c.Name, r.State)
		}
	}
	return took
}

// unprepareAtOnce gives all claims back in one call, and checks that no record is left of them.
func (n *node) unprepareAtOnce(claims []*resourceapi.ResourceClaim) {
	n.Helper()
	answer, err := n.callUnprepare(requests(claims)...)
	n.Must(err)
	for _, c := range claims {
		if r := answer[string(c.UID)]; r == nil || r.Error != "" {
			n.Errorf("Unprepare of %s: %v", c.Name, r)
		}
	}
	n.mustHaveNoRecords()
}

// mustHaveNoRecords checks that the agent has no claims on disk. A process that is killed while it writes a record leaves a temporary
// file, whose name begins with a dot; a later agent removes it.
func (n *node) mustHaveNoRecords() {
	n.Helper()
	entries, err := os.ReadDir(filepath.Join(n.stateDir, "dra", "claims"))
	n.Must(err)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			n.Errorf("a record is left: %s", e.Name())
		}
	}
}

// Pods start and end all the time, on all GPUs.
func TestCase23ManyPodsAtOnce(t *testing.T) {
	t.Parallel()
	n, _, devices := newPartitioned(t)
	var all sync.WaitGroup
	for worker := range 32 {
		all.Go(func() {
			own := devices[worker*3 : worker*3+3]
			for round := range 4 {
				name := fmt.Sprintf("pod-%d-%d", worker, round)
				p := n.pod(name, claim(name, result("a", own[0]), result("b", own[1])), claim(name+"-second", result("c", own[2])))
				if err := n.prepare(p); err != nil {
					t.Errorf("%s: %v", name, err)
				} else if names := n.cdi(p); len(names) != 3 {
					t.Errorf("%s: %v", name, names)
				}
				if err := n.finish(p); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
	all.Wait()
	n.mustHaveNoRecords()
}

// The calls of the kubelet over its socket, each with a GET of the claim and the record on this machine's disk.
func TestMeasurePrepare(t *testing.T) {
	n, _, devices := newPartitioned(t)
	for _, count := range []int{1, 8, 64} {
		var prepare, batch, repeat, unprepare spread
		for round := range max(5, 64/count) {
			claims := n.claimsOn(fmt.Sprintf("measured-%d-%d", count, round), devices[:count])
			prepare = append(prepare, n.prepareAtOnce(claims)...)
			repeat = append(repeat, n.prepareAtOnce(claims)...)
			began := time.Now()
			n.unprepareAtOnce(claims)
			unprepare = append(unprepare, time.Since(began))
			began = time.Now()
			_, err := n.call(requests(claims)...)
			n.Must(err)
			batch = append(batch, time.Since(began))
			n.unprepareAtOnce(claims)
		}
		t.Logf("%2d claims at once: Prepare %v; repeated %v; in one call %v; Unprepare of all %v", count, prepare, repeat, batch, unprepare)
		if prepare.quantile(0.5) > 5*time.Second {
			t.Error("half of the calls took more than 5 s")
		}
	}
}
