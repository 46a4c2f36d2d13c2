package live

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/report"
)

// offered are the UUIDs of the GPUs that an agent gives to new work, sorted.
func (a *agents) offered(name string) (ids []string) {
	text, err := a.order(name, "inspect", "--json")
	if err != nil {
		return nil // it is being started
	}
	var r report.Report
	must(a.t, json.Unmarshal([]byte(text), &r))
	for _, d := range r.Devices {
		if d.Schedulable && r.Source == report.FromAgent {
			ids = append(ids, string(d.ID))
		}
	}
	slices.Sort(ids)
	return ids
}

// divided waits until the agents offer the GPUs of these slots.
func (a *agents) divided(what string, all []string, nomad, kubernetes []int) {
	a.t.Helper()
	for name, slots := range map[string][]int{nomadGPU: nomad, k8sGPU: kubernetes} {
		var want []string
		for _, slot := range slots {
			want = append(want, all[slot])
		}
		slices.Sort(want)
		a.until(fmt.Sprintf("%s: %s offers the GPUs of slots %v", what, name, slots), func() bool { return slices.Equal(a.offered(name), want) })
	}
}

// A file divides the GPUs of a host by index. A GPU is removed, so that the driver counts the others anew: each agent goes on
// offering its own, over restarts, also one that starts for the first time then; until an operator says otherwise.
func TestAHostThatIsDividedByIndexLosesAGPU(t *testing.T) {
	t.Parallel()
	a := launchUnder(t, split("0-3", "4-7"), "h100x8")
	all := a.units()
	kill := func(prepare func()) {
		was := [2]int{len(a.pids(nomadGPU)), len(a.pids(k8sGPU))}
		for _, name := range []string{nomadGPU, k8sGPU} {
			pids := a.pids(name)
			must(t, syscall.Kill(pids[len(pids)-1], syscall.SIGKILL))
		}
		prepare()
		a.until("both are started anew", func() bool { return len(a.pids(nomadGPU)) > was[0] && len(a.pids(k8sGPU)) > was[1] })
	}
	a.divided("at first", all, []int{0, 1, 2, 3}, []int{4, 5, 6, 7})
	must(t, a.Remove(0))
	a.divided("GPU 0 is removed", all, []int{1, 2, 3}, []int{4, 5, 6, 7})
	a.until("both logs tell which GPUs the rules mean", func() bool {
		return a.logged("device order changed, the policy still selects the same devices") >= 4
	})
	kill(func() {})
	a.divided("killed", all, []int{1, 2, 3}, []int{4, 5, 6, 7})
	kill(func() { must(t, os.Remove(filepath.Join(a.state, k8sGPU+".json"))) })
	a.divided("killed, one without its history", all, []int{1, 2, 3}, []int{4, 5, 6, 7})
	text, err := a.order(nomadGPU, "rebind")
	must(t, err)
	if !strings.Contains(text, "index 0, 1, 2, 3 is bound to") || !strings.Contains(text, ", previously to ") {
		t.Errorf("rebind answers %q", text)
	}
	a.divided("after rebind", all, []int{1, 2, 3, 4}, []int{5, 6, 7})
}
