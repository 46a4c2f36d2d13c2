package live

import (
	"encoding/json"
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/report"
)

// split is a policy file for both agents: GPUs of which only one offers each.
func split(nomad, kubernetes string) string {
	return fmt.Sprintf(`version: v1
policy:
  rules:
    - {select: {index: %q}, for: nomad}
    - {select: {index: %q}, for: kubernetes}
`, nomad, kubernetes)
}

// everybody's is one in which both offer every GPU.
const everybodys = "version: v1\n"

const warning = "device is also offered by another agent"

// gives are the indices of the GPUs that an agent gives to new work, and the number of those that it calls
// contested. It is asked as an operator asks it.
func (a *agents) gives(name string) (gpus []int, contests int) {
	said, err := a.order(name, "inspect", "--json")
	if err != nil {
		return nil, -1 // it is just being started
	}
	var r report.Report
	must(a.t, json.Unmarshal([]byte(said), &r))
	if r.Source != report.FromAgent {
		return nil, -1
	}
	for _, d := range r.Devices {
		if d.Schedulable {
			gpus = append(gpus, d.Index)
		}
	}
	return gpus, len(r.Overlaps)
}

// both waits until the agents give these GPUs to work, and call so many contested.
func (a *agents) both(what string, nomad, kubernetes []int, contests int) {
	a.t.Helper()
	for name, want := range map[string][]int{nomadGPU: nomad, k8sGPU: kubernetes} {
		a.until(fmt.Sprintf("%s: %s gives %v to work, %d contested", what, name, want, contests), func() bool {
			gpus, n := a.gives(name)
			return slices.Equal(gpus, want) && n == contests
		})
	}
}

// One file divides the GPUs of a host; then it does not any more, and both agents say so.
func TestTwoAgentsWarn(t *testing.T) {
	t.Parallel()
	a := launchUnder(t, split("0-3", "4-7"), "h100x8")
	first, second, all := []int{0, 1, 2, 3}, []int{4, 5, 6, 7}, []int{0, 1, 2, 3, 4, 5, 6, 7}
	a.both("divided", first, second, 0)
	if n := a.logged(warning); n != 0 {
		t.Errorf("%d warnings though nothing overlaps", n)
	}
	a.hup(everybodys)
	a.both("everybody's", all, all, 8)
	a.until("a warning for each GPU in both logs", func() bool { return a.logged(warning) == 16 })
	a.hup(split("0-3", "4-7"))
	a.both("divided again", first, second, 0)
}

// With refuse each GPU is offered once: by who has it, over restarts and deaths, until that gives it up.
func TestTwoAgentsRefuse(t *testing.T) {
	t.Parallel()
	a := launchWith(t, map[string]string{"overlap": "refuse"}, split("0-3", "4-7"), "h100x8")
	first, second, all := []int{0, 1, 2, 3}, []int{4, 5, 6, 7}, []int{0, 1, 2, 3, 4, 5, 6, 7}
	a.both("divided", first, second, 0)
	a.hup(everybodys)
	a.both("everybody's, and who has a GPU keeps it", first, second, 4)
	for _, name := range []string{nomadGPU, k8sGPU} {
		must(t, syscall.Kill(a.pids(name)[0], syscall.SIGKILL))
	}
	a.until("both are started anew", func() bool { return len(a.pids(nomadGPU)) == 2 && len(a.pids(k8sGPU)) == 2 })
	a.both("killed", first, second, 4)
	a.hup("version: v1\npolicy: {rules: [{select: {model: \"*\"}, for: nomad}]}\n")
	a.both("all to Nomad", all, nil, 0)
}
