//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// handOverAccess has the agent of node a call the API server with the account of deploy/hand-over, and with that of the chart in another namespace:
// it may write its own condition, annotation and events, and nothing else of its Node or of another one.
func (c *chartCluster) handOverAccess(t *testing.T) {
	must(t, "kubectl", "create", "-f", write(t, "handover-nodes.yaml", []byte(handOverNodes)))
	must(t, "kubectl", "patch", "node", "a", "--subresource=status", "--type=merge", "-p", handOverStatus)
	shipped := []string{"-f", "../../deploy/hand-over/account.yaml", "-f", "../../deploy/hand-over/rights/access.yaml", "-f", "../../deploy/hand-over/rights/admission.yaml"}
	must(t, append([]string{"kubectl", "apply"}, shipped...)...)
	t.Run("manifest", func(t *testing.T) { (handOver{account{"kube-system", "tandem-k8s-gpu"}, "TandemGPUsHealthy"}).check(t) })
	must(t, append([]string{"kubectl", "delete"}, shipped...)...)
	must(t, "kubectl", "create", "namespace", "handover")
	must(t, "helm", "install", "handover", chartFolder, "-n", "handover", "--set",
		"handOver.enabled=true,handOver.secondCondition=GPUMissing,serviceAccount.create=true,serviceAccount.name=gpu-agent")
	t.Run("chart", func(t *testing.T) { (handOver{account{"handover", "gpu-agent"}, "GPUMissing"}).check(t) })
	must(t, "helm", "uninstall", "handover", "-n", "handover", "--wait")
	must(t, "kubectl", "patch", "node", "a", "--type=merge", "-p", `{"metadata": {"finalizers": null}}`)
	must(t, "kubectl", "delete", "node", "a", "b")
	must(t, "kubectl", "delete", "events", "--all", "-n", "default")
}

const (
	handOverNodes = `
{apiVersion: v1, kind: Node, metadata: {name: a, labels: {kept: "yes"}, annotations: {other: "1"}, finalizers: [example.com/kept]}}
---
{apiVersion: v1, kind: Node, metadata: {name: b}}
`
	handOverStatus = `{"status": {"capacity": {"nvidia.com/gpu": "8"}, "images": [{"names": ["busybox:1"], "sizeBytes": 1}],
		"conditions": [{"type": "Ready", "status": "True"}, {"type": "KernelDeadlock", "status": "False"}]}}`
)

// handOver is the account of agents whose condition has this type.
type handOver struct {
	account
	condition string
}

// call is a request that an agent could send.
type call struct {
	name, method, path, body string
	node                     string // of the token; "" = bound to nothing
	want                     string // in the answer's text; "" = it is allowed
}

func (h handOver) check(t *testing.T) {
	tokens := map[string]string{"a": h.token(t, "a"), "": h.token(t, "")}
	await(t, "the policies, which are not in force at once", 30*time.Second, func() error {
		return errors.Join(
			call{"", strategicPatch, ownNode + "?dryRun=All", `{"metadata": {"labels": {"foreign": "x"}}}`, "a", wrongMeta}.make(tokens),
			call{"", http.MethodPost, ownEvents + "?dryRun=All", event("first", "Pod", "kubelet", "a"), "a", wrongReporter}.make(tokens))
	})
	for _, r := range append(h.allowed(), h.denied()...) {
		if err := r.make(tokens); err != nil {
			t.Errorf("%s: %v", r.name, err)
		}
	}
	h.notAllowed(t)
	// The API server checks the expressions against the types of objects, where they are not dyn.
	await(t, "the check of the expressions", 30*time.Second, func() error {
		seen, err := command("kubectl", "get", "validatingadmissionpolicies", "-o", `jsonpath={range .items[*]}{.status.observedGeneration}{.status.typeChecking.expressionWarnings} {end}`)
		if err == nil && strings.TrimSpace(seen) != "1 1" {
			err = fmt.Errorf("generations and warnings of the policies: %s", seen)
		}
		return err
	})
}

// token is that of an agent whose pod is on this node.
func (h handOver) token(t *testing.T, node string) string {
	t.Helper()
	argv := []string{"kubectl", "create", "token", h.name, "-n", h.namespace}
	if node != "" {
		argv = append(argv, "--bound-object-kind=Node", "--bound-object-name="+node)
	}
	return must(t, argv...)
}

