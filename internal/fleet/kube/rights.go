package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	rightsEach    = 10 * time.Minute
	rightsMissing = 30 * time.Second // while one is missing
)

// right is one that an act needs, and that reading does not show.
type right struct{ verb, group, resource, sub string }

func (r right) String() string {
	return r.verb + " " + strings.TrimSuffix(r.resource+"/"+r.sub, "/")
}

var (
	eviction = right{"create", "", "pods", "eviction"}
	getPods  = right{"get", "", "pods", ""}
)

// checkRights asks the server whether the rights for acts are there.
func (c *Cluster) checkRights(ctx context.Context) {
	for wait := time.Duration(0); watch.Sleep(ctx, wait); {
		if c.o.Mode == rescue.ModeAct {
			for _, r := range []right{eviction, getPods} {
				c.checkRight(ctx, r)
			}
		}
		c.mu.Lock()
		n := len(c.missing)
		c.mu.Unlock()
		if wait = rightsEach; n > 0 {
			wait = rightsMissing
		}
	}
}

func (c *Cluster) checkRight(ctx context.Context, r right) {
	call, cancel := deadline(ctx)
	defer cancel()
	review, err := c.client.AuthorizationV1().SelfSubjectAccessReviews().Create(call, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: r.verb, Group: r.group, Resource: r.resource, Subresource: r.sub,
		}},
	}, metav1.CreateOptions{})
	switch {
	case err != nil: // what is missing shows when it is needed
	case review.Status.Allowed:
		c.setMissing(r, "")
	default:
		c.setMissing(r, strings.TrimSpace(fmt.Sprintf("the right to %s in all namespaces is missing. %s", r, review.Status.Reason)))
	}
}

// setMissing records that a right is missing, and why; "" = it is there.
func (c *Cluster) setMissing(r right, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if why == "" {
		delete(c.missing, r.String())
		return
	}
	c.missing[r.String()] = why
	watch.Notify(c.changed)
}

// denied returns why acts are not possible in the cluster: a problem of reading, or rights that are missing.
func (c *Cluster) denied(reading string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []string
	if reading != "" {
		all = append(all, reading)
	}
	for _, r := range slices.Sorted(maps.Keys(c.missing)) {
		all = append(all, c.missing[r])
	}
	return strings.Join(all, "; ")
}

// showDenied shows rights that are missing; "" = none is.
func (c *Cluster) showDenied(why string) {
	if why == "" {
		c.problems.End(problem.MissingRight, c.o.Name, "no right is missing", "cluster", c.o.Name)
		return
	}
	c.problems.Put(problem.Problem{
		Code: problem.MissingRight, Object: c.o.Name, Text: "no work is moved in cluster " + c.o.Name + ": " + why,
		Remedy: "give this program the rights of its ClusterRole",
	}, slog.LevelWarn, "a right is missing", "cluster", c.o.Name, "error", why)
}
