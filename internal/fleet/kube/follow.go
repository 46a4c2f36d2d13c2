package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	passAtMost  = time.Second // between two translations, for pods change often
	passAtLeast = 5 * time.Second
	askEach     = 10 * time.Second // whether the servers answer
	startFor    = 10 * time.Second // without a warning that nothing has been read
)

// reads are the resources that are followed.
type reads struct {
	mu   sync.Mutex
	all  []*source
	node *source
	dra  draState
	err  error     // why it is not known whether the cluster has Dynamic Resource Allocation
	at   time.Time // of the latest answer to a request

	began time.Time
}

type draState uint8

const (
	draUnknown draState = iota
	draAbsent
	draThere
)

// lister and watcher are a typed client.
type lister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (apiwatch.Interface, error)
}

func newSource[L runtime.Object, T interface{ key() named }](name string, object runtime.Object, t *table[T], client lister[L]) *source {
	return &source{
		name: name, object: object, table: t, filled: t.filled, watch: client.Watch,
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return client.List(ctx, o) },
	}
}

// Run follows the servers until ctx ends.
func (c *Cluster) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, c.libraryLog())
	var wg sync.WaitGroup
	start := func(all ...*source) {
		c.reads.add(all...)
		for _, s := range all {
			wg.Go(func() { s.run(ctx, c.client) })
		}
	}
	c.reads.began = time.Now()
	c.reads.node = newSource("nodes", &corev1.Node{}, c.tables.nodes, c.client.CoreV1().Nodes())
	start(c.reads.node, newSource("pods", &corev1.Pod{}, c.tables.pods, c.client.CoreV1().Pods("")),
		newSource("jobs", &batchv1.Job{}, c.tables.jobs, c.client.BatchV1().Jobs("")))
	for _, s := range []*source{ // without them work with volumes has no place that is certain, and nothing else is missing
		newSource("persistentvolumeclaims", &corev1.PersistentVolumeClaim{}, c.tables.volumeClaims, c.client.CoreV1().PersistentVolumeClaims("")),
		newSource("persistentvolumes", &corev1.PersistentVolume{}, c.tables.volumes, c.client.CoreV1().PersistentVolumes()),
	} {
		wg.Go(func() { s.run(ctx, c.client) })
	}
	wg.Go(func() { c.findDRA(ctx, start) })
	wg.Go(func() { c.ask(ctx) })
	wg.Go(func() { c.checkRights(ctx) })
	reconcile.Loop{On: []reconcile.Source{reconcile.Signal(c.changed)}}.Run(ctx, c.pass)
	wg.Wait()
	return nil
}

// libraryLog is the log of client-go: what matters of it is a problem of the cluster, and in that.
func (c *Cluster) libraryLog() klog.Logger {
	if l := c.o.Log; l != nil && l.Enabled(context.Background(), slog.LevelDebug) {
		return logr.FromSlogHandler(l.Handler()).WithValues("cluster", c.o.Name)
	}
	return logr.Discard()
}

func (r *reads) add(all ...*source) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, all...)
}

// findDRA follows the objects of Dynamic Resource Allocation as soon as the cluster has them.
func (c *Cluster) findDRA(ctx context.Context, start func(...*source)) {
	for wait := time.Duration(0); watch.Sleep(ctx, wait); {
		there, err := c.hasDRA()
		c.reads.mu.Lock()
		c.reads.err = err
		if err == nil {
			c.reads.dra = there
		}
		c.reads.mu.Unlock()
		if there == draThere {
			r := c.client.ResourceV1()
			start(newSource("resourceclaims", &resourcev1.ResourceClaim{}, c.tables.claims, r.ResourceClaims("")),
				newSource("resourceslices", &resourcev1.ResourceSlice{}, c.tables.slices, r.ResourceSlices()),
				newSource("deviceclasses", &resourcev1.DeviceClass{}, c.tables.classes, r.DeviceClasses()))
			return
		}
		if wait = 10 * time.Minute; err != nil {
			wait = askEach
		}
	}
}

func (c *Cluster) hasDRA() (draState, error) {
	_, err := c.client.Discovery().ServerResourcesForGroupVersion(resourcev1.SchemeGroupVersion.String())
	switch {
	case apierrors.IsNotFound(err):
		return draAbsent, nil
	case err != nil:
		return draUnknown, fmt.Errorf("find out whether the cluster has Dynamic Resource Allocation: %w", err)
	}
	return draThere, nil
}

