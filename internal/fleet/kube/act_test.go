package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// server answers requests by "METHOD path", and records them.
type server struct {
	answers map[string]func(w http.ResponseWriter, r *http.Request)

	mu     sync.Mutex
	got    []string
	bodies []string
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := r.Method + " " + r.URL.Path
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.got, s.bodies = append(s.got, name), append(s.bodies, string(body))
	s.mu.Unlock()
	if f := s.answers[name]; f != nil {
		f(w, r)
		return
	}
	status(404, metav1.StatusReasonNotFound, "not found", nil)(w, r)
}

func object(o any) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(o)
	}
}

func status(code int32, reason metav1.StatusReason, message string, details *metav1.StatusDetails, headers ...string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(int(code))
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: map[bool]string{true: "Success", false: "Failure"}[code < 300],
			Code: code, Reason: reason, Message: message, Details: details,
		})
	}
}

func (s *server) cluster(t *testing.T) *Cluster {
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: h.URL, QPS: 1000, Burst: 1000})
	if err != nil {
		t.Fatal(err)
	}
	return newCluster(Options{Name: "east", Mode: rescue.ModeAct}, client, client)
}

const (
	podPath   = "/api/v1/namespaces/default/pods/p"
	evictPath = "POST " + podPath + "/eviction"
	pdbPath   = "GET /apis/policy/v1/namespaces/default/poddisruptionbudgets"
)

func thePod(change func(p *corev1.Pod)) *corev1.Pod {
	p := (&cluster{}).run("p", "a", "!GPU-1")
	p.TypeMeta = metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if change != nil {
		change(p)
	}
	return p
}

var theAct = rescue.Act{
	Subject: rescue.Subject{Cluster: "east", Node: "a", GPU: "GPU-1", Work: "uid-p"},
	Work:    []rescue.Target{{ID: "uid-p", Namespace: "default", Name: "p"}},
}

var disruption = &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: "The disruption budget d needs 1 healthy pods and has 1 currently"}}}

func budgets(change func(b *policyv1.PodDisruptionBudget)) policyv1.PodDisruptionBudgetList {
	b := policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "d"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p"}}, MinAvailable: new(intstr.FromInt32(1))},
		Status:     policyv1.PodDisruptionBudgetStatus{ExpectedPods: 2, DesiredHealthy: 1},
	}
	if change != nil {
		change(&b)
	}
	other := policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}}}
	return policyv1.PodDisruptionBudgetList{TypeMeta: metav1.TypeMeta{Kind: "PodDisruptionBudgetList", APIVersion: "policy/v1"}, Items: []policyv1.PodDisruptionBudget{b, other}}
}