// Content types of a patch, in place of a method.
const (
	strategicPatch = "application/strategic-merge-patch+json"
	mergePatch     = "application/merge-patch+json"
	applyPatch     = "application/apply-patch+yaml"
)

const (
	ownNode       = "/api/v1/nodes/a/status"
	otherNode     = "/api/v1/nodes/b/status"
	ownEvents     = "/apis/events.k8s.io/v1/namespaces/default/events"
	wrongNode     = "the agent of node a changes its own Node only"
	wrongType     = "the agent changes its own conditions only"
	wrongAnnot    = "the agent changes its own annotation only"
	wrongStatus   = "of the status the agent changes the conditions only"
	wrongReporter = "the events of the agent have reportingController tandem.dev/k8s-gpu and reportingInstance a"
	wrongMeta     = "of the metadata the agent changes its annotation only"
)

// event is one of a pod, as the agent of node a writes it, with the reporter's controller and instance.
func event(name, kind, controller, instance string) string {
	return fmt.Sprintf(`{"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": %q, "namespace": "default"}, "eventTime": "2026-11-27T12:00:00.000000Z",
		"reportingController": %q, "reportingInstance": %q, "action": "Report", "reason": "GPUUnhealthy", "type": "Warning", "note": "x",
		"regarding": {"apiVersion": "v1", "kind": %q, "name": "work", "namespace": "default"}}`, name, controller, instance, kind)
}

const reporter = "tandem.dev/k8s-gpu"

func (h handOver) conditions(conditionType, status string) string {
	return fmt.Sprintf(`{"status": {"conditions": [{"type": %q, "status": %q, "reason": "XID_95", "message": "x"}]}}`, conditionType, status)
}

// allowed are the requests of an agent, each with what the one before has left.
func (h handOver) allowed() []call {
	name := strings.ToLower(h.condition)
	both := fmt.Sprintf(`{"metadata": {"annotations": {"tandem.dev/gpu-faults": %q}}, "status": {"conditions": [{"type": %q, "status": "False"}]}}`,
		strings.Repeat("x", 16384), h.condition)
	return []call{
		{"read its node", http.MethodGet, "/api/v1/nodes/a", "", "a", ""},
		{"condition", strategicPatch, ownNode, h.conditions(h.condition, "False"), "a", ""},
		{"condition and annotation", strategicPatch, ownNode, both, "a", ""},
		{"condition that it can't check", strategicPatch, ownNode, h.conditions(h.condition, "Unknown"), "a", ""},
		{"the same again", strategicPatch, ownNode, h.conditions(h.condition, "Unknown"), "a", ""},
		{"server-side apply", applyPatch, ownNode + "?force=true&fieldManager=" + h.condition, `{"apiVersion": "v1", "kind": "Node", "status": {"conditions": [{"type": "` + h.condition + `", "status": "True"}]}}`, "a", ""},
		{"annotation removed", strategicPatch, ownNode, `{"metadata": {"annotations": {"tandem.dev/gpu-faults": null}}}`, "a", ""},
		{"event", http.MethodPost, ownEvents, event(name, "Pod", reporter, "a"), "a", ""},
	}
}

