package dra

import (
	"context"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
)

// taints are those of a device at the API server.
func (n *node) taints(device string) []resourceapi.DeviceTaint { return n.api.devices()[device].Taints }

// awaitTaint waits until a device has a taint, or none, and returns when the API server stored that.
func (n *node) awaitTaint(device string, tainted bool) time.Time {
	n.Helper()
	n.api.await("a change of taints", func(all []*resourceapi.ResourceSlice) bool {
		d, ok := devicesOf(n.T, all)[device]
		return ok && (len(d.Taints) > 0) == tainted
	})
	_, events, _ := n.api.state()
	for i := len(events) - 1; i >= 0; i-- { // back to the event that made it so
		if i == 0 || !hasTaint(events[i-1].slice, device, tainted) {
			return events[i].at
		}
	}
	return time.Time{}
}

func hasTaint(slice *resourceapi.ResourceSlice, device string, tainted bool) bool {
	for _, d := range slice.Spec.Devices {
		if d.Name == device {
			return (len(d.Taints) > 0) == tainted
		}
	}
	return false
}

// awaitUpdate waits for the kubelet's order to write the status of a pod.
func (n *node) awaitUpdate(p *v1.Pod) {
	n.Helper()
	for late := time.After(plenty); ; {
		select {
		case u := <-n.kubelet.Updates():
			for _, uid := range u.PodUIDs {
				if uid == string(p.UID) {
					return
				}
			}
		case <-late:
			n.Fatal("the kubelet was not told of a change")
		}
	}
}

// quick makes devices recover in seconds, and as often as a test wants.
var quick = []string{"--health-period=500ms", "--recovery-dwell=1s", "--recovery-checks=1", "--recovery-limit=1000"}

// A fault under a pod: a taint for the scheduler, and the same text for the pod's owner. Recovery takes both away.
func TestCase38And48FaultIsATaintAndInThePodsStatus(t *testing.T) {
	n, a := newReady(t, "h100x8", 8, quick...)
	gpu := deviceName(n.UUIDs()[3])
	p := n.pod("held", claim("held", result("gpu", gpu)))
	names := n.run(p)
	n.Await("health", func() bool { return strings.HasPrefix(n.health(p)[names[0]], "Healthy") })
	var toTaint, toStatus spread
	for round := range 3 {
		n.drainUpdates()
		began := time.Now()
		n.Sim("lose", "3")
		n.awaitUpdate(p)
		n.Await("a message", func() bool { return strings.HasPrefix(n.health(p)[names[0]], "Unhealthy: ") })
		toStatus = append(toStatus, time.Since(began))
		toTaint = append(toTaint, n.awaitTaint(gpu, true).Sub(began))
		text, taint := n.health(p)[names[0]], n.taints(gpu)[0]
		if round == 0 {
			t.Logf("status: %s; taint: %s=%s:%s %s", text, taint.Key, taint.Value, taint.Effect, taint.TimeAdded)
			if words := strings.TrimPrefix(text, "Unhealthy: "); !strings.Contains(n.Read(a.Log), words) {
				t.Errorf("the log does not have %q", words)
			}
			if inspect := n.inspect(); !strings.Contains(inspect, taint.Key+":NoSchedule") || !strings.Contains(inspect, "claim default/held: GPU 3") {
				t.Errorf("inspect lacks the taint or the claim:\n%s", inspect)
			}
		}
		if taint.Effect != resourceapi.DeviceTaintEffectNoSchedule || !strings.HasPrefix(taint.Key, driverName+"/") || taint.TimeAdded == nil {
			t.Errorf("%v", taint)
		}
		n.Sim("restore", "3")
		n.awaitTaint(gpu, false)
		n.Await("recovery", func() bool { return strings.HasPrefix(n.health(p)[names[0]], "Healthy") })
	}
	t.Logf("from a lost GPU (including the run of simctl) to the pod's status: %v; to the taint: %v", toStatus, toTaint)
	if toTaint.quantile(0.5) > 2*time.Second || toStatus.quantile(0.5) > 2*time.Second {
		t.Error("half of the faults took more than two seconds")
	}
}

func (n *node) drainUpdates() {
	for {
		select {
		case <-n.kubelet.Updates():
		default:
			return
		}
	}
}

