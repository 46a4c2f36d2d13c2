package kube

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/test/check"
)

// An object of which nothing that is kept has changed has the cluster not translated again.
func TestNoChange(t *testing.T) {
	c := newCluster(Options{Name: "east"}, nil, nil)
	changes := func() (n int) {
		for {
			select {
			case <-c.changed:
				n++
			default:
				return n
			}
		}
	}
	n := bigNode(0)
	check.NoError(t, c.tables.nodes.Add(n))
	p := bigPod(0)
	check.NoError(t, c.tables.pods.Add(p))
	if changes() != 1 {
		t.Error("new objects are no change")
	}
	n, p = n.DeepCopy(), p.DeepCopy()
	n.ResourceVersion, p.ResourceVersion = "2", "2"
	n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(time.Now())
	n.Status.Images, p.Spec.Containers[0].Env = nil, nil
	check.NoError(t, c.tables.nodes.Update(n))
	check.NoError(t, c.tables.pods.Update(p))
	if changes() != 0 {
		t.Error("what is not kept is a change")
	}
	n = n.DeepCopy()
	n.Spec.Unschedulable = true
	check.NoError(t, c.tables.nodes.Update(n))
	if changes() != 1 || !c.tables.nodes.list()[0].cordoned {
		t.Error("a cordon is no change")
	}
	p = p.DeepCopy()
	p.Status.ContainerStatuses[0].AllocatedResourcesStatus[0].Resources[0].Health = "Unhealthy"
	check.NoError(t, c.tables.pods.Update(p))
	if changes() != 1 {
		t.Error("the health of a device is no change")
	}
}
