package kube

import (
	"context"
	"fmt"
	"maps"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// Live reads the node of an act, and what is on it, from the servers.
func (c *Cluster) Live(ctx context.Context, a rescue.Act) (rescue.Cluster, error) {
	ctx, cancel := deadline(ctx)
	defer cancel()
	began := time.Now()
	o, err := c.readNode(ctx, a.Node)
	if err == nil {
		err = c.readOwners(ctx, &o, a)
	}
	if err == nil {
		err = c.readClaims(ctx, &o, a.Node)
	}
	if err != nil {
		return rescue.Cluster{}, fmt.Errorf("cluster %s: read node %s before an act: %w", c.o.Name, a.Node, err)
	}
	c.mu.Lock()
	o.reports = maps.Clone(c.reports)
	c.mu.Unlock()
	now := time.Now()
	o.reports.see(o.nodes, now, c.reads.node != nil && c.reads.node.current(now))
	o.controllers = c.o.Controllers
	live := translate(o, now)
	live.Name, live.Mode, live.ReadAt, live.Problem = c.o.Name, c.o.Mode, began, c.denied("")
	return live, nil
}

// readNode reads a node and its pods. A node that is not there any more has none.
func (c *Cluster) readNode(ctx context.Context, name string) (o objects, err error) {
	n, err := c.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return o, nil
	}
	if err != nil {
		return o, err
	}
	o.nodes = []*node{nodeOf(n)}
	pods, err := c.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", name).String()})
	if err != nil {
		return o, err
	}
	for i := range pods.Items {
		if pods.Items[i].Spec.NodeName == name {
			o.pods = append(o.pods, podOf(&pods.Items[i]))
		}
	}
	return o, nil
}

// readOwners reads the Jobs of the work of an act.
func (c *Cluster) readOwners(ctx context.Context, o *objects, a rescue.Act) error {
	o.jobs = map[named]*job{}
	for _, p := range o.pods {
		name := named{p.namespace, p.owner.name}
		if !p.of(a) || p.owner.kind != jobKind || o.jobs[name] != nil {
			continue
		}
		one, err := c.client.BatchV1().Jobs(p.namespace).Get(ctx, p.owner.name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err): // translate knows what that means
		case err != nil:
			return err
		default:
			o.jobs[name] = jobOf(one)
		}
	}
	return nil
}

// of reports whether a pod is the work of an act.
func (p *pod) of(a rescue.Act) bool {
	for _, t := range a.Work {
		if t.ID == p.uid {
			return true
		}
	}
	return false
}

// readClaims reads the claims of the pods and the slices of the node.
func (c *Cluster) readClaims(ctx context.Context, o *objects, node string) error {
	o.claims, o.classes = map[named]*claim{}, c.tables.classes.all()
	c.reads.mu.Lock()
	there := c.reads.dra == draThere
	c.reads.mu.Unlock()
	if !there {
		return nil
	}
	for _, p := range o.pods {
		for _, ref := range p.claims {
			one, err := c.client.ResourceV1().ResourceClaims(p.namespace).Get(ctx, ref.name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
			case err != nil:
				return err
			default:
				o.claims[named{p.namespace, ref.name}] = claimOf(one)
			}
		}
	}
	list, err := c.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()})
	if err != nil {
		return err
	}
	for i := range list.Items {
		o.slices = append(o.slices, sliceOf(&list.Items[i]))
	}
	return nil
}
