package agents

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// refuses waits until a device takes no work because of maintenance, by all that the orchestrator has.
func (a *agent) refuses(id string) {
	a.Helper()
	a.await("maintenance of "+id, func() bool {
		v := a.devices()[id]
		_, err := a.allocate(id)
		return !v.Healthy && strings.Contains(v.Reason, "maintenance") && err != nil && strings.Contains(err.Error(), "maintenance")
	})
}

// In maintenance an agent has no device node open, also not its next process if it is killed: the layout of a GPU changes, and the driver is
// replaced by another version. Devices and the names of their groups stay; removed instances stay listed until the driver is used again. A
// process that has used the old driver ends then.
func TestMaintenance(t *testing.T) {
	both(t, "a100-mig", map[string]any{"mig_strategy": "mixed"}, func(a *agent) {
		const whole, cut = 0, 4 // the second has seven instances
		removed, err := a.driver.Instances(cut)
		a.must(err)
		units := func() int { return len(a.devices()) }
		a.start()
		a.await("devices", func() bool { return a.devices()[a.driver.UUID(whole)].Healthy && a.devices()[removed[0]].Healthy })
		all, name := units(), a.devices()[a.driver.UUID(whole)].Name
		held := func() []string {
			nodes, err := a.driver.HeldBy(a.cmd.Process.Pid)
			a.must(err)
			return nodes
		}
		if len(held()) == 0 {
			a.Error("no device node is open while the driver is in use")
		}
		a.prints("driver released", "quiesce")
		if nodes := held(); len(nodes) > 0 {
			a.Errorf("the command has ended, and the agent has open: %v", nodes)
		}
		a.awaitFile(a.history(), `"Maintenance"`)
		a.healthy(all, 0)
		a.must(a.driver.SetMIG(cut, slices.Repeat([]string{"2g.20gb"}, 3)...))
		for _, id := range []string{a.driver.UUID(whole), removed[6]} {
			a.refuses(id)
		}
		a.kill()
		a.start()
		a.healthy(all, 0)
		a.refuses(removed[6])
		a.must(a.driver.TryUnload(), a.driver.SetDriver("590.48.01"), a.driver.Load())
		a.refuses(a.driver.UUID(whole))
		a.prints("driver ready", "resume")
		a.await("the machine as it is now", func() bool {
			gone, now := a.devices()[removed[0]], a.devices()[a.driver.UUID(whole)]
			return !gone.Healthy && now.Healthy && now.Name == name
		})
		a.await("the former instances are removed", func() bool { return units() == all-4 })
		if out, err := a.command("resume"); err == nil || !strings.Contains(out, "nothing to resume") {
			a.Errorf("resume again: %v, %s", err, out)
		}
		if a.program == nomadGPU {
			for _, g := range a.nomad.Groups() {
				if got := g.Attributes["driver_version"].GoString(); got != "590.48.01" {
					a.Errorf("%s: driver_version %s", g.Name, got)
				}
			}
		}
		a.prints("driver released", "quiesce")
		a.must(a.driver.TryUnload(), a.driver.SetDriver("590.57.01"), a.driver.Load())
		_, _ = a.command("resume") // the agent may end before it answers
		if state := a.awaitExit(); state.ExitCode() != command.ExitFailed {
			a.Errorf("ended with %v, want exit code %d", state, command.ExitFailed)
		}
		a.logs("", gpu.ErrDriverStale.Error())
	})
}

// divided is a policy of both agents: each GPU is offered by one of them, by index.
const divided = header + `policy:
  rules:
    - {select: {index: 0-3}, for: nomad}
    - {select: {index: 4-7}, for: kubernetes}
`

// offers reports whether an agent offers these GPUs, and no other.
func (a *agent) offers(slots ...int) bool {
	var healthy, want []string
	for _, v := range a.devices() {
		if v.Healthy {
			healthy = append(healthy, v.ID)
		}
	}
	for _, slot := range slots {
		want = append(want, a.driver.UUID(slot))
	}
	slices.Sort(healthy)
	slices.Sort(want)
	return slices.Equal(healthy, want)
}

// A policy divides the GPUs of a node. Without it both agents log what they both offer. If a GPU is removed, so that
// indices change, each agent still offers its own, also after it was killed, until an operator binds the indices again.
func TestDividedHost(t *testing.T) {
	t.Parallel()
	n, k := newBoth(t, map[string]any{"overlap": "warn", "health_period": "200ms"})
	agents := []*agent{n, k}
	const warning = "device is also offered by another agent"
	await := func(what string, nomad, kubernetes []int) {
		t.Helper()
		n.await(what, func() bool { return n.offers(nomad...) && k.offers(kubernetes...) })
	}
	reload := func(file string) {
		for _, a := range agents {
			a.useFile(file)
			a.signal(syscall.SIGHUP)
		}
	}
	first, second, every := []int{0, 1, 2, 3}, []int{4, 5, 6, 7}, []int{0, 1, 2, 3, 4, 5, 6, 7}
	for _, a := range agents {
		a.useFile(divided)
		a.start()
	}
	await("divided", first, second)
	if n.times(warning)+k.times(warning) > 0 {
		t.Error("warnings without an overlap")
	}
	reload(header)
	await("undivided", every, every)
	for _, a := range agents {
		a.logsTimes(warning, 8)
	}
	reload(divided)
	await("divided again", first, second)

	n.must(n.driver.Remove(0))
	await("GPU 0 is removed", first[1:], second)
	for _, a := range agents {
		a.logs("", "device order changed, the policy still selects the same devices")
		a.kill()
		a.start()
	}
	await("killed", first[1:], second)
	n.prints("index 0, 1, 2, 3 is bound to", "rebind")
	await("after rebind", []int{1, 2, 3, 4}, second[1:])
}
