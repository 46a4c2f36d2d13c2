package publisher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const nodeFresh = time.Second // the UID of the Node holds for the creates of this time

// node is what is known of the Node, to which the slices belong: a Node that is deleted takes them with it, and one of the same name that is
// created later has another UID.
type node struct {
	uid       string // "" = not known
	read      time.Time
	err       error     // of the latest try; nil = it worked
	notBefore time.Time // of another try
	retry     retries
}

// Node is the Node as it was read last: before the first slice is published, with each creation of slices, and every five minutes. It has
// no name before the first time.
func (p *Publisher) Node() *watch.Value[kubeapi.Node] { return p.latestNode }

// RefreshNode reads the Node now, for those who follow Node.
func (p *Publisher) RefreshNode(ctx context.Context) error {
	node, err := p.opts.API.Node(ctx, p.opts.Node)
	if err == nil {
		p.latestNode.Store(node)
	}
	return err
}

// refreshNode reads the Node if that is long ago, or failed and may be tried again. While it can't be read, the owner of slices is that of those
// which exist.
func (p *Publisher) refreshNode(ctx context.Context) error {
	switch now := time.Now(); {
	case p.node.err == nil && p.node.uid != "" && p.node.read.Add(resync).After(now):
		return nil
	case p.node.err != nil && now.Before(p.node.notBefore):
		return p.node.err
	}
	err := p.readNode(ctx)
	if err != nil && !errors.Is(err, kubeapi.ErrNotFound) && p.node.uid == "" {
		p.node.uid = p.cache.owner(p.names.own, p.opts.Node)
	}
	return err
}

// readNode reads the Node.
func (p *Publisher) readNode(ctx context.Context) error {
	n, err := answer(ctx, p, func() (kubeapi.Node, error) { return p.opts.API.Node(ctx, p.opts.Node) })
	if err == nil {
		p.node.uid, p.node.read, p.node.err = n.Metadata.UID, time.Now(), nil
		p.node.retry.reset()
		p.latestNode.Store(n)
		return nil
	}
	p.node.notBefore = time.Now().Add(p.node.retry.next(err))
	if errors.Is(err, kubeapi.ErrNotFound) {
		p.node.uid = ""
		err = fmt.Errorf("the Node does not exist (so far), and slices belong to it; is %q the name of this node's object? %w", p.opts.Node, err)
	}
	p.node.err = partialError{err, p.node.notBefore} // slices that exist can be written
	return p.node.err
}

// readOwner reads the Node for the owner of what a plan creates. Without it only the rest of the plan can be done, and later is why. The plan
// has no writes if there has to be another one.
func (p *Publisher) readOwner(ctx context.Context, todo plan) (_ plan, later, _ error) {
	creates := func(w write) bool { return w.verb == create }
	if time.Since(p.node.read) <= nodeFresh || !slices.ContainsFunc(todo.writes, creates) {
		return todo, nil, nil
	}
	owner, err := p.node.uid, p.node.err
	if err == nil || !time.Now().Before(p.node.notBefore) {
		err = p.readNode(ctx)
	}
	switch {
	case err == nil && p.node.uid == owner:
		return todo, nil, nil
	case err == nil:
		return plan{}, nil, nil
	case todo.rewrite || p.node.uid == "":
		return plan{}, nil, err
	}
	todo.writes = slices.DeleteFunc(todo.writes, creates)
	return todo, err, nil
}
