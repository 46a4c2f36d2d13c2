package kubelet

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

const lastInAnotherPool = `
version: v1
policy:
  rules:
    - {select: {index: 7}, name: nvidia.com/special}
`

// A pod holds eight GPUs when a policy moves one of them to another resource. kubelet 1.37 dereferences nil when such a
// pod is resized in place or admitted again, unless the ID stays in the list of the resource that it was allocated under.
func TestResizeAfterADeviceMovedToAnotherResource(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet("best-effort")
	option := n.policy("version: v1\n")
	a := n.startAgent(option)
	n.awaitCapacity(gpus, 8, 8)
	p := n.pod("holder", nil, 8)
	n.must(n.allocate(p))
	n.must(os.WriteFile(strings.TrimPrefix(option, configFile), []byte(lastInAnotherPool), 0o600))
	n.must(a.cmd.Process.Signal(syscall.SIGHUP))
	n.awaitLog(a, "what is offered changes")
	n.await("GPU 7 under its new name", func() bool { c, _ := n.capacity("nvidia.com/special"); return c == 1 })
	n.await("the IDs that no longer take work", func() bool { _, healthy := n.capacity(gpus); return healthy == 7 })
	pause := time.NewTimer(3 * time.Second) // longer than any ID that nobody holds stays listed
	<-pause.C
	admit := func(op lifecycle.Operation) (ok bool, reason string) {
		defer func() {
			if r := recover(); r != nil {
				t.Errorf("kubelet panics: %v", r)
			}
		}()
		r := n.admit.Admit(n.Context(), &lifecycle.PodAdmitAttributes{Pod: p, Operation: op})
		return r.Admit, r.Reason + " " + r.Message
	}
	if ok, reason := admit(lifecycle.ResizeOperation); !ok {
		t.Errorf("resize in place is refused: %s", reason)
	}
	if got := n.held(p, "app0"); !slices.Equal(got, slices.Sorted(slices.Values(n.uuids()))) {
		t.Errorf("the pod holds %v", got)
	}
}
