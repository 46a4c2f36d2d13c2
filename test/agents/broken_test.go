package agents

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/configtest"
)

// refused is what each agent logs last about a file that it does not use.
var refused = map[string]string{k8sGPU: notReloaded, nomadGPU: "policy refused, previous policy remains in effect"}

// A reload of any broken file leaves every stream as it is: nothing is sent, registered or opened again, and devices are reserved as
// before. The problem is in the log.
func TestBrokenFilesLeaveStreamsUntouched(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		a.useFile(header + "policy:\n  rules:\n    - {select: {index: 0}, use: time-slicing, replicas: 2}\n    - {select: {index: 7}, use: reserved}\n")
		a.start()
		a.healthy(8, 8)
		sent := func() (sent []int) {
			if a.program == nomadGPU {
				return []int{len(a.nomad.Fingerprints())}
			}
			for _, r := range a.kubelet.Registrations() {
				sent = append(sent, len(a.kubelet.Lists(r.Resource)))
			}
			return sent
		}
		var sockets []string
		if a.program == k8sGPU {
			a.registered(2)
			sockets = a.kubeletSockets()
		}
		before, opened, pid := sent(), a.calls("nvmlInit"), a.cmd.Process.Pid
		n := 0
		for _, c := range configtest.Broken {
			if c.File == "" || a.program == nomadGPU && !c.Both {
				continue
			}
			n++
			a.useFile(c.File)
			a.signal(syscall.SIGHUP)
			a.logsTimes(refused[a.program], n)
			place, _, _ := strings.Cut(strings.TrimPrefix(c.Want, "/c.yaml"), " = ")
			a.logs("ERROR", "config.yaml"+place)
		}
		if n < 14 {
			t.Errorf("only %d files", n)
		}
		if now := sent(); !slices.Equal(now, before) || a.calls("nvmlInit") != opened || a.cmd.Process.Pid != pid {
			a.Errorf("lists %v, were %v; nvmlInit %d, was %d", now, before, a.calls("nvmlInit"), opened)
		}
		if a.program == k8sGPU && !slices.Equal(a.kubeletSockets(), sockets) {
			a.Errorf("sockets %v, were %v", a.kubeletSockets(), sockets)
		}
		a.allocates(1)
		if _, err := a.allocate(a.driver.UUID(0) + "::1"); err != nil {
			a.Error(err)
		}
		a.xid(2, 95) // the streams are alive
		a.healthy(8, 7)
		a.stop()
	})
}
