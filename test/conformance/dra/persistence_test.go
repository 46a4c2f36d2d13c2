package dra

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// restartKubelet ends the kubelet and starts another one on its files, with pods as before.
func (n *node) restartKubelet() *kubelet {
	n.Helper()
	n.kubelet.stop()
	return n.startKubelet()
}

// What is on disk when the agent is killed between two steps of Prepare. The next agent finishes what Prepare had begun, and Unprepare
// removes it in any case.
func TestCase10KilledBetweenTheStepsOfPrepare(t *testing.T) {
	started := func(r *prepared.Claim) { r.State = prepared.Started }
	for _, c := range []struct {
		name   string
		change func(*prepared.Claim) // of the record
		record *string               // in its place
		specs  bool                  // the CDI specifications are on disk
	}{
		{name: "nothing", record: new("")},
		{name: "record started", change: started},
		{name: "specification written", change: started, specs: true},
		{name: "record complete, no specification", change: func(*prepared.Claim) {}},
		{name: "record complete", change: func(*prepared.Claim) {}, specs: true},
		{name: "record cut off", record: ptr.To(`{"version":1,"bootID`), specs: true},
		{name: "record of zeros", record: ptr.To(strings.Repeat("\x00", 512)), specs: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, next := range []string{"Prepare", "Unprepare"} {
				n, a := newReady(t, "h100x8", 8)
				held := claim("held", result("gpu", deviceName(n.UUIDs()[0])))
				n.pod("held", held)
				answer, err := n.call(request(held))
				n.Must(err)
				n.End(a, syscall.SIGKILL)
				record, _ := n.record(held)
				if c.change != nil {
					c.change(&record)
					text, err := json.Marshal(record)
					n.Must(err)
					n.Must(os.WriteFile(n.recordPath(held), text, 0o600))
				} else if *c.record == "" {
					n.Must(os.Remove(n.recordPath(held)))
				} else {
					n.Must(os.WriteFile(n.recordPath(held), []byte(*c.record), 0o600))
				}
				if !c.specs {
					n.Must(os.RemoveAll(n.cdiDir))
				}
				n.startAgent()
				n.kubelet.awaitRegistrations(t, 2)
				if next == "Prepare" {
					again, err := n.call(request(held))
					n.Must(err)
					if !slices.Equal(marshal(t, answer), marshal(t, again)) {
						t.Errorf("%v, before the kill %v", again, answer)
					}
					names := cdiNames(again[string(held.UID)].GetDevices()[0])
					n.Await("the specification, which needs the driver", func() bool { return len(names) > 0 && len(n.unresolved(names)) == 0 })
				}
				gone, err := n.callUnprepare(request(held))
				if err != nil || gone[string(held.UID)].GetError() != "" {
					t.Errorf("Unprepare: %v %v", gone, err)
				}
				if _, ok := n.record(held); ok {
					t.Error("the record is still there")
				}
				n.run(n.pod("next", claim("next", result("gpu", deviceName(n.UUIDs()[0]))))) // the GPU is free
			}
		})
	}
}

// After a reboot /var/run is empty, and nothing runs that a record of the former boot is about.
func TestCase11Reboot(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	gpu := deviceName(n.UUIDs()[0])
	p := n.pod("survivor", claim("survivor", result("gpu", gpu)))
	before := n.run(p)
	stale := n.pod("force-deleted", claim("force-deleted", result("gpu", deviceName(n.UUIDs()[1]))))
	n.run(stale)
	n.End(a, syscall.SIGKILL)
	n.kubelet.stop()
	n.Must(os.RemoveAll(n.cdiDir))
	n.reboot()
	k := n.startKubelet()
	n.startAgent()
	k.awaitRegistered(t)
	n.Must(n.prepare(p)) // of the new sandbox
	if after := n.cdi(p); !slices.Equal(after, before) {
		t.Errorf("%v, before %v", after, before)
	}
	n.mustResolve(before)
	n.run(n.pod("next", claim("next", result("gpu", deviceName(n.UUIDs()[1]))))) // what the former boot had is free
	n.Must(n.finish(stale))
	n.Must(n.finish(p))
}

