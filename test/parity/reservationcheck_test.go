package parity

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// refusal is the error with which both refuse a device; "" if both grant it.
func (b *both) refusal(id string) string {
	_, nomad := b.Nomad.Reserve(id)
	_, kubelet := b.Orchestrators.Allocate(id)
	if nomad == nil && kubelet == nil {
		return ""
	}
	k := status.Convert(kubelet)
	if nomad == nil || !strings.HasSuffix(nomad.Error(), k.Message()) || k.Code() != codes.FailedPrecondition {
		return fmt.Sprintf("different for %s: Nomad: %v; kubelet: %v", id, nomad, kubelet) // a check in between may be why
	}
	return k.Message()
}

// Both refuse a device whose memory a process uses, or that did not answer its last check; it stays listed as healthy. As soon as the
// process has ended the device is granted, although the last check has listed it: a task that is started again does not wait.
func TestReservationCheck(t *testing.T) {
	const pid, inMIG = 4242, 4343
	b := start(t, simdriver.Start(t, "a100-mig"), func(c *core.Config) {
		c.ReservationCheck, c.Probe, c.Rescan = inventory.CheckRefuse, time.Hour, time.Hour
	})
	b.AwaitOnly("start", b.Units())
	const slot = 4 // seven instances
	instances := b.UnitsOf(slot)
	at := b.unit(instances[2]).Device.At
	must(t, b.StartProcess(0, pid, 512), b.StartProcess(3, pid, 16),
		b.StartProcess(slot, inMIG, 20, simdriver.At{GI: int(at.GI), CI: int(at.CI)}))
	if got := b.refusal(b.UUID(0)); got != "" {
		t.Errorf("before the next check: %s", got)
	}
	_, _ = b.Monitor.Clear(t.Context(), health.Command{GPU: at.GPU}) // there is nothing to clear, but a check follows each command
	until(t, "the processes are read", func() bool { return b.refusal(instances[2]) != "" })
	const inUse = ": memory in use by processes without a reservation: "
	for id, want := range map[string]string{
		b.UUID(0):    inUse + "pid 4242 (512 MiB)",
		b.UUID(3):    inUse + "pid 4242 (16 MiB)",
		b.UUID(1):    "",
		instances[2]: inUse + "pid 4343 (20 MiB)",
		instances[3]: "",
	} {
		if want != "" {
			want = "reservation check: " + id + want
		}
		if got := b.refusal(id); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
	b.AwaitOnly("those that were refused, too", b.Units())

	must(t, b.Zombie(pid), b.EndProcess(inMIG)) // no check since
	for _, id := range []string{b.UUID(0), b.UUID(3), instances[2]} {
		if got := b.refusal(id); got != "" {
			t.Errorf("after the process has ended: %s", got)
		}
	}
}

func TestReservationCheckOfFailedChecks(t *testing.T) {
	b := start(t, simdriver.Start(t, "h100x8"), func(c *core.Config) {
		c.ReservationCheck, c.Health.ProbeFailures = inventory.CheckRefuse, 1_000_000
	})
	b.AwaitOnly("start", b.Units())
	const call = "nvmlDeviceGetUUID"
	must(t, b.Fail(simdriver.GPU(3), call, "UNKNOWN", simdriver.Always))
	want := "reservation check: " + b.UUID(3) + ": last health check not answered (" + call + ": Unknown Error)"
	until(t, "it is refused", func() bool { return b.refusal(b.UUID(3)) == want })
	if got := b.refusal(b.UUID(2)); got != "" {
		t.Error(got)
	}
	b.AwaitOnly("all are healthy", b.Units())
	must(t, b.Heal())
	until(t, "it is granted", func() bool { return b.refusal(b.UUID(3)) == "" })
}
