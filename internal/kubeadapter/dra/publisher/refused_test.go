package publisher_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// bad has the server refuse slices with a device of this name, as with a name that is no DNS label.
func bad(name string) func(kubeapitest.Slice) error {
	return func(s kubeapitest.Slice) error {
		for i, d := range s.Spec.Devices {
			if d.Name == name {
				return fmt.Errorf("spec.devices[%d].name: Invalid value: %q: a lowercase RFC 1123 label", i, name)
			}
		}
		return nil
	}
}

// One write that is refused with 400, 413 or 422, as a webhook does that fails, is written a moment later.
func TestOneRefusalIsNotTheLast(t *testing.T) {
	for _, code := range []int{400, 413, 422} {
		for _, n := range []int{2, 100} {
			inBubble(t, func(a *agent) {
				a.set(gpus(n)...)
				a.api.Fail("update", 1, kubeapitest.Failure{Code: code, Message: "admission webhook failed"})
				a.set(gpus(n + 1)[1:]...) // one left, one is new
				a.after(2 * time.Second)
				a.want(gpus(n + 1)[1:]...)
				a.wantProblem()
			})
		}
	}
}

// While all writes are refused nothing can be published, and each node tries the taint and the comparison about once a minute. When they are accepted again, a taint
// and all devices are there within a minute and a half, however long it was.
func TestRefusalsForADay(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(8)...)
		a.api.Fail("update", -1, kubeapitest.Failure{Code: 400, Message: "admission webhook failed", DryRuns: true})
		a.api.Fail("create", -1, kubeapitest.Failure{Code: 400, Message: "admission webhook failed", DryRuns: true})
		latest := gpus(9)[1:]
		latest[2] = tainted(latest[2], kubeapi.NoSchedule)
		a.set(latest...)
		a.wantProblem("400", "admission webhook failed")
		a.after(time.Hour)
		a.api.ForgetRequests()
		a.after(23 * time.Hour)
		if n := len(a.api.Requests()); n > 23*60*6 { // two of them a try, and watches
			t.Errorf("%d requests in 23 hours", n)
		}
		a.wantLog("admission webhook failed", 1)
		a.api.Resume()
		a.after(90 * time.Second)
		a.want(latest...)
		a.wantProblem()
	})
}

// One device that the server refuses keeps none of the others from being published, and is tried again.
func TestOneRefusedDevice(t *testing.T) {
	for _, n := range []int{3, 100} {
		inBubble(t, func(a *agent) {
			a.set(gpus(n)...)
			a.api.Validate(bad("Bad"))
			a.api.ForgetRequests()
			a.set(slices.Insert(gpus(n + 1)[1:], 1, kubeapi.Device{Name: "Bad"})...) // one left, one is new
			a.want(gpus(n + 1)[1:]...)
			a.wantProblem("Bad", "422", "a lowercase RFC 1123 label")
			if r := len(a.api.Requests()); r > 60 {
				t.Errorf("%d requests", r)
			}
			a.api.ForgetRequests()
			a.after(24 * time.Hour)
			if r := len(a.api.Requests()); r > 1000 { // a Node and a watch every five minutes, two dry runs in about eight
				t.Errorf("%d requests in a day", r)
			}
			a.wantLog("refused as invalid", 1)
			a.api.Validate(nil)
			a.after(11 * time.Minute)
			a.want(slices.Insert(gpus(n + 1)[1:], 1, kubeapi.Device{Name: "Bad"})...)
			a.wantProblem()
		})
	}
}

