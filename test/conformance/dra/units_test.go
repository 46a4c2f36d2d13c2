package dra

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// What a device's state means for a claim that the scheduler has given it.
func TestCase16DevicesThatTakeNoWork(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x8")
	config := n.config("version: v1\n")
	path := strings.TrimPrefix(config, "--config-file=")
	k := n.startKubelet()
	a := n.startAgent(config)
	k.awaitRegistered(t)
	n.awaitDevices(8)
	ids := n.UUIDs()
	held := n.pod("excluded", claim("excluded", result("gpu", deviceName(ids[2]))))
	names := n.run(held)

	n.Sim("xid", "1", "95")
	n.awaitTaint(deviceName(ids[1]), true)
	n.Sim("lose", "0") // the second: when a GPU is lost, the wait for events fails, and those of others then are in the kernel log only
	n.Must(os.WriteFile(path, []byte("version: v1\nflags: {}\n"), 0o600))
	n.awaitTaint(deviceName(ids[0]), true)
	tolerated := func(name, id string) *resourceapi.ResourceClaim {
		r := result("gpu", deviceName(id))
		r.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
		return claim(name, r)
	}
	for _, c := range []struct {
		claim *resourceapi.ResourceClaim
		want  string // in the error; "" = prepared
	}{
		{claim("lost", result("gpu", deviceName(ids[0]))), "lost"},
		{tolerated("lost-tolerated", ids[0]), "lost"},
		{claim("unhealthy", result("gpu", deviceName(ids[1]))), "XID 95"},
		{tolerated("unhealthy-tolerated", ids[1]), ""},
	} {
		n.api.putClaim(c.claim)
		answer, err := n.call(request(c.claim))
		n.Must(err)
		text := answer[string(c.claim.UID)].GetError()
		if c.want == "" && text != "" || !strings.Contains(text, c.want) {
			t.Errorf("%s: %q, want %q", c.claim.Name, text, c.want)
		}
		t.Logf("%s: %s", c.claim.Name, text)
	}

	// A device that the policy no longer offers, and that a claim has: listed and tainted until the claim ends.
	n.End(a, syscall.SIGTERM)
	n.startAgent(config, "--exclude="+ids[2]+","+ids[6])
	n.kubelet.awaitRegistrations(t, 2)
	n.awaitTaint(deviceName(ids[2]), true)
	n.mustResolve(names)
	late := claim("late", result("gpu", deviceName(ids[2])))
	n.api.putClaim(late)
	answer, err := n.call(request(late))
	n.Must(err)
	if text := answer[string(late.UID)].GetError(); text == "" {
		t.Error("a device that is not offered any more was prepared")
	} else {
		t.Log(text)
	}
	n.Must(n.finish(held))
	n.api.await("the device's end", func(all []*resourceapi.ResourceSlice) bool {
		_, listed := devicesOf(t, all)[deviceName(ids[2])]
		return !listed
	})
}

// While the driver is closed on purpose, a call waits for its return, and its error shows that when it gives up.
func TestCase24PrepareDuringAQuiesce(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	ids := n.UUIDs()
	n.Must(a.Cmd.Process.Signal(syscall.SIGUSR1))
	n.awaitTaint(deviceName(ids[0]), true)
	long, short := claim("long", result("gpu", deviceName(ids[0]))), claim("short", result("gpu", deviceName(ids[1])))
	n.api.putClaim(long)
	n.api.putClaim(short)
	began := time.Now()
	answer, err := n.call(request(long))
	n.Must(err)
	text := answer[string(long.UID)].GetError()
	if !strings.Contains(text, "maintenance") || time.Since(began) < 20*time.Second {
		t.Errorf("after %v: %q", since(began), text)
	}
	t.Logf("after %v: %s", since(began), text)

	type outcome struct {
		text string
		err  error
		at   time.Time
	}
	done := make(chan outcome, 1)
	go func() {
		answer, err := n.call(request(short))
		done <- outcome{answer[string(short.UID)].GetError(), err, time.Now()}
	}()
	sleep(t, time.Second)
	n.Must(a.Cmd.Process.Signal(syscall.SIGUSR2))
	resumed := time.Now()
	o := <-done
	n.Must(o.err)
	if o.text != "" {
		t.Error(o.text)
	}
	t.Logf("prepared %v after resume", o.at.Sub(resumed).Round(time.Millisecond))
}
