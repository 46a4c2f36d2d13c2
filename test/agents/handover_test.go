package agents

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// A fault of a GPU is in the Node's condition and annotation, and ends there, also while the agent is started again. With the hand-over off the
// agent removes both, and makes no further request.
func TestHandOver(t *testing.T) {
	t.Parallel()
	a := newAgent(t, k8sGPU, "h100x8", map[string]any{"health_period": "500ms", "health_settle": "1s", "recovery_dwell": "1s"})
	api := kubeapitest.Start(t)
	api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: draNode}})
	api.GuardNodes(faultreport.Annotation, config.DefaultCondition)
	a.settings["node_name"], a.settings["kube_api"] = draNode, api.URL
	on := header + "handOver: {enabled: true}\n"
	a.useFile(on)
	seen := func() (c kubeapi.NodeCondition, r faultreport.Report) {
		var n struct {
			Metadata struct{ Annotations map[string]string }
			Status   struct{ Conditions []kubeapi.NodeCondition }
		}
		a.must(json.Unmarshal(api.RawNode(draNode), &n))
		if text := n.Metadata.Annotations[faultreport.Annotation]; text != "" {
			var err error
			r, err = faultreport.Parse(text)
			a.must(err)
		}
		if len(n.Status.Conditions) > 0 {
			c = n.Status.Conditions[0]
		}
		return c, r
	}
	shows := func(status kubeapi.ConditionStatus, faults int) {
		a.Helper()
		a.await("the condition is "+string(status), func() bool {
			c, r := seen()
			return c.Status == status && len(r.Faults) == faults
		})
	}
	a.startHealthy()
	shows(kubeapi.ConditionTrue, 0)
	a.must(a.driver.XID(3, 95), a.driver.Set(3, "recovery_action", "1")) // so that it does not recover meanwhile
	shows(kubeapi.ConditionFalse, 1)
	began, report := seen()
	f := report.Faults[0]
	if string(f.GPU) != a.driver.UUID(3) || f.Cause != "XID_95" || f.Repair != health.Reset || !strings.Contains(began.Message, a.driver.UUID(3)+" (") {
		t.Errorf("%+v, %+v", began, f)
	}
	a.healthy(8, 7) // the kubelet's list may come after the condition
	a.stop()
	if c, _ := seen(); c.Status != kubeapi.ConditionFalse {
		t.Errorf("the end of the agent has left %+v", c)
	}
	a.start()
	a.healthy(8, 7)
	shows(kubeapi.ConditionFalse, 1)
	if c, _ := seen(); !c.LastTransitionTime.Equal(*began.LastTransitionTime) {
		t.Errorf("the restart began the fault again: %+v, was %+v", c, began)
	}
	a.must(a.driver.Reset(3))
	shows(kubeapi.ConditionTrue, 0)

	api.UnguardNodes()
	record := filepath.Join(a.state, "k8s-gpu.hand-over.json")
	if _, err := os.Stat(record); err != nil {
		t.Error(err)
	}
	a.reload(header, "conditions of the Node removed")
	shows("", 0)
	api.ForgetRequests()
	a.reload(on, "no admission policy keeps this agent from changing the labels of Nodes")
	a.prints("no admission policy keeps this agent", "inspect")
	if writes := slices.DeleteFunc(api.Requests(), func(r kubeapitest.Request) bool { return r.DryRun || r.Resource != "nodes/status" }); len(writes) > 0 {
		t.Errorf("without a policy %+v", writes)
	}
	a.stop()
}