// A device that is published and becomes one that the server refuses stays as it was, with its present taints: a claim may have it. If it is
// its taints that are refused, it takes no new work.
func TestPublishedDeviceIsRefused(t *testing.T) {
	invalid := "13.0.1-"
	for name, c := range map[string]struct {
		change func(*kubeapi.Device)
		want   func(kubeapi.Device) kubeapi.Device
	}{
		"attribute": {func(d *kubeapi.Device) {
			d.Attributes = map[string]kubeapi.DeviceAttribute{"driverVersion": {Version: &invalid}}
			*d = tainted(*d, kubeapi.NoSchedule)
		}, func(d kubeapi.Device) kubeapi.Device { return tainted(d, kubeapi.NoSchedule) }},
		"taint": {func(d *kubeapi.Device) {
			d.Taints = []kubeapi.DeviceTaint{{Key: "gpu.nvidia.com/xid", Value: "a b", Effect: kubeapi.NoSchedule, TimeAdded: faultTime}}
		}, func(d kubeapi.Device) kubeapi.Device {
			d.Taints = []kubeapi.DeviceTaint{{Key: "gpu.nvidia.com/withdrawn", Value: "refused-by-the-API-server", Effect: kubeapi.NoSchedule}}
			return d
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(a *agent) {
				a.set(gpus(8)...)
				a.api.Validate(func(s kubeapitest.Slice) error {
					for _, d := range s.Spec.Devices {
						if v := d.Attributes["driverVersion"].Version; v != nil && *v == invalid || len(d.Taints) > 0 && strings.Contains(d.Taints[0].Value, " ") {
							return errors.New("invalid")
						}
					}
					return nil
				})
				sick := gpus(8)
				c.change(&sick[3])
				sick[5] = tainted(sick[5], kubeapi.NoSchedule)
				a.set(sick...)
				a.after(2 * time.Second)
				got := a.published()
				for i := range got[3].Taints {
					if got[3].Taints[i].Key == "gpu.nvidia.com/withdrawn" {
						got[3].Taints[i].TimeAdded = time.Time{}
					}
				}
				want := gpus(8)
				want[3], want[5] = c.want(want[3]), tainted(want[5], kubeapi.NoSchedule)
				wantDevices(t, want, got)
				a.wantProblem(gpu(3).Name, "invalid")
				a.api.Wipe(node, "")
				a.after(time.Minute)
				if len(a.published()) != 8 {
					t.Error("the refused device has left")
				}
			})
		})
	}
}

// A device that is not wanted any more, and that the server takes in no form, keeps no other one from getting its taints.
func TestRefusedDeviceThatLeaves(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(8)...)
		a.api.Validate(bad(gpu(3).Name))
		sick := slices.Delete(gpus(8), 3, 4)
		sick[5] = tainted(sick[5], kubeapi.NoSchedule)
		a.set(sick...)
		a.after(10 * time.Second)
		a.want(sick...)
		a.wantProblem()
	})
}

// An attribute that the server refuses at each of many devices, as after an update of the driver: all stay as they are published, with their
// taints, at the cost of a bounded number of requests.
func TestAllDevicesAreRefused(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(200)...)
		a.api.Validate(func(s kubeapitest.Slice) error {
			for _, d := range s.Spec.Devices {
				if d.Attributes["driverVersion"].Version != nil {
					return errors.New("driverVersion")
				}
			}
			return nil
		})
		invalid, want := "580.065", gpus(200)
		want[150] = tainted(want[150], kubeapi.NoSchedule)
		updated := gpus(200)
		for i := range updated {
			updated[i].Attributes = map[string]kubeapi.DeviceAttribute{"driverVersion": {Version: &invalid}}
		}
		updated[150] = tainted(updated[150], kubeapi.NoSchedule)
		a.api.ForgetRequests()
		a.set(updated...)
		a.after(10 * time.Second)
		a.want(want...)
		a.wantProblem("driverVersion", "and 199 more")
		if n := len(a.api.Requests()); n > 500 {
			t.Errorf("%d requests", n)
		}
		a.api.Validate(nil)
		a.after(11 * time.Minute)
		a.want(updated...)
	})
}

// A webhook that can't be asked without a real write refuses all dry runs, and no device: all is published.
func TestDryRunsAreRefused(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.stop()
		a.api.FailDryRuns(kubeapitest.Failure{Code: 400, Message: "admission webhook does not support dry run"})
		a.start()
		a.set(gpus(100)...)
		a.want(gpus(100)...)
		a.set(gpus(101)[1:]...)
		a.want(gpus(101)[1:]...)
		a.wantProblem()
		for range 5 {
			a.api.CutWatches()
			a.after(2 * time.Hour)
		}
		a.wantLog("refuses dry runs", 1)
	})
}

