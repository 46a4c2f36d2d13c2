package live

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// sharedBy is a policy file: two GPUs are shared by so many.
func sharedBy(n int) string {
	return fmt.Sprintf(`version: v1
policy:
  rules:
    - select: {index: "2-3"}
      use: time-slicing
      replicas: %d
`, n)
}

// hup gives both agents another policy file and has them read it.
func (a *agents) hup(policy string) {
	a.t.Helper()
	must(a.t, os.WriteFile(a.policy, []byte(policy), 0o600))
	for _, name := range []string{nomadGPU, k8sGPU} {
		pids := a.pids(name)
		must(a.t, syscall.Kill(pids[len(pids)-1], syscall.SIGHUP))
	}
}

// logged reports how often both logs together hold a text.
func (a *agents) logged(text string) int {
	a.t.Helper()
	log, err := os.ReadFile(a.log)
	must(a.t, err)
	return strings.Count(string(log), text)
}

// Both agents read their policy again. A bad one changes nothing, and every problem of it is said by both; a good one
// is taken over by the processes that run, and by those that take their place.
func TestPolicyIsReadAgain(t *testing.T) {
	t.Parallel()
	a := launchUnder(t, sharedBy(4), "h100x8")
	two, rest := a.uuids(2, 3), a.uuids(0, 1, 4, 5, 6, 7)
	a.settles("start", time.Now(), append(shares(4, two...), rest...))
	processes := a.processes()

	since := a.mark()
	a.hup(strings.NewReplacer("time-slicing", "time-sharing", "replicas", "replica").Replace(sharedBy(2)))
	for _, problem := range []string{"time-sharing", "policy.rules[0].replica"} {
		a.until("both complain of "+problem, func() bool { return a.logged(problem) >= 2 })
	}
	a.settles("a bad policy: nothing", time.Now(), append(shares(4, two...), rest...))
	a.undisturbed("a bad policy", since, append(shares(4, two...), rest...))
	a.silent("a bad policy", since, gpuResource, shared)

	began, prints := time.Now(), len(a.nomad.told())
	a.hup(sharedBy(2))
	a.settles("4 shares to 2", began, append(shares(2, two...), rest...))
	for i, f := range a.nomad.told()[prints:] { // k8s-gpu registers anew
		a.well(fmt.Sprintf("4 shares to 2: Nomad, message %d", i), f.health(), append(shares(2, two...), rest...))
	}
	a.granted("4 shares to 2", append(shares(2, two...), rest...)...)
	a.capacity("4 shares to 2", shared, 4)
	a.sameProcesses("another policy", processes)

	began = time.Now()
	a.hup("version: v1\n")
	a.settles("no share", began, slices.Concat(two, rest))
	a.until("no share is left in the kubelet", func() bool { n, _ := a.kubelet.Capacity(shared); return n == 0 })
	a.sameProcesses("no policy", processes)

	began = time.Now()
	a.hup(sharedBy(3))
	a.settles("3 shares", began, append(shares(3, two...), rest...))
	for _, name := range []string{nomadGPU, k8sGPU} {
		must(t, syscall.Kill(processes[name][0], syscall.SIGKILL))
	}
	a.until("both are started anew", func() bool { return len(a.pids(nomadGPU)) == 2 && len(a.pids(k8sGPU)) == 2 })
	a.settles("killed, and started with the same policy", time.Now(), append(shares(3, two...), rest...))
}
