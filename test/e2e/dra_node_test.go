//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// devicesIn are the names of the devices of results.
func devicesIn(results []kubeapi.DeviceRequestAllocationResult) (names []string) {
	for _, r := range results {
		names = append(names, r.Device)
	}
	return names
}

// checkConfig has a claim with parameters of NVIDIA's driver: those that a GPU has anyway are accepted; for others the event of the pod has
// the agent's reason.
func (c *draCluster) checkConfig(t *testing.T) {
	config := func(sharing string) string {
		return "{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: " + sharing + "}"
	}
	c.claimPod(t, "accepted", draDriver, config("{strategy: TimeSlicing, timeSlicingConfig: {interval: Default}}"))
	c.work(t, 1)
	c.claimPod(t, "refused", draDriver, config("{strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50}}"))
	c.awaitEvent(t, "refused", "FailedPrepareDynamicResources", "MPS")
	c.claimPod(t, "unknown", draDriver, "{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharin: {}}")
	c.awaitEvent(t, "unknown", "FailedPrepareDynamicResources", "sharin")
	c.removeAll(t)
}

// checkEnd deletes a pod while no driver is there: it stays until the driver is back.
func (c *draCluster) checkEnd(t *testing.T) {
	c.hold(t, "ends")
	c.undeploy(t)
	must(t, "kubectl", "delete", "pod", "ends", "--wait=false")
	time.Sleep(5 * time.Second) // the container ends at once, and the pod would be gone in less than one
	p, err := c.pod("ends")
	if err != nil || p.Metadata.DeletionTimestamp == "" {
		t.Fatalf("without a driver the pod is %+v, error %v", p, err)
	}
	c.redeploy(t)
	await(t, "the driver to register", 60*time.Second, func() error {
		if sockets := must(t, "sh", "-c", "ls /var/lib/kubelet/plugins_registry"); !strings.Contains(sockets, draDriver) {
			return fmt.Errorf("sockets %q", sockets)
		}
		return nil
	})
	began := time.Now()
	await(t, "the end of the pod", 60*time.Second, func() error {
		if _, err := c.pod("ends"); err == nil || !strings.Contains(err.Error(), "404") {
			return fmt.Errorf("it is there, error %w", err)
		}
		return nil
	})
	t.Logf("the pod is gone %v after the driver's socket is there", time.Since(began).Round(time.Millisecond))
	c.removeAll(t)
	c.awaitDevices(t, 8, 0)
}
