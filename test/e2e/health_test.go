//go:build e2e

package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// hasty makes nomad-gpu check and recover in seconds; kustomization.yaml tells k8s-gpu the same.
const hasty = `
    health_period      = "1s"
    health_settle      = "2s"
    recovery_dwell     = "3s"`

// breakAndReset has a GPU report an uncontained error while a pod holds it, and resets it in the end.
func breakAndReset(t *testing.T, m *simdriver.Machine, nomad *agent, kube *cluster, first pod, held []string) {
	bad := first.ids()[0]
	if slices.Contains(held, bad) { // then the job that waits would not be short of it
		bad = first.ids()[1]
	}
	slot := slotOf(t, m, bad)

	step(t, "a GPU reports XID 95 and the recovery action reset", func(t *testing.T) {
		if err := errors.Join(m.Set(slot, "recovery_action", "1"), m.XID(slot, 95)); err != nil {
			t.Fatal(err)
		}
		checkReason(t, nomad.awaitGPUs(t, 8, 7), bad, "XID 95")
		kube.awaitGPUs(t, 8, 7)
		kube.awaitHealth(t, "first", bad, "Unhealthy")
		nomad.awaitShown(t, "XID 95")
		nomad.checkRunning(t, "holder", held)
		kube.awaitUnchanged(t, "first", first)
	})
	step(t, "both agents are killed, and know it still", func(t *testing.T) {
		nomad.killPlugin(t)
		checkReason(t, nomad.awaitGPUs(t, 8, 7), bad, "XID 95")
		kube.killPluginWith(t, 7)
		kube.awaitHealth(t, "first", bad, "Unhealthy")
	})
	step(t, "new work avoids it, more work waits", func(t *testing.T) {
		ids, _ := nomad.runJob(t, "avoids", "complete")
		next := kube.runPod(t, "avoids", 2)
		if slices.Contains(append(ids, next.ids()...), bad) {
			t.Errorf("%s was given to the job %q or the pod %q", bad, ids, next.ids())
		}
		nomad.submit(t, "gpus.nomad.hcl", "name=waiter", "count=7")
		nomad.awaitBlocked(t, "waiter")
		kube.submit(t, "waiter", 1)
		kube.awaitUnschedulable(t, "waiter")
	})
	step(t, "the GPU is reset, and what waited is placed", func(t *testing.T) {
		if err := m.Reset(slot); err != nil {
			t.Fatal(err)
		}
		nomad.awaitGPUs(t, 8, 8)
		kube.awaitGPUs(t, 8, 8)
		kube.awaitHealth(t, "first", bad, "Healthy")
		nomad.awaitComplete(t, "waiter", 7)
		kube.awaitRunning(t, "waiter")
		nomad.checkRunning(t, "holder", held)
		kube.awaitUnchanged(t, "first", first)
	})
}

// checkReason fails unless just the one device is unhealthy, for the reason.
func checkReason(t *testing.T, gpus []gpuUse, bad, reason string) {
	t.Helper()
	for _, g := range gpus {
		if !g.Healthy {
			t.Logf("Nomad says of %s: %s", g.ID, g.HealthDescription)
		}
		if g.Healthy == (g.ID == bad) || g.ID == bad && !strings.Contains(g.HealthDescription, reason) {
			t.Errorf("%s has %s, Nomad says %+v", bad, reason, g)
		}
	}
}

// awaitShown waits until "nomad node status" shows a text in its device statistics: it has no column for
// device health.
func (a *agent) awaitShown(t *testing.T, text string) {
	t.Helper()
	var line string
	await(t, "nomad node status to show "+text, 60*time.Second, func() error {
		out, err := command("nomad", "node", "status", "-address="+nomadAPI, "-self", "-verbose", "-stats")
		if err != nil {
			return err
		}
		found := false
		if line, found = lineWith(out, text); !found {
			return errors.New("it shows no such line")
		}
		return nil
	})
	t.Logf("nomad node status -self -verbose -stats shows: %s", line)
}