// ask finds out whether the servers answer: a watch without an event does not show that.
func (c *Cluster) ask(ctx context.Context) {
	for {
		began := time.Now()
		call, cancel := deadline(ctx)
		_, err := c.client.CoreV1().Nodes().List(call, metav1.ListOptions{Limit: 1})
		cancel()
		if err == nil {
			c.reads.mu.Lock()
			c.reads.at = began
			c.reads.mu.Unlock()
		}
		if !watch.Sleep(ctx, askEach) {
			return
		}
	}
}

// pass publishes what the tables have.
func (c *Cluster) pass(ctx context.Context, cause reconcile.Cause) time.Duration {
	if cause == reconcile.Change && !watch.Sleep(ctx, passAtMost) {
		return reconcile.Never
	}
	now := time.Now()
	readAt, why := c.reads.state(now)
	if readAt.IsZero() { // nothing was read yet, or not all of it
		c.shown.Store(rescue.Cluster{Name: c.o.Name, Mode: c.o.Mode, AgentReports: true, Problem: why})
		if now.Sub(c.reads.began) > startFor {
			c.showUnread(why)
		}
		return time.Second
	}
	o := c.tables.objects()
	c.mu.Lock()
	c.reports.see(o.nodes, now, c.reads.node.current(now))
	o.reports, o.followed, o.controllers = maps.Clone(c.reports), c.followed, c.o.Controllers
	c.mu.Unlock()
	shown := translate(o, now)
	shown.Name, shown.Mode, shown.ReadAt = c.o.Name, c.o.Mode, readAt
	shown.Problem = c.denied(why)
	c.showDenied(shown.Problem)
	c.showReports(o.reports)
	c.showUnread(c.late(readAt, now))
	c.shown.Store(shown)
	return passAtLeast
}

// state is the time of which all that was read is; zero, and why, if not all was read once.
func (r *reads) state(now time.Time) (readAt time.Time, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dra == draUnknown {
		return time.Time{}, text(r.err, "its API groups have not been read yet")
	}
	readAt = now
	for _, s := range r.all {
		if err := s.denied(); err != nil {
			why = fmt.Sprintf("a right is missing: %v", err)
		}
		if !s.filled() {
			return time.Time{}, text(s.failed(), "its "+s.name+" have not been read yet")
		}
		at := s.readAt(r.at, now)
		if at.IsZero() {
			return at, text(s.failed(), "its "+s.name+" can't be watched yet")
		}
		if at.Before(readAt) {
			readAt = at
		}
	}
	return readAt, why
}

func text(err error, otherwise string) string {
	if err != nil {
		return err.Error()
	}
	return otherwise
}

// unreadAfter is when a cluster whose servers do not answer is a problem.
const unreadAfter = time.Minute

// late returns why what was read is old; "" = it is not.
func (c *Cluster) late(readAt, now time.Time) string {
	if now.Sub(readAt) < unreadAfter {
		return ""
	}
	why := "no error"
	c.reads.mu.Lock()
	defer c.reads.mu.Unlock()
	for _, s := range c.reads.all {
		if err := s.failed(); err != nil {
			why = err.Error()
		}
	}
	return fmt.Sprintf("its servers have not answered completely since %s: %s", readAt.UTC().Format(time.RFC3339), why)
}

// showUnread shows that the cluster can't be read; "" = it can.
func (c *Cluster) showUnread(why string) {
	if why == "" {
		c.problems.End(problem.ClusterUnread, c.o.Name, "cluster is read", "cluster", c.o.Name)
		return
	}
	c.problems.Put(problem.Problem{
		Code: problem.ClusterUnread, Object: c.o.Name, Text: "no work is moved in cluster " + c.o.Name + ": " + why,
	}, slog.LevelWarn, "cluster can't be read", "cluster", c.o.Name, "error", why)
}

// showReports shows the annotations that can't be used.
func (c *Cluster) showReports(all reports) {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].err; err != nil {
			texts = append(texts, fmt.Sprintf("no work is moved from node %s of cluster %s, nor to it: %v: update its agent, or this program", name, c.o.Name, err))
		}
	}
	c.problems.Replace(problem.FaultReport, "", texts...)
}