// noEffectNone has the server refuse the effect None, as Kubernetes 1.34 does.
func noEffectNone(s kubeapitest.Slice) error {
	for _, d := range s.Spec.Devices {
		for _, taint := range d.Taints {
			if taint.Effect == kubeapi.NoEffect {
				return errors.New(`spec.devices[0].taints[0].effect: Unsupported value: "None": supported values: "NoExecute", "NoSchedule"`)
			}
		}
	}
	return nil
}

// Kubernetes 1.34 knows no taint with the effect None, and refuses slices with one. A degraded GPU has none there, and keeps nothing from being
// published.
func TestEffectNoneIsRefused(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.stop()
		a.api.Validate(noEffectNone)
		a.start()
		degraded := gpus(100)
		degraded[0] = tainted(degraded[0], kubeapi.NoEffect)
		degraded[70] = tainted(tainted(degraded[70], kubeapi.NoEffect), kubeapi.NoSchedule)
		a.set(degraded...)
		want := gpus(100)
		want[70] = tainted(want[70], kubeapi.NoSchedule)
		a.want(want...)
		a.wantProblem()
		a.wantLog("refused", 0)
		a.api.Validate(nil) // the control plane was upgraded
		a.api.CutWatches()
		a.after(2 * time.Hour)
		a.want(degraded...)
	})
}

// The control plane is set back to 1.34, and a slice has a taint with the effect None: the next urgent taint is published within two seconds.
func TestTaintAfterTheEffectNoneIsRefused(t *testing.T) {
	inBubble(t, func(a *agent) {
		devices := gpus(8)
		devices[0] = tainted(devices[0], kubeapi.NoEffect)
		a.set(devices...)
		a.api.Validate(noEffectNone)
		a.api.CutWatches()
		a.after(time.Minute)
		devices = slices.Clone(devices)
		devices[1] = tainted(devices[1], kubeapi.NoSchedule)
		a.devices.Store(devices)
		a.after(taintWithin)
		want := gpus(8)
		want[1] = devices[1]
		a.want(want...)
		a.wantProblem()
		a.wantLog("refused", 0)
	})
}

// A device that the server refuses even as it is published, as after a new admission policy, leaves the slice: the taints of the others are
// published, without a request after the other. It is back when it is accepted.
func TestNoFormOfADeviceIsAccepted(t *testing.T) {
	for _, n := range []int{8, 100} {
		inBubble(t, func(a *agent) {
			a.set(gpus(n)...)
			a.api.Validate(bad(gpu(3).Name))
			a.api.ForgetRequests()
			sick := gpus(n)
			sick[5] = tainted(sick[5], kubeapi.NoSchedule)
			a.devices.Store(sick)
			for range 20 { // a loop would never let the clock of the bubble reach the end of the two seconds
				time.Sleep(taintWithin / 20)
				if r := len(a.api.Requests()); r > 100 {
					t.Fatalf("%d requests", r)
				}
			}
			a.want(slices.Delete(slices.Clone(sick), 3, 4)...)
			a.wantProblem(gpu(3).Name, "422")
			a.api.Validate(nil)
			a.after(11 * time.Minute)
			a.want(sick...)
			a.wantProblem()
		})
	}
}

// A server that refused dry runs for a moment, when the agent started, is asked again what it supports when it refuses a slice.
func TestDryRunsAreRefusedForAMoment(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.stop()
		a.api.Validate(noEffectNone)
		a.api.Fail("create", 2, kubeapitest.Failure{Code: 400, Message: "admission webhook failed", DryRuns: true})
		a.start()
		degraded := gpus(8)
		degraded[0] = tainted(degraded[0], kubeapi.NoEffect)
		a.set(degraded...)
		a.after(time.Minute)
		a.want(gpus(8)...)
		a.wantProblem()
	})
}
