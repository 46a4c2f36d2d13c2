package kubelet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Pods with ordinary and restartable init containers come and go while the kubelet and the agent restart: no pod is refused while there are devices
// for it, and no device has two pods. TANDEM_CHURN is the number of allocations of containers, 1000 without it.
func TestNoRefusalAndNoSecondHolder(t *testing.T) {
	c := newChurn(t)
	c.admitPods(churnSize(t), func() {
		switch rand.N(400) {
		case 0:
			c.restartKubelet()
		case 1:
			c.restartAgent()
		}
	})
	if c.refused > 0 || c.twice > 0 {
		t.Error("pods were refused, or a device had two pods")
	}
}

// Other clients of the pod-resources API make the kubelet lose what it is giving out. What this agent can do about that is measured: the devices of
// containers that the kubelet lists are never given to a second pod.
func TestOtherClientsList(t *testing.T) {
	c := newChurn(t)
	stop := c.listAllTheTime(2)
	defer stop()
	c.admitPods(churnSize(t)/2, func() {})
	if c.twice > c.twiceInit {
		t.Error("a device of a container that the kubelet lists had two pods")
	}
}

func churnSize(t *testing.T) int {
	t.Helper()
	text := os.Getenv("TANDEM_CHURN")
	if text == "" {
		return 1000
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// churn is a node on which pods come and go.
type churn struct {
	*node
	agent *agent
	flags []string

	pods        int
	allocations int // of containers with devices
	refused     int // pods, while there were devices for them
	twice       int // devices with two pods
	twiceInit   int // of which one has it for an ordinary init container only

	mu   sync.Mutex
	held map[string]map[string]bool // by pod: device IDs; true = of a container that the kubelet lists
}

func newChurn(t *testing.T) *churn {
	n := newNode(t, "h100x8")
	n.startKubelet()
	n.servePodResources()
	c := &churn{node: n, held: map[string]map[string]bool{}, flags: []string{"--state-dir=" + t.TempDir()}}
	c.agent = n.Start(c.flags...)
	n.awaitCapacity(gpus, 8, 8)
	ctx, cancel := context.WithCancel(t.Context())
	var ending sync.WaitGroup
	t.Cleanup(func() { cancel(); ending.Wait() })
	ending.Go(func() { // pods end at any time, also while others are admitted
		for ctx.Err() == nil {
			time.Sleep(rand.N(4 * time.Millisecond))
			c.endOne()
		}
	})
	return c
}

// admitPods admits pods until so many containers have got devices; between comes before each pod.
func (c *churn) admitPods(allocations int, between func()) {
	c.Helper()
	for c.allocations < allocations {
		between()
		if p := c.randomPod(); c.free() >= demand(p) {
			c.admit(p)
		} else {
			time.Sleep(time.Millisecond) // until pods have ended
		}
	}
	c.Logf("%d pods, %d allocations, %d pods refused, %d devices with two pods (%d of an ordinary init container)", c.pods, c.allocations, c.refused, c.twice, c.twiceInit)
}

// randomPod is one of the forms that pods with devices have.
func (c *churn) randomPod() *v1.Pod {
	c.pods++
	name := fmt.Sprintf("pod-%d", c.pods)
	switch rand.N(7) {
	case 0:
		return c.pod(name, nil, 1+rand.N(3))
	case 1:
		return c.pod(name, nil, 1, 1)
	case 2:
		return c.pod(name, []int{1}, 1)
	case 3:
		return c.pod(name, []int{2}, 1)
	case 4, 5:
		return c.pod(name, []int{1}, 0) // only its init container has a device
	default:
		p := c.pod(name, []int{1, 1}, 1)
		always := v1.ContainerRestartPolicyAlways
		p.Spec.InitContainers[1].RestartPolicy = &always
		return p
	}
}

// demand is the most devices that a pod takes.
func demand(p *v1.Pod) (n int) {
	for _, one := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		n += count(one)
	}
	return n
}

func count(c v1.Container) int {
	quantity := c.Resources.Limits[gpus]
	return int(quantity.Value())
}

// free is the number of devices that no pod has. Only the test's goroutine makes it smaller.
func (c *churn) free() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	used := map[string]bool{}
	for _, devices := range c.held {
		for id := range devices {
			used[id] = true
		}
	}
	return 8 - len(used)
}

// admit admits a pod, for which there are devices.
func (c *churn) admit(p *v1.Pod) {
	c.Helper()
	c.mu.Lock()
	c.held[p.Name] = map[string]bool{} // it may end from now on, as its kubelet has it
	c.mu.Unlock()
	if err := c.allocate(p); err != nil {
		if c.refused++; c.refused <= 5 {
			c.Logf("%s refused: %v", p.Name, err)
		}
		c.mu.Lock()
		delete(c.held, p.Name)
		c.mu.Unlock()
		return
	}
	mine := map[string]bool{}
	for i, one := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		listed := i >= len(p.Spec.InitContainers) || one.RestartPolicy != nil
		for _, id := range c.node.held(p, one.Name) {
			mine[id] = mine[id] || listed
		}
		if count(one) > 0 {
			c.allocations++
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for other, devices := range c.held {
		for id, listed := range devices {
			if also, both := mine[id]; both {
				if c.twice++; !listed || !also {
					c.twiceInit++
				}
				c.Logf("%s: pods %s and %s", id, other, p.Name)
			}
		}
	}
	c.held[p.Name] = mine
}

// endOne ends a pod that was admitted.
func (c *churn) endOne() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, devices := range c.held {
		if len(devices) == 0 {
			continue // it is being admitted
		}
		for _, p := range c.activePods() {
			if p.Name == name {
				c.remove(p)
			}
		}
		delete(c.held, name)
		return
	}
}

func (c *churn) restartKubelet() {
	c.stopPodResources()
	c.stopKubelet()
	c.startKubelet()
	c.servePodResources()
	c.awaitCapacity(gpus, 8, 8)
}

func (c *churn) restartAgent() {
	c.End(c.agent, []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[rand.N(2)])
	c.agent = c.Start(c.flags...)
	c.Await("the next agent's registration", func() bool { return strings.Contains(c.Read(c.agent.Log), "msg=registered") })
	c.awaitCapacity(gpus, 8, 8)
}

// listAllTheTime makes clients list the pods without a pause, until stop is called.
func (c *churn) listAllTheTime(clients int) (stop func()) {
	conn, err := grpc.NewClient("unix:"+c.podResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	c.Must(err)
	ctx, cancel := context.WithCancel(c.Context())
	var running sync.WaitGroup
	for range clients {
		running.Go(func() {
			for ctx.Err() == nil {
				_, _ = podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
			}
		})
	}
	return func() { cancel(); running.Wait(); _ = conn.Close() }
}