// denied are the requests that RBAC allows, and the policies do not.
func (h handOver) denied() []call {
	foreign := strings.ToLower(h.condition) + "-foreign"
	return []call{
		{"another node", strategicPatch, otherNode, h.conditions(h.condition, "False"), "a", wrongNode},
		{"a token of no node", strategicPatch, ownNode, h.conditions(h.condition, "False"), "", "not bound to a node"},
		{"the kubelet's condition", strategicPatch, ownNode, h.conditions("Ready", "False"), "a", wrongType},
		{"another's condition", strategicPatch, ownNode, h.conditions("KernelDeadlock", "True"), "a", wrongType},
		{"a new condition", strategicPatch, ownNode, h.conditions("Foreign", "True"), "a", wrongType},
		{"all conditions replaced", mergePatch, ownNode, h.conditions(h.condition, "False"), "a", wrongType},
		{"a condition removed", strategicPatch, ownNode, `{"status": {"conditions": [{"$patch": "delete", "type": "Ready"}]}}`, "a", wrongType},
		{"a status that is none", strategicPatch, ownNode, h.conditions(h.condition, "Wrong"), "a", "True, False or Unknown"},
		{"another's annotation", strategicPatch, ownNode, `{"metadata": {"annotations": {"foreign": "x"}}}`, "a", wrongAnnot},
		{"another's annotation removed", strategicPatch, ownNode, `{"metadata": {"annotations": {"other": null}}}`, "a", wrongAnnot},
		{"an annotation that is too long", strategicPatch, ownNode, `{"metadata": {"annotations": {"tandem.dev/gpu-faults": "` + strings.Repeat("x", 16385) + `"}}}`, "a", "at most 16 KiB"},
		{"a label", strategicPatch, ownNode, `{"metadata": {"labels": {"foreign": "x"}}}`, "a", wrongMeta},
		{"a label removed", strategicPatch, ownNode, `{"metadata": {"labels": {"kept": null}}}`, "a", wrongMeta},
		{"a label by server-side apply", applyPatch, ownNode + "?fieldManager=other&force=true", `{"apiVersion": "v1", "kind": "Node", "metadata": {"labels": {"foreign": "x"}}}`, "a", wrongMeta},
		{"capacity", strategicPatch, ownNode, `{"status": {"capacity": {"nvidia.com/gpu": "9"}}}`, "a", wrongStatus},
		{"a resource more", strategicPatch, ownNode, `{"status": {"allocatable": {"example.com/x": "1"}}}`, "a", wrongStatus},
		{"images", mergePatch, ownNode, `{"status": {"images": null}}`, "a", wrongStatus},
		{"an address", strategicPatch, ownNode, `{"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}`, "a", wrongStatus},

		{"an event about a node", http.MethodPost, ownEvents, strings.Replace(event(foreign, "Node", reporter, "a"), `"name": "work", "namespace": "default"`, `"name": "a", "namespace": "default"`, 1), "a", "about pods only"},
		{"an event of another program", http.MethodPost, ownEvents, event(foreign, "Pod", "kubelet", "a"), "a", wrongReporter},
		{"an event of another node", http.MethodPost, ownEvents, event(foreign, "Pod", reporter, "b"), "a", wrongReporter},
		{"an event by a token of no node", http.MethodPost, ownEvents, event(foreign, "Pod", reporter, "a"), "", "not bound to a node"},
	}
}

// notAllowed are requests that the account has no right for.
func (h handOver) notAllowed(t *testing.T) {
	t.Helper()
	as := "--as=system:serviceaccount:" + h.namespace + ":" + h.name
	for _, right := range []string{
		"patch nodes", "update nodes", "update nodes/status", "list nodes", "delete nodes", "list pods", "get pods", "create pods/eviction", "delete pods", "get secrets", "get configmaps",
		"create events", "patch events.events.k8s.io", "delete events.events.k8s.io", "list events.events.k8s.io", "list resourceclaims.resource.k8s.io",
	} {
		verb, resource, _ := strings.Cut(right, " ")
		argv := []string{"kubectl", "auth", "can-i", verb, resource, as, "-A"}
		if resource, sub, found := strings.Cut(resource, "/"); found {
			argv = []string{"kubectl", "auth", "can-i", verb, resource, "--subresource=" + sub, as, "-A"}
		}
		if out, err := command(argv...); err == nil || strings.Contains(out, "yes") {
			t.Errorf("the account may %s: %s", right, out)
		}
	}
}

// make sends the request with the token of its node, and compares the answer with what it should get.
func (r call) make(tokens map[string]string) error {
	method, kind := r.method, "application/json"
	if strings.HasPrefix(r.method, "application/") {
		method, kind = http.MethodPatch, r.method
	}
	_, err := requestAs(tokens[r.node], method, kubeAPI+r.path, kind, []byte(r.body))
	switch {
	case r.want == "":
		return err
	case err == nil:
		return errors.New("it is allowed")
	case !strings.Contains(err.Error(), r.want):
		return fmt.Errorf("want %q: %w", r.want, err)
	}
	return nil
}
