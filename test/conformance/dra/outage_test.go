package dra

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// outage is how long the API server is gone in tests: some seconds, since what the agent does meanwhile does not depend on time, or what
// the environment names.
func outage(t *testing.T) time.Duration {
	text := os.Getenv("TANDEM_API_OUTAGE") // 10m
	if text == "" {
		return 6 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// sleep lets time pass that is part of a scenario.
func sleep(t *testing.T, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}

// Prepared claims go on, and end. A new one waits within the call, which the kubelet ends after 45 s.
func TestCase13APIServerGone(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	ids := n.UUIDs()
	stays, ends := claim("stays", result("gpu", deviceName(ids[0]))), claim("ends", result("gpu", deviceName(ids[1])))
	podStays, podEnds := n.pod("stays", stays), n.pod("ends", ends)
	names := n.run(podStays)
	n.run(podEnds)
	newcomer := claim("newcomer", result("gpu", deviceName(ids[2])))
	n.pod("newcomer", newcomer)
	n.api.goAway()
	began := time.Now()

	n.Must(n.finish(podEnds))
	_, err := n.call(request(stays))
	n.Must(err)
	n.mustResolve(names)
	n.Sim("xid", "0", "79")
	n.Await("health without an API server", func() bool { return strings.HasPrefix(n.health(podStays)[names[0]], "Unhealthy: ") })
	called := time.Now()
	answer, err := n.call(request(newcomer))
	n.Must(err)
	if text := answer[string(newcomer.UID)].GetError(); !strings.Contains(text, "API server") {
		t.Errorf("%q", text)
	} else {
		t.Logf("after %v: %s", since(called), text)
	}
	if took := time.Since(called); took < 30*time.Second {
		t.Errorf("the call did not wait for the API server: %v", took)
	}

	sleep(t, outage(t)-time.Since(began))
	n.mustResolve(names)
	n.api.listen()
	answer, err = n.call(request(newcomer))
	n.Must(err)
	if text := answer[string(newcomer.UID)].GetError(); text != "" {
		t.Errorf("after the outage: %s", text)
	}
	n.Must(n.finish(podStays))
}

func TestCase14APIServerReturnsDuringACall(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	ids := n.UUIDs()
	var times spread
	for i := range 5 {
		c := claim(fmt.Sprintf("waiting-%d", i), result("gpu", deviceName(ids[i])))
		n.api.putClaim(c)
		n.api.goAway()
		type outcome struct {
			text string
			at   time.Time
			err  error
		}
		done := make(chan outcome, 1)
		go func() {
			answer, err := n.call(request(c))
			done <- outcome{answer[string(c.UID)].GetError(), time.Now(), err}
		}()
		sleep(t, 2*time.Second)
		n.api.listen()
		returned := time.Now()
		o := <-done
		n.Must(o.err)
		if o.text != "" {
			t.Error(o.text)
		}
		times = append(times, o.at.Sub(returned))
	}
	t.Logf("prepared after the API server's return: %v", times)
	if p := times.quantile(0.5); p > time.Second {
		t.Errorf("half of the calls took more than %v after the API server's return", p)
	}
}

// A fault while the API server is away, and which lasts, is a taint when it is back, with the time of the fault.
func TestCase39TaintAfterAnOutage(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	gpu := deviceName(n.UUIDs()[4])
	n.api.goAway()
	began := time.Now()
	n.Sim("lose", "4")
	ended := time.Now()
	sleep(t, outage(t))
	n.api.listen()
	returned := time.Now()
	n.api.await("a taint", func(all []*resourceapi.ResourceSlice) bool { return len(devicesOf(t, all)[gpu].Taints) > 0 })
	t.Logf("tainted %v after the API server's return", since(returned))
	added := n.api.devices()[gpu].Taints[0].TimeAdded
	if added == nil || added.Time.Before(began.Add(-2*time.Second)) || added.Time.After(ended.Add(min(5*time.Second, outage(t)/2))) {
		t.Errorf("timeAdded %v, the fault was at %v", added, began)
	}
}
