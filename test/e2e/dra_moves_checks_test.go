//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	movesLook   = 250 * time.Millisecond       // between two looks where the GPUs are
	movesAtMost = offersAtMost + time.Minute   // works run for some seconds and wait for eight, then the API settles; the reset of another GPU takes some seconds, too
	namesAtMost = 30 * time.Second             // from an empty CDI folder to the last container that misses a name: kubelet tries again late
	endsAtMost  = worksAtMost + 30*time.Second // for what has ended to be gone
)

// offers are the APIs that offer each GPU to new work.
func (mv *moves) offers() (map[string]string, error) {
	offered := map[string]string{}
	add := func(gpu, api string) { offered[gpu] = strings.TrimPrefix(offered[gpu]+" "+api, " ") }
	plugin, err := mv.healthy(gpuResource)
	for _, gpu := range plugin {
		add(gpu, "device-plugin")
	}
	devices, err2 := mv.published()
	for _, gpu := range slices.Collect(maps.Keys(mv.at)) {
		if d, found := devices[deviceName(gpu)]; found && len(d.Taints) == 0 {
			add(gpu, "dra")
		}
	}
	n, err3 := mv.nomad.node()
	for _, g := range n.gpus() {
		if g.Healthy {
			add(g.ID, "nomad")
		}
	}
	return offered, errors.Join(err, err2, err3)
}

// look notes the GPUs that have arrived: their API offers them, and no other. It fails if one has not in time.
func (mv *moves) look(t *testing.T) {
	t.Helper()
	offered, err := mv.offers()
	mv.revive(t)
	if err := mv.nomad.process.alive(); err != nil {
		t.Fatal(err)
	}
	if err == nil {
		mv.lookRepairs(t, offered)
	}
	for gpu, since := range mv.since {
		if mv.repairs.of(gpu) { // it arrives when it is repaired, which has a limit of its own
			continue
		}
		waited := min(time.Since(since), time.Since(mv.young))
		switch took := time.Since(since); {
		case err == nil && offered[gpu] == mv.at[gpu]:
			mv.took = append(mv.took, took)
			delete(mv.since, gpu)
		case waited > movesAtMost:
			plan, planErr := command(binary("k8s-gpu"), "migrate", "plan", "--state-dir", mv.state())
			t.Fatalf("%s is offered by %q %v after the order to %s; errors %v, %v\n%s", gpu, offered[gpu], took, mv.at[gpu], err, planErr, plan)
		}
	}
}

// await waits until each GPU has arrived that is not being repaired.
func (mv *moves) await(t *testing.T) {
	t.Helper()
	repaired := func(gpu, _ string) bool { return mv.repairs.of(gpu) }
	for arriving := true; arriving; time.Sleep(movesLook) {
		mv.look(t)
		arriving = slices.ContainsFunc(slices.Collect(maps.Keys(mv.since)), func(gpu string) bool { return !mv.repairs.of(gpu) })
	}
	await(t, "each GPU to be offered by its API alone", movesAtMost, func() error { // also those that were there before
		mv.revive(t)
		offered, err := mv.offers()
		want := maps.Clone(mv.at)
		maps.DeleteFunc(offered, repaired)
		maps.DeleteFunc(want, repaired)
		if err == nil && !maps.Equal(offered, want) {
			err = fmt.Errorf("offered %v, want %v", offered, want)
		}
		return err
	})
}

// checkEnded fails unless all pods, claims, allocations and what was prepared for claims end.
func (mv *moves) checkEnded(t *testing.T) {
	t.Helper()
	await(t, "the end of all work", endsAtMost, func() error {
		pods, err := mv.workPods()
		for _, p := range pods {
			err = errors.Join(err, fmt.Errorf("pod %s is %s, its deletion of %q", p.Metadata.Name, p.Status.Phase, p.Metadata.DeletionTimestamp))
		}
		var claims struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		err = errors.Join(err, mv.get("/apis/resource.k8s.io/v1/resourceclaims", &claims))
		if len(claims.Items) > 0 {
			err = errors.Join(err, fmt.Errorf("claims %+v", claims.Items))
		}
		var allocations []allocation
		err = errors.Join(err, mv.nomad.get("/v1/allocations", &allocations))
		for _, a := range allocations {
			if a.ClientStatus == "running" || a.ClientStatus == "pending" {
				err = errors.Join(err, fmt.Errorf("allocation %s of %s is %s", a.ID, a.JobID, a.ClientStatus))
			}
		}
		if prepared, _ := filepath.Glob(filepath.Join(mv.state(), "dra/claims/*.json")); len(prepared) > 0 {
			err = errors.Join(err, fmt.Errorf("prepared are %q", prepared))
		}
		if holders := mv.holders.holders(); len(holders) > 0 {
			err = errors.Join(err, fmt.Errorf("GPUs are used by %v", holders))
		}
		return err
	})
}

// checkNames fails if a container had a CDI name that no file defined, beyond the moments in which the folder was empty.
func (mv *moves) checkNames(t *testing.T) {
	t.Helper()
	var list struct {
		Items []struct {
			Reason, Message               string
			FirstTimestamp, LastTimestamp time.Time
		}
	}
	if err := mv.get("/api/v1/namespaces/default/events", &list); err != nil {
		t.Fatal(err)
	}
	reasons := map[string]int{}
	for _, e := range list.Items {
		reasons[e.Reason]++
		if strings.Contains(e.Message, "unresolvable") {
			reasons["a CDI name that no file defined"]++
			mv.checkName(t, e.Message, e.FirstTimestamp, e.LastTimestamp)
		}
		if e.Reason == "FailedPrepareDynamicResources" {
			t.Logf("%s", e.Message)
		}
	}
	t.Logf("events of pods: %v", reasons)
}

// checkName fails unless the folder was emptied just before each of the times, which are in whole seconds.
func (mv *moves) checkName(t *testing.T, message string, times ...time.Time) {
	t.Helper()
	for _, at := range times {
		if !slices.ContainsFunc(mv.emptied, func(emptied time.Time) bool {
			since := at.Sub(emptied)
			return since > -2*time.Second && since < namesAtMost
		}) {
			t.Errorf("at %v, with a CDI folder that was not emptied before: %s", at, message)
		}
	}
}