// reboot gives the machine another boot ID.
func (n *node) reboot() {
	n.Helper()
	path := filepath.Join(n.Root, "machine.conf")
	n.Must(os.WriteFile(path, []byte(strings.Replace(n.Read(path), "[machine]\n", "[machine]\nboots = 2\n", 1)), 0o600))
	n.Sim("sync")
}

// Container runtimes read specifications at each start of a container, which no call of the kubelet precedes.
func TestCase12SpecificationDeletedUnderAClaim(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	held := claim("held", result("gpu", deviceName(n.UUIDs()[0])))
	names := n.run(n.pod("held", held))
	remove := func() {
		n.Helper()
		for _, path := range n.specs() {
			n.Must(os.Remove(path))
		}
	}
	remove()
	began := time.Now()
	n.Await("the specification without a call", func() bool { return len(n.unresolved(names)) == 0 })
	t.Logf("restored %v after its end", since(began))
	remove()
	_, err := n.call(request(held))
	n.Must(err)
	n.Await("the specification after a call", func() bool { return len(n.unresolved(names)) == 0 })
	n.End(a, syscall.SIGKILL)
	remove()
	n.startAgent()
	n.Await("the specification after a start", func() bool { return len(n.unresolved(names)) == 0 })
}

// While NVIDIA's hook program is missing no container with a device would start: devices get no new pods, and the kubelet's call for one that was
// scheduled before waits for the program. What runs keeps its specification.
func TestHookProgramMissing(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	ids := n.UUIDs()
	running := n.run(n.pod("running", claim("running", result("gpu", deviceName(ids[0])))))
	n.Must(os.Remove(n.hook()))
	n.Must(os.WriteFile(filepath.Join(n.cdiDir, "other.json"), nil, 0o600)) // else it is noticed within a minute
	n.awaitTaint(deviceName(ids[1]), true)
	if taint := n.taints(deviceName(ids[1]))[0]; taint.Key != "gpu.nvidia.com/cdi-undefined" || taint.Effect != resourceapi.DeviceTaintEffectNoSchedule {
		t.Errorf("%+v", taint)
	}
	n.mustResolve(running)
	scheduled := n.pod("scheduled", claim("scheduled", result("gpu", deviceName(ids[1]))))
	prepared := make(chan error, 1)
	began := time.Now()
	go func() { prepared <- n.prepare(scheduled) }()
	n.Must(os.WriteFile(n.hook(), nil, 0o755)) //nolint:gosec // a program
	n.Must(<-prepared)
	t.Logf("prepared %v after the call", since(began))
	n.awaitTaint(deviceName(ids[1]), false)
}

// The kubelet asks again by itself; until the driver is back the pod stays.
func TestCase49PodEndsWhenTheDriverIsBack(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	p := n.pod("held", claim("held", result("gpu", deviceName(n.UUIDs()[0]))))
	n.run(p)
	n.End(a, syscall.SIGKILL)
	if err := n.finish(p); err == nil {
		t.Fatal("unprepared without a driver")
	}
	n.Sim("hide") // nor is the GPU's driver there
	n.api.goAway()
	began := time.Now()
	n.startAgent()
	n.Await("the end of the pod", func() bool { return n.finish(p) == nil })
	t.Logf("unprepared %v after the start of the agent", since(began))
}

// Containers restart without the agent: the kubelet has the names on its disk, and the specification is on the node's.
func TestCase50RunningPodsWithoutAgent(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	var pods []*v1.Pod
	for i, id := range n.UUIDs()[:2] {
		name := []string{"a", "b"}[i]
		pods = append(pods, n.pod(name, claim(name, result("gpu", deviceName(id)))))
	}
	names := [][]string{n.run(pods[0]), n.run(pods[1])}
	n.End(a, syscall.SIGTERM)
	for _, restart := range []bool{false, true} {
		if restart {
			n.restartKubelet()
		}
		for i, p := range pods {
			if got := n.cdi(p); !slices.Equal(got, names[i]) {
				t.Errorf("%v, before %v", got, names[i])
			}
			n.mustResolve(names[i])
		}
	}
	n.startAgent()
	n.kubelet.awaitRegistered(t)
	for i, p := range pods { // a new sandbox of each: the kubelet asks anew
		n.Must(n.prepare(p))
		if got := n.cdi(p); !slices.Equal(got, names[i]) {
			t.Errorf("%v, before %v", got, names[i])
		}
		n.Must(n.finish(p))
	}
}