// Measured from the event in the driver to what others see, without a restart of the machine between.
func TestMeasureXIDToTaintAndStatus(t *testing.T) {
	n, _ := newReady(t, "h100x8", 8)
	var toTaint, toStatus spread
	for i, id := range n.UUIDs() {
		p := n.pod("pod-"+id, claim("claim-"+strings.ToLower(id), result("gpu", deviceName(id))))
		names := n.run(p)
		slot := string(rune('0' + i))
		n.drainUpdates()
		n.Sim("xid", slot, "79")
		began := time.Now() // simctl returns when the driver has the event
		n.Await("a message", func() bool { return strings.HasPrefix(n.health(p)[names[0]], "Unhealthy: ") })
		toStatus = append(toStatus, time.Since(began))
		toTaint = append(toTaint, n.awaitTaint(deviceName(id), true).Sub(began))
	}
	t.Logf("XID to the pod's status: %v; to the taint: %v", toStatus, toTaint)
	if toTaint.quantile(0.5) > 2*time.Second || toStatus.quantile(0.5) > 2*time.Second {
		t.Error("half of the faults took more than two seconds")
	}
}

// A GPU that comes and goes quickly: the API server gets a bounded number of writes.
func TestCase38Flapping(t *testing.T) {
	n, _ := newReady(t, "h100x8", 8, quick...)
	gpu := deviceName(n.UUIDs()[0])
	_, before, _ := n.api.state()
	began := time.Now()
	const flaps = 20
	for range flaps {
		n.Sim("lose", "0")
		n.Sim("restore", "0")
	}
	n.awaitTaint(gpu, false)
	_, after, _ := n.api.state()
	writes, took := len(after)-len(before), time.Since(began)
	t.Logf("%d losses within %v: %d writes", flaps, took.Round(time.Millisecond), writes)
	if limit := 2*flaps + 2; writes > limit {
		t.Errorf("%d writes for %d losses", writes, flaps)
	}
}

// stream opens a stream of health, and sends each message to a channel, until the node's test ends.
func (n *node) stream() <-chan *drahealth.NodeWatchResourcesResponse {
	n.Helper()
	stream, err := drahealth.NewDRAResourceHealthClient(n.dial(n.ownSockets()[0])).NodeWatchResources(n.Context(), &drahealth.NodeWatchResourcesRequest{})
	n.Must(err)
	messages := make(chan *drahealth.NodeWatchResourcesResponse, 1000)
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			messages <- m
		}
	}()
	return messages
}

func (n *node) receive(messages <-chan *drahealth.NodeWatchResourcesResponse) *drahealth.NodeWatchResourcesResponse {
	n.Helper()
	select {
	case m := <-messages:
		return m
	case <-time.After(plenty):
		n.Fatal("no message")
		return nil
	}
}

func TestCase40HealthStreams(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	ids := n.UUIDs()

	// A reader that never reads, and one that is gone: neither delays others.
	_, err := drahealth.NewDRAResourceHealthClient(n.dial(n.ownSockets()[0])).NodeWatchResources(t.Context(), &drahealth.NodeWatchResourcesRequest{})
	n.Must(err)
	gone, cancel := context.WithCancel(t.Context())
	_, err = drahealth.NewDRAResourceHealthClient(n.dial(n.ownSockets()[0])).NodeWatchResources(gone, &drahealth.NodeWatchResourcesRequest{})
	n.Must(err)
	cancel()

	one, other := n.stream(), n.stream()
	began := time.Now()
	for _, s := range []<-chan *drahealth.NodeWatchResourcesResponse{one, other} {
		first := n.receive(s)
		if len(first.Devices) != 8 {
			t.Errorf("the first message has %d devices", len(first.Devices))
		}
		for _, d := range first.Devices {
			if d.Health != drahealth.HealthStatus_HEALTHY || d.Device.PoolName != nodeName || len(healthMessage(d)) > 1024 {
				t.Errorf("%v", d)
			}
			if timeout := healthTimeout(d); timeout != 0 && timeout < 15 {
				t.Errorf("the health is stale after %d s, and repeated each 10 s", timeout)
			}
		}
	}
	n.receive(one) // repeated without a change
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("repeated after %v", took)
	}
	n.Sim("xid", "5", "79")
	for _, s := range []<-chan *drahealth.NodeWatchResourcesResponse{one, other} {
		for unhealthy := ""; unhealthy == ""; {
			for _, d := range n.receive(s).Devices {
				if d.Health == drahealth.HealthStatus_UNHEALTHY {
					unhealthy = d.Device.DeviceName
					if text := healthMessage(d); healthMessages && !strings.Contains(text, "XID 79") {
						t.Errorf("message %q", text)
					}
				}
			}
			if unhealthy != "" && unhealthy != deviceName(ids[5]) {
				t.Errorf("%s is unhealthy", unhealthy)
			}
		}
	}
}
