//go:build e2e

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const cdiFolder = "/var/run/cdi"

// emptied has the agent write its files again without a call of kubelet.
func (r *draRestarts) emptied(t *testing.T) {
	before := r.cdiFiles(t)
	began := time.Now()
	must(t, "sh", "-c", "rm "+cdiFolder+"/*")
	await(t, "the files of the CDI folder", 30*time.Second, func() error {
		if now := r.cdiFiles(t); !slices.Equal(now, before) {
			return fmt.Errorf("they were %q, they are %q", before, now)
		}
		for _, file := range before {
			if info, err := os.Stat(file); err != nil || info.ModTime().Before(began) {
				return fmt.Errorf("%s has not been written again, error %w", file, err)
			}
		}
		return nil
	})
	t.Logf("%q are back after %v", before, time.Since(began).Round(time.Millisecond))
	r.killed(t, "dies")
}

func (r *draRestarts) cdiFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(cdiFolder + "/*")
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// away has no agent while containers and kubelet end. Without the CDI files a container waits; the agent brings it back.
func (r *draRestarts) away(t *testing.T) {
	r.undeploy(t)
	r.killed(t, "dies")
	r.kubelet.stop(t, syscall.SIGKILL)
	r.startKubelet()
	r.awaitReady(t)
	r.checkPods(t)
	r.killed(t, "dies")
	must(t, "sh", "-c", "rm "+cdiFolder+"/*")
	r.killContainers(t, r.was["dies"])
	r.awaitWaiting(t, "dies", "CreateContainerError", "unresolvable CDI devices")
	r.redeploy(t)
	r.returned(t, "dies")
	r.check(t)
}

// checkPods fails unless the pods run in their containers.
func (r *draRestarts) checkPods(t *testing.T) {
	t.Helper()
	for name, was := range r.was {
		if now := r.running(t, name); !slices.Equal(now.containers(), was.containers()) {
			t.Errorf("pod %s was %+v, it is %+v", name, was, now)
		}
	}
}

// outage has a container come back and a pod end without the API server; its claim is unprepared. A fault of that time is in the slice afterwards.
func (r *draRestarts) outage(t *testing.T) {
	seconds := roundsOf(draOutage, 30)
	createTemplate(t)
	if err := send(http.MethodPost, podsURL, sleeper("ends", oneGPU, "20")); err != nil { // while the API server is away, and not before it
		t.Fatal(err)
	}
	r.awaitRunning(t, "ends")
	prepared := r.preparedClaims(t)
	r.stopAPI(t)
	began := time.Now()
	r.killContainers(t, r.was["dies"])
	m := r.machine()
	free := r.freeGPU(t)
	fault := time.Now()
	failGPU(t, m, free)
	await(t, "the claim of pod ends to be unprepared", 60*time.Second, func() error {
		if now := r.preparedClaims(t); len(now) != len(prepared)-1 {
			return fmt.Errorf("claims %q, before %q", now, prepared)
		}
		return nil
	})
	t.Logf("unprepared %v after the end of the API server", time.Since(began).Round(time.Millisecond))
	time.Sleep(time.Until(began.Add(time.Duration(seconds) * time.Second)))
	r.startAPI(t)
	back := time.Now()
	r.returned(t, "dies")
	r.awaitDevices(t, 8, 1)
	devices, err := r.published()
	if err != nil {
		t.Fatal(err)
	}
	taint := devices[deviceName(free)].Taints[0]
	t.Logf("taint %+v %v after the return of the API server", taint, time.Since(back).Round(time.Millisecond))
	if since := taint.TimeAdded.Sub(fault); since < -2*time.Second || since > 10*time.Second {
		t.Errorf("the taint is of %v, the fault of %v", taint.TimeAdded, fault)
	}
	if err := m.Reset(slotOf(t, m, free)); err != nil {
		t.Fatal(err)
	}
	r.awaitDevices(t, 8, 0)
	if err := send(http.MethodDelete, podsURL+"/ends", nil); err != nil {
		t.Fatal(err)
	}
	churn := startChurn(t, r.cluster, "afterwards") // kubelet may take half a minute more until it reads pods again
	churn.next()
	churn.stop(t)
}

// preparedClaims are the files in which the agent has what it has prepared.
func (c *draCluster) preparedClaims(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(c.dir, "k8s-history", "dra/claims/*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("files of claims: %q, error %v", files, err)
	}
	return files
}

// freeGPU is one that no claim has.
func (c *draCluster) freeGPU(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for _, file := range c.preparedClaims(t) {
		claim, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(claim)
	}
	for _, uuid := range uuids(t, c.machine()) {
		if !strings.Contains(text.String(), uuid) {
			return uuid
		}
	}
	t.Fatal("all GPUs are prepared")
	return ""
}

// updated updates the DaemonSet under pods that come and go: none fails.
func (r *draRestarts) updated(t *testing.T, surge bool) {
	if surge {
		r.deploy(t, shippedPart(t, "surge"))
	}
	old := r.plugin(t).Metadata.Name
	churn := startChurn(t, r.cluster, fmt.Sprintf("update-%v", surge))
	for range 2 {
		must(t, "kubectl", "rollout", "restart", daemonSet, "--namespace=kube-system")
		awaitRollout(t)
		r.awaitAgent(t, old)
		old = r.plugin(t).Metadata.Name
	}
	churn.stop(t)
	r.check(t)
}
