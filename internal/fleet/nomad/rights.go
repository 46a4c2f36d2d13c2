package nomad

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// rightsPeriod is how often rights are looked at while nothing hints at a change. Without a right the servers leave entries out without an error.
const rightsPeriod = 10 * time.Minute

// anyNamespace is the name of no namespace: only a rule for all namespaces permits to read it.
const anyNamespace = "tandem-gpu-any"

// checkRights returns an error if allocations may be hidden. It looks at the rights again when all allocations of a namespace have gone.
func (r *reader) checkRights(ctx context.Context, now *reading) error {
	visible := map[string]bool{}
	for _, a := range now.allocs {
		visible[a.Namespace] = true
	}
	gone := false
	for namespace := range r.visible {
		gone = gone || !visible[namespace]
	}
	if r.rightsAt.IsZero() || gone || now.at.Sub(r.rightsAt) >= rightsPeriod {
		r.rightsAt = time.Time{}
		if err := r.lookAtRights(ctx); err != nil {
			return err
		}
		r.rightsAt = now.at
	}
	r.visible = visible
	return nil
}

func (r *reader) lookAtRights(ctx context.Context) error {
	policies, limited, err := r.policies(ctx)
	if err != nil {
		return err
	}
	if limited {
		if err := r.probe(ctx, policies); err != nil {
			return err
		}
	}
	r.readPreemption(ctx)
	return nil
}

// policies returns the names of the token's policies. limited is false if all may be read: without ACLs, or with a management token.
func (r *reader) policies(ctx context.Context) (names []string, limited bool, err error) {
	q, err := r.query(ctx)
	if err != nil {
		return nil, false, err
	}
	if strings.Count(q.AuthToken, ".") == 2 { // of a workload identity, which is no token that the servers know
		stubs, _, err := r.client.ACLPolicies().Self(q) // an error of servers before 1.10; the lists have shown that it is valid
		for _, p := range stubs {
			names = append(names, p.Name)
		}
		return names, !withoutACLs(err), nil
	}
	t, _, err := r.client.ACLTokens().Self(q)
	switch {
	case withoutACLs(err):
		return nil, false, nil
	case err != nil:
		return nil, false, denied(err, "the token is not valid")
	case t.Type == "management":
		return nil, false, nil
	}
	names = t.Policies
	for _, role := range t.Roles {
		full, _, err := r.client.ACLRoles().Get(role.ID, q)
		if err != nil {
			continue // its policies permit what they do, without their text
		}
		for _, p := range full.Policies {
			names = append(names, p.Name)
		}
	}
	return names, true, nil
}

// withoutACLs reports whether an error shows that the region has no ACLs, so that all is permitted.
func withoutACLs(err error) bool {
	status, body := statusOf(err)
	return status == http.StatusBadRequest && strings.Contains(body, "ACL support disabled")
}

// probe reads one allocation of each namespace that the token can know of. A rule for one namespace hides what the rule for all of them permits.
func (r *reader) probe(ctx context.Context, policies []string) error {
	q, err := r.query(ctx)
	if err != nil {
		return err
	}
	known := map[string]string{anyNamespace: "all namespaces"}
	all, _, err := r.client.Namespaces().List(q)
	if err != nil {
		return denied(err, "namespaces can't be read")
	}
	for _, n := range all {
		known[n.Name] = "namespace " + n.Name
	}
	for namespace := range r.visible {
		known[namespace] = "namespace " + namespace
	}
	stops := len(policies) == 0 // one of them may permit stops
	for _, name := range policies {
		p, _, err := r.client.ACLPolicies().Info(name, q)
		if err != nil {
			stops = true
			continue
		}
		stops = stops || permitsStops.MatchString(p.Rules)
		for _, m := range namespaceRule.FindAllStringSubmatch(p.Rules, -1) {
			if m[1] != "*" {
				known[strings.ReplaceAll(m[1], "*", anyNamespace)] = "namespace " + m[1]
			}
		}
	}
	r.notePolicies(stops)
	for _, namespace := range keysInOrder(known) {
		if err := r.probeOne(ctx, namespace, known[namespace]); err != nil {
			return err
		}
	}
	return nil
}

// namespaceRule is the head of a rule in the text of a policy.
var namespaceRule = regexp.MustCompile(`(?m)^\s*"?namespace"?\s+"([^"]+)"`)

// permitsStops is in each policy with the capability alloc-lifecycle.
var permitsStops = regexp.MustCompile(`alloc-lifecycle|"?policy"?\s*[=:]\s*"write"`)

// notePolicies reports that no policy permits stops, before the first act is denied. In which namespaces one does, only an act shows.
func (r *reader) notePolicies(permit bool) {
	object := r.o.Name + " policies"
	if permit || r.o.Mode != rescue.ModeAct {
		r.problems.End(problem.MissingRight, object, "a policy of the token permits alloc-lifecycle")
		return
	}
	p := problem.Problem{
		Code: problem.MissingRight, Object: object, Text: "region " + r.o.Name + ": no policy of the token permits to stop allocations, so no work can be moved",
		Remedy: "permit alloc-lifecycle in a policy of the token",
	}
	r.problems.Put(p, slog.LevelWarn, "the token lacks a right", "right", "alloc-lifecycle", "remedy", p.Remedy)
}

func (r *reader) probeOne(ctx context.Context, namespace, what string) error {
	q, err := r.in(ctx, namespace)
	if err != nil {
		return err
	}
	q.PerPage = 1
	if _, _, err = r.client.Allocations().List(q); isDenied(err) {
		return &RightsError{What: fmt.Sprintf("can't read %s: the policies of the token do not permit read-job there", what)}
	}
	return err
}

// readPreemption reads whether the servers end work of lower priority for a replacement. If that can't be read, they are taken to.
func (r *reader) readPreemption(ctx context.Context) {
	q, err := r.query(ctx)
	if err != nil {
		return
	}
	is := preemptsAll
	got, _, err := r.client.Operator().SchedulerGetConfiguration(q)
	if err == nil && got.SchedulerConfig != nil {
		is = got.SchedulerConfig.PreemptionConfig
		r.problems.End(problem.MissingRight, r.o.Name+" operator:read", "")
	} else {
		p := problem.Problem{
			Code: problem.MissingRight, Object: r.o.Name + " operator:read",
			Text:   "whether the servers of region " + r.o.Name + " preempt work of lower priority can't be read, so gpu-fleet assumes that they do",
			Remedy: "permit operator:read in a policy of the token",
		}
		r.problems.Put(p, slog.LevelWarn, "preemption can't be read", "error", err, "remedy", p.Remedy)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.preempts = is
}
