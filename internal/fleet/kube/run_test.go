package kube

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// running is a cluster that follows a fake server.
type running struct {
	*Cluster
	t      *testing.T
	client *fake.Clientset
}

func follow(t *testing.T, c *cluster, before func(*running)) *running {
	client := fake.NewClientset()
	for _, n := range c.nodes {
		_ = client.Tracker().Add(n)
	}
	for _, p := range c.pods {
		_ = client.Tracker().Add(p)
	}
	for _, s := range c.slices {
		client.Resources = []*metav1.APIResourceList{{GroupVersion: resourcev1.SchemeGroupVersion.String()}}
		_ = client.Tracker().Add(s)
	}
	for _, one := range c.claims {
		_ = client.Tracker().Add(one)
	}
	for _, one := range c.classes {
		_ = client.Tracker().Add(one)
	}
	r := &running{t: t, client: client, Cluster: newCluster(Options{Name: "east", Mode: rescue.ModeAct}, client, client)}
	client.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authorizationv1.SelfSubjectAccessReview{Status: authorizationv1.SubjectAccessReviewStatus{Allowed: true}}, nil
	})
	if before != nil {
		before(r)
	}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = r.Run(ctx) }()
	t.Cleanup(func() { end(); <-ended })
	return r
}

// until waits for what is shown.
func (r *running) until(what string, ok func(rescue.Cluster) bool) rescue.Cluster {
	r.t.Helper()
	ctx, end := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer end()
	var last rescue.Cluster
	for last = range r.Shown().Watch(ctx) {
		if ok(last) {
			return last
		}
	}
	r.t.Fatalf("not shown: %s; last %+v, problems %v", what, last, r.Problems())
	return last
}

// The cluster is shown, with its changes, as they are read.
func TestRun(t *testing.T) {
	c := newTestCluster(t, 2, 2)
	p := faulty(c)
	r := follow(t, c, nil)
	if s := r.Shown().Load(); s.Name != "east" || s.Problem == "" {
		t.Errorf("before anything is read: %+v", s)
	}
	s := r.until("two nodes", func(s rescue.Cluster) bool { return len(s.Nodes) == 2 && len(s.Work) == 1 })
	if s.Problem != "" || s.Mode != rescue.ModeAct || time.Since(s.ReadAt) > 10*time.Second || !s.AgentReports {
		t.Errorf("%+v", s)
	}
	if s.Nodes[0].Name != "a" || s.Work[0].Pool != "" {
		t.Errorf("%+v", s)
	}
	r.Follow([]string{"uid-p"})
	r.until("the pool of a followed pod", func(s rescue.Cluster) bool { return len(s.Pools[s.Work[0].Pool]) == 2 })

	live, err := r.Live(t.Context(), theAct)
	if err != nil || len(live.Nodes) != 1 || len(live.Work) != 1 || live.Work[0].ID != "uid-p" || live.Mode != rescue.ModeAct || live.Problem != "" || live.ReadAt.IsZero() {
		t.Errorf("%+v, %v", live, err)
	}
	if err := r.client.CoreV1().Pods("default").Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.until("the pod has gone", func(s rescue.Cluster) bool { return len(s.Work) == 0 })
	if live, err = r.Live(t.Context(), theAct); err != nil || len(live.Work) != 0 {
		t.Errorf("%+v, %v", live, err)
	}
}

// Claims and slices are read where the cluster has them, also right before an act.
func TestRunDRA(t *testing.T) {
	c := newDRACluster(t, 2, 2)
	c.claim("p", "a", 0)
	c.taint("a", 0)
	c.report("a", start, xid("GPU-a0", "uid-p"))
	r := follow(t, c, nil)
	r.Follow([]string{"uid-p"})
	want := []rescue.Hold{{Device: "GPU-a0", Shown: rescue.ShownUnhealthy}}
	s := r.until("the claim", func(s rescue.Cluster) bool {
		return len(s.Nodes) == 2 && len(s.Work) == 1 && slices.Equal(s.Work[0].Holds, want) && s.Work[0].Pool != ""
	})
	if need := []rescue.Need{{Kind: draDriver, Units: 1}}; !slices.Equal(s.Work[0].Needs, need) || len(s.Pools[s.Work[0].Pool]) != 2 {
		t.Errorf("%+v", s)
	}
	if live, err := r.Live(t.Context(), theAct); err != nil || len(live.Work) != 1 || !slices.Equal(live.Work[0].Holds, want) {
		t.Errorf("%+v, %v", live, err)
	}
}

