package main

import (
	"errors"
	"fmt"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
	"github.com/tandem-gpu/tandem/internal/fleet/kube"
	"github.com/tandem-gpu/tandem/internal/fleet/nomad"
)

// team is what the configuration names: the clusters, the ledger and the election.
type team struct {
	clusters []fleet.Cluster
	store    fleet.Store
	leader   func() (fleet.Leader, error) // one that implements io.Closer is to be closed
}

// connect makes the team. It makes no request.
func (s settings) connect() (*team, error) {
	t := &team{}
	var problems []error
	if s.Ledger.Cluster == "" {
		t.inFile(s.Ledger.File, s.identity)
	}
	for _, c := range s.Clusters {
		if err := t.add(s, c); err != nil {
			problems = append(problems, fmt.Errorf("cluster %s: %w", c.Name, err))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, &configError{err}
	}
	return t, nil
}

// inFile has the ledger in a file.
func (t *team) inFile(path, identity string) {
	t.store = fleet.NewFileStore(path)
	t.leader = func() (fleet.Leader, error) {
		l, err := fleet.NewSingleLeader(path, identity)
		if err != nil {
			return nil, err // and no Leader that is a nil pointer
		}
		return l, nil
	}
}

// add adds a cluster, and the ledger if it has that.
func (t *team) add(s settings, c config.ClusterConfig) error {
	hasLedger := c.Name == s.Ledger.Cluster
	if c.Kind == fleet.Kubernetes {
		one, err := kube.New(kube.Options{Name: c.Name, Mode: c.Mode, Kubeconfig: c.Kubeconfig, Context: c.Context, Controllers: c.Controllers, Log: s.log})
		if err != nil {
			return err
		}
		t.clusters = append(t.clusters, one)
		if hasLedger {
			t.inCluster(one, s)
		}
		return nil
	}
	one, err := nomad.New(nomad.Options{
		Name: c.Name, Mode: c.Mode, Address: c.Address, Region: c.Region, TokenFile: c.TokenFile,
		CAFile: c.CAFile, CertFile: c.CertFile, KeyFile: c.KeyFile, Log: s.log,
	})
	if err != nil {
		return err
	}
	t.clusters = append(t.clusters, one)
	if hasLedger {
		t.inCluster(one, s)
	}
	return nil
}

// inCluster has the ledger and the election in a cluster.
func (t *team) inCluster(c interface {
	Store(namespace, name string) fleet.Store
	Leader(namespace, name, identity string) fleet.Leader
}, s settings) {
	l := s.Ledger
	t.store = c.Store(l.Namespace, l.Name)
	t.leader = func() (fleet.Leader, error) { return c.Leader(l.Namespace, l.Name, s.identity), nil }
}