// What the answers of the API server mean for an act.
func TestDo(t *testing.T) {
	notReady := func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }
	tooMany := func(d *metav1.StatusDetails, headers ...string) func(http.ResponseWriter, *http.Request) {
		return status(429, metav1.StatusReasonTooManyRequests, "Cannot evict pod as it would violate the pod's disruption budget.", d, headers...)
	}
	for name, tc := range map[string]struct {
		pod     func(http.ResponseWriter, *http.Request)
		evict   func(http.ResponseWriter, *http.Request)
		budgets func(http.ResponseWriter, *http.Request)
		kind    rescue.AnswerKind
		text    string
		remedy  string
		after   time.Duration
		calls   int // for the eviction
		problem bool
	}{
		"accepted": {evict: status(201, "", "", nil), kind: rescue.Accepted, calls: 1},
		"gone":     {pod: status(404, metav1.StatusReasonNotFound, `pods "p" not found`, nil), kind: rescue.NotFound},
		"another pod of the name": {
			pod: object(thePod(func(p *corev1.Pod) { p.UID = "new" })), kind: rescue.NotFound, text: "another one has its name",
		},
		"ends already": {
			pod: object(thePod(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: start} })), kind: rescue.Accepted, text: "deleted already",
		},
		"on another node": {pod: object(thePod(func(p *corev1.Pod) { p.Spec.NodeName = "b" })), kind: rescue.NotFound, text: "node b"},
		"gone before the call": {
			evict: status(404, metav1.StatusReasonNotFound, `pods "p" not found`, nil), kind: rescue.NotFound, calls: 1,
		},
		"replaced before the call": {
			evict: status(409, metav1.StatusReasonConflict, `Operation cannot be fulfilled on Pod "p": the UID in the precondition (a) does not match the UID in record (b)`, nil),
			kind:  rescue.NotFound, calls: 1,
		},
		"another conflict": {evict: status(409, metav1.StatusReasonConflict, "the object has been modified", nil), kind: rescue.Failed, calls: 1},
		"budget":           {evict: tooMany(disruption), kind: rescue.Blocked, text: "disruption budget", calls: 1},
		"budget that is being processed": {
			evict: tooMany(&metav1.StatusDetails{Causes: disruption.Causes, RetryAfterSeconds: 10}, "Retry-After", "10"), kind: rescue.Blocked, after: 10 * time.Second, calls: 1,
		},
		"server that is busy": {evict: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "Too many requests, please try again later.", http.StatusTooManyRequests)
		}, kind: rescue.Blocked, calls: 1, after: time.Second},
		"budget for a pod that is not ready": {
			pod: object(thePod(notReady)), evict: tooMany(disruption), kind: rescue.Blocked, remedy: "unhealthyPodEvictionPolicy: AlwaysAllow of PodDisruptionBudget d", calls: 1,
		},
		"budget for a pod that is not ready, which always allows": {
			pod: object(thePod(notReady)), evict: tooMany(disruption), kind: rescue.Blocked, calls: 1,
			budgets: object(budgets(func(b *policyv1.PodDisruptionBudget) {
				b.Spec.UnhealthyPodEvictionPolicy = new(policyv1.AlwaysAllow)
			})),
		},
		"budget of all pods": {
			evict: tooMany(disruption), kind: rescue.Blocked, remedy: "allow one disruption", calls: 1,
			budgets: object(budgets(func(b *policyv1.PodDisruptionBudget) { b.Status.DesiredHealthy = 2 })),
		},
		"budgets that can't be read": {
			pod: object(thePod(notReady)), evict: tooMany(disruption), kind: rescue.Blocked, calls: 1, budgets: status(403, metav1.StatusReasonForbidden, "no", nil),
		},
		"two budgets": {
			evict: status(500, metav1.StatusReasonInternalError, "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.", nil),
			kind:  rescue.Denied, calls: 1,
		},
		"another error": {evict: status(500, metav1.StatusReasonInternalError, "etcd", nil), kind: rescue.Failed, calls: 1},
		"no right": {
			evict: status(403, metav1.StatusReasonForbidden, `pods "p" is forbidden: User "x" cannot create resource "pods/eviction" in API group "" in the namespace "default"`, nil),
			kind:  rescue.Failed, calls: 1, problem: true,
		},
		"no right to read": {
			pod:  status(403, metav1.StatusReasonForbidden, `pods "p" is forbidden: User "x" cannot get resource "pods" in API group "" in the namespace "default"`, nil),
			kind: rescue.NotMade, text: "the pod can't be read", problem: true,
		},
		"no answer for the pod": {pod: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, kind: rescue.NotMade, text: "deadline"},
		"admission":             {evict: status(403, metav1.StatusReasonForbidden, `admission webhook "x" denied the request`, nil), kind: rescue.Failed, calls: 1},
		"no answer":             {evict: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, kind: rescue.Failed, text: "deadline", calls: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := &server{answers: map[string]func(http.ResponseWriter, *http.Request){"GET " + podPath: tc.pod, evictPath: tc.evict, pdbPath: tc.budgets}}
			if tc.pod == nil {
				s.answers["GET "+podPath] = object(thePod(nil))
			}
			if tc.budgets == nil {
				s.answers[pdbPath] = object(budgets(nil))
			}
			c := s.cluster(t)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			got := c.Do(ctx, theAct)
			if got.Kind != tc.kind || !strings.Contains(got.Text, tc.text) || (got.Remedy == "") != (tc.remedy == "") || !strings.Contains(got.Remedy, tc.remedy) || got.After != tc.after {
				t.Errorf("%+v", got)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if n := strings.Count(strings.Join(s.got, "\n"), evictPath); n != tc.calls {
				t.Errorf("%d calls of the eviction, want %d: %q", n, tc.calls, s.got)
			}
			if problem := c.denied(""); (problem != "") != tc.problem {
				t.Errorf("problem %q", problem)
			}
			if tc.calls > 0 && !strings.Contains(fmt.Sprint(s.bodies), `"preconditions":{"uid":"uid-p"}`) {
				t.Errorf("bodies %q", s.bodies)
			}
		})
	}
}

// An act that is only listed, or on a device, is no call.
func TestDoNothing(t *testing.T) {
	s := &server{}
	c := s.cluster(t)
	listed, device := theAct, theAct
	listed.Listed, device.Device = true, "GPU-1"
	for _, a := range []rescue.Act{listed, device, {}} {
		if got := c.Do(t.Context(), a); got.Kind != rescue.Denied {
			t.Errorf("%+v", got)
		}
	}
	if len(s.got) > 0 {
		t.Errorf("requests %q", s.got)
	}
}
