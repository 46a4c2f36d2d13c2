// Package kube reads one Kubernetes cluster for fleet, and moves pods in it.
//
//	tables      what is kept of nodes, pods, Jobs, claims and slices; reflectors of client-go fill them
//	translate   objects -> rescue.Cluster, a pure function
//	Do          the eviction of a pod (policy/v1), which obeys disruption budgets
//	store       the ledger in a ConfigMap
//	lease       the leader
//
// Pods with claims of Dynamic Resource Allocation are evicted as all others are. Kubernetes could end them by the taint NoExecute of their device, but that
// disregards disruption budgets, takes all pods of the device at once, and would be a second mechanism with a second permission.
//
// No pod is taken for the replacement of another one: an owner reference names the controller, and not the pod that went. So a move ends when its pod has ended.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Options are the settings of a cluster.
type Options struct {
	Name string
	Mode rescue.Mode

	// Kubeconfig and Context are the file with the address and the credentials, and which of its contexts; both "" = the cluster in which this
	// program runs.
	Kubeconfig, Context string

	// Controllers are kinds of owners, such as "PyTorchJob.kubeflow.org", that replace their pods on other nodes, beside those of Kubernetes.
	Controllers []string

	Log *slog.Logger
}

// Cluster is one Kubernetes cluster.
type Cluster struct {
	o       Options
	client  kubernetes.Interface
	lead    kubernetes.Interface // for the leader election alone, so that no other call delays it
	shown   *watch.Value[rescue.Cluster]
	changed chan struct{} // an object has changed, or Follow was called
	tables  tables
	reads   reads

	problems problemset.Set

	mu       sync.Mutex
	followed map[string]bool
	missing  map[string]string // rights that are missing: what is denied -> the text of the server
	reports  reports           // of the latest pass
}

// The clients' own limits of requests a second: far above what is needed, since a queue in the client delays evictions. The server has its own limits.
const (
	requestsPerSecond = 50
	requestsAtOnce    = 100
)

// New returns a cluster. It connects to no server.
func New(o Options) (*Cluster, error) {
	config, err := configOf(o)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	lead, err := kubernetes.NewForConfig(rest.CopyConfig(config))
	if err != nil {
		return nil, err
	}
	return newCluster(o, client, lead), nil
}

func newCluster(o Options, client, lead kubernetes.Interface) *Cluster {
	c := &Cluster{
		o: o, client: client, lead: lead, changed: make(chan struct{}, 1),
		followed: map[string]bool{}, missing: map[string]string{}, reports: reports{},
	}
	c.problems.Log = o.Log
	c.shown = watch.NewValue(rescue.Cluster{Name: o.Name, Mode: o.Mode, AgentReports: true, Problem: "it has not been read yet"})
	c.tables = newTables(c.changed)
	return c
}

// configOf returns how to reach the API server.
func configOf(o Options) (*rest.Config, error) {
	config, err := o.connection()
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = requestsPerSecond, requestsAtOnce
	config.UserAgent = "gpu-fleet"
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.WarningHandler = rest.NoWarnings{}
	return config, nil
}

func (o Options) connection() (*rest.Config, error) {
	if o.Kubeconfig == "" && o.Context == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("kubeconfig is not set, and this program does not run in a pod: name a file in kubeconfig")
		}
		return config, err
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.Kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: o.Context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %q, context %q: %w", o.Kubeconfig, o.Context, err)
	}
	return config, nil
}

// Name returns the name of the cluster in the configuration.
func (c *Cluster) Name() string { return c.o.Name }

// Kind returns which orchestrator it has.
func (c *Cluster) Kind() fleet.Kind { return fleet.Kubernetes }

// Shown has the cluster as it was read last.
func (c *Cluster) Shown() *watch.Value[rescue.Cluster] { return c.shown }

// Problems are what this program lacks in the cluster.
func (c *Cluster) Problems() []problem.Problem { return c.problems.List() }

// Follow names the pods by their UIDs of which the nodes are needed that may take their replacements.
func (c *Cluster) Follow(work []string) {
	next := make(map[string]bool, len(work))
	for _, id := range work {
		next[id] = true
	}
	c.mu.Lock()
	same := len(next) == len(c.followed)
	for id := range next {
		same = same && c.followed[id]
	}
	c.followed = next
	c.mu.Unlock()
	if !same {
		watch.Notify(c.changed)
	}
}

// Mark does nothing: the agents mark nodes of Kubernetes, by a condition.
func (c *Cluster) Mark(context.Context, rescue.Mark) (uint64, error) {
	return 0, errors.New("nodes of Kubernetes are marked by their agents")
}

// deadline ends a call to the API server in time.
func deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, fleet.CallTimeout)
}