// A renewal counts when it comes. What is read first is of an unknown age.
func TestReportedAt(t *testing.T) {
	c := newTestCluster(t, 2)
	faulty(c)
	r := follow(t, c, nil)
	r.until("the report", func(s rescue.Cluster) bool {
		return len(s.Nodes) == 1 && len(s.Nodes[0].Faults) == 1 && s.Nodes[0].ReportedAt.IsZero()
	})
	time.Sleep(caughtUp)
	c.report("a", start.Add(30*time.Second), xid("GPU-1", "uid-p"))
	if _, err := r.client.CoreV1().Nodes().Update(t.Context(), c.node("a"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s := r.until("the renewal", func(s rescue.Cluster) bool { return !s.Nodes[0].ReportedAt.IsZero() })
	if age := time.Since(s.Nodes[0].ReportedAt); age > 5*time.Second {
		t.Errorf("it is %v old", age)
	}
	n := c.node("a").DeepCopy()
	n.Annotations[faultreport.Annotation] = "{"
	if _, err := r.client.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.until("a report that can't be read", func(s rescue.Cluster) bool {
		return len(r.Problems()) == 1 && len(s.Nodes[0].Faults) == 0 && s.Nodes[0].ReportedAt.IsZero()
	})
	if p := r.Problems()[0]; p.Code != problem.FaultReport || !strings.Contains(p.Text, "node a") {
		t.Errorf("%+v", p)
	}
}

// A right that is missing is a problem of the cluster: what can't be listed could be anything.
func TestMissingRights(t *testing.T) {
	for _, resource := range []string{"pods", "nodes", "jobs"} {
		r := follow(t, newTestCluster(t, 2), func(r *running) {
			r.client.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
			})
		})
		s := r.until(resource, func(s rescue.Cluster) bool { return strings.Contains(s.Problem, "forbidden") })
		if len(s.Nodes) > 0 || !strings.Contains(s.Problem, resource) {
			t.Errorf("%s: %+v", resource, s)
		}
	}
	r := follow(t, newTestCluster(t, 2), func(r *running) {
		r.client.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, &authorizationv1.SelfSubjectAccessReview{}, nil
		})
	})
	r.until("no right to evict", func(s rescue.Cluster) bool { return strings.Contains(s.Problem, "create pods/eviction") })
	if p := r.Problems(); len(p) != 1 || p[0].Code != problem.MissingRight {
		t.Errorf("%+v", p)
	}
	r.setMissing(eviction, "")
	r.setMissing(getPods, "")
	r.until("the right", func(s rescue.Cluster) bool { return s.Problem == "" })
}

// The age of what is shown grows as soon as a watch has ended, or tells nothing for too long.
func TestReadAt(t *testing.T) {
	now := start.Add(time.Hour)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, tc := range map[string]struct {
		s        *source
		answered time.Time
		want     time.Duration
		current  bool
	}{
		"watch and answer": {&source{open: true, opened: ago(time.Minute), event: ago(time.Minute)}, ago(5 * time.Second), 5 * time.Second, true},
		"opened just now":  {&source{open: true, opened: ago(time.Second), event: ago(time.Second)}, ago(5 * time.Second), time.Second, false},
		"no answer":        {&source{open: true, opened: ago(2 * time.Minute), event: ago(time.Second)}, ago(90 * time.Second), 90 * time.Second, true},
		"no event":         {&source{open: true, opened: ago(time.Hour), event: ago(10 * time.Minute)}, ago(5 * time.Second), 10 * time.Minute, false},
		"ended":            {&source{opened: ago(time.Hour), closed: ago(20 * time.Second), event: ago(5 * time.Second)}, ago(5 * time.Second), 20 * time.Second, false},
	} {
		if at := tc.s.readAt(tc.answered, now); now.Sub(at) != tc.want {
			t.Errorf("%s: %v old", name, now.Sub(at))
		}
		if tc.s.current(now) != tc.current {
			t.Errorf("%s: current %t", name, !tc.current)
		}
	}
}

// A server that does not answer permits no act.
func TestNoAnswer(t *testing.T) {
	c := newTestCluster(t, 2)
	r := follow(t, c, nil)
	r.until("a node", func(s rescue.Cluster) bool { return len(s.Nodes) == 1 })
	r.client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("no answer") })
	if _, err := r.Live(t.Context(), theAct); err == nil || !strings.Contains(err.Error(), "node a") {
		t.Error(err)
	}
	if got := r.Do(t.Context(), theAct); got.Kind != rescue.NotMade {
		t.Errorf("%+v", got)
	}
}

// The ClusterRole of deploy/gpu-fleet permits all that is read.
func TestRightsOfManifest(t *testing.T) {
	may := map[string]bool{"create authorization.k8s.io/selfsubjectaccessreviews": true} // of every account
	for _, rule := range clusterRole(t, "gpu-fleet").Rules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				may[verb+" "+rule.APIGroups[0]+"/"+resource] = true
			}
		}
	}
	c := newDRACluster(t, 2, 2)
	c.claim("p", "a", 0)
	r := follow(t, c, nil)
	r.until("the claim", func(s rescue.Cluster) bool { return len(s.Work) == 1 && len(s.Work[0].Holds) > 0 })
	if _, err := r.Live(t.Context(), theAct); err != nil {
		t.Fatal(err)
	}
	for _, a := range r.client.Actions() {
		right := a.GetVerb() + " " + a.GetResource().Group + "/" + a.GetResource().Resource
		if discovery := a.GetResource().Resource == "resource"; !discovery && !may[right] {
			t.Errorf("no rule permits %s", right)
		}
	}
}

func clusterRole(t *testing.T, name string) (role rbacv1.ClusterRole) {
	t.Helper()
	f, err := os.Open("../../../deploy/gpu-fleet/access.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for objects := yaml.NewYAMLOrJSONDecoder(f, 4096); role.Kind != "ClusterRole" || role.Name != name; {
		role = rbacv1.ClusterRole{}
		if err := objects.Decode(&role); err != nil {
			t.Fatal(name, err)
		}
	}
	return role
}
