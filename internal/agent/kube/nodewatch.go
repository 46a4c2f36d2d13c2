package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	nodeReadFirst = time.Second // before another attempt to read the Node, after a failure
	nodeReadMost  = time.Minute
)

// nodeWatch follows the labels of this node's Node object. It is of the process: what it has read outlives a run.
type nodeWatch struct {
	api      *kubeapi.Client
	node     string
	labels   *watch.Value[map[string]string] // nil = not read yet
	problems problemset.Set
}

// newNodeWatch returns a nodeWatch that has read nothing.
func newNodeWatch(s config.Kubernetes, version string) (*nodeWatch, error) {
	o := kubeAPIOptions(s)
	o.Agent = userAgent(version)
	api, err := kubeapi.New(o)
	return &nodeWatch{api: api, node: s.DRA.Node, labels: watch.NewValue[map[string]string](nil)}, err
}

// readFirst reads the labels once; a failure is tried again until the time is over.
func (n *nodeWatch) readFirst(ctx context.Context, atMost time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	for {
		node, err := n.api.NodeMetadata(ctx, n.node)
		if err == nil {
			n.set(node)
			return nil
		}
		if !watch.Sleep(ctx, nodeReadFirst) {
			return err
		}
	}
}

func (n *nodeWatch) set(node kubeapi.ObjectMeta) {
	labels := maps.Clone(node.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	if was := n.labels.Load(); was == nil || !maps.Equal(was, labels) {
		n.labels.Store(labels)
	}
}

// run follows the Node until ctx ends. While it can't be read, its labels are those that were read last, and a problem shows that.
func (n *nodeWatch) run(ctx context.Context) error {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = nodeReadFirst, nodeReadMost
	for ctx.Err() == nil {
		err := n.follow(ctx, retry)
		if err != nil && ctx.Err() == nil {
			text := fmt.Sprintf("the labels of Node %s can't be read, those that were read last apply: %v", n.node, err)
			n.problems.Put(problem.Problem{Code: problem.NodeUnread, Text: text}, slog.LevelWarn, text)
		}
		watch.Sleep(ctx, kubeapi.WaitAtLeast(err, retry.NextBackOff()))
	}
	return nil
}

// follow reads the Node and watches it until the API server ends the watch (nil) or something fails.
func (n *nodeWatch) follow(ctx context.Context, retry backoff.BackOff) error {
	node, err := n.api.NodeMetadata(ctx, n.node)
	if err != nil {
		return err
	}
	n.set(node)
	for e, err := range n.api.WatchNode(ctx, n.node, node.ResourceVersion) {
		switch {
		case errors.Is(err, kubeapi.ErrGone):
			return nil
		case err != nil:
			return err
		case e.Type == kubeapi.Opened:
			retry.Reset()
			n.problems.End(problem.NodeUnread, "", "the labels of the Node can be read again", "node", n.node)
		case e.Type == kubeapi.Deleted: // the kubelet registers it again, without labels that others have given it
			return nil
		case e.Type != kubeapi.Bookmark:
			n.set(e.Node)
		}
	}
	return nil
}
