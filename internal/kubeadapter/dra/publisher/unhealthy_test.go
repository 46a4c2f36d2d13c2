package publisher_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// Where the API server drops taints, a device that must not get new work is not listed, unless a claim has it: its capacity would count as
// free.
func TestUnhealthyDevicesWithoutTaints(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.stop()
		a.api.DropFields(true, false)
		a.start()
		devices := gpus(4)
		devices[1] = tainted(devices[1], kubeapi.NoEffect) // degraded
		devices[2] = tainted(devices[2], kubeapi.NoSchedule)
		devices[3] = tainted(devices[3], kubeapi.NoExecute)
		devices[3].Held = true
		bare := gpus(4)
		a.set(devices...)
		a.want(bare[0], bare[1], bare[3])
		a.wantProblem()
		devices[3].Held = false // the claim has ended
		a.set(devices...)
		a.want(bare[0], bare[1])
		a.api.ForgetRequests()
		a.set(gpus(4)...) // all are healthy
		a.after(5 * time.Second)
		a.want(bare...)
		sick := gpus(4)
		sick[0] = tainted(sick[0], kubeapi.NoSchedule)
		a.devices.Store(sick)
		a.after(time.Millisecond)
		a.want(bare[1:]...)
	})
	inBubble(t, func(a *agent) { // a server that keeps them has all devices
		sick := []kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule), gpu(1)}
		a.set(sick...)
		a.want(sick...)
	})
}
