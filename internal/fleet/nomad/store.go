package nomad

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// ledgerItem is the item of the variable that has the ledger, as JSON.
const ledgerItem = "ledger"

// store is a ledger in a variable. No lock is ever on it: a lock and check-and-set exclude each other.
type store struct {
	*Cluster
	namespace, path string
}

// Store returns the ledger in the variable PATH/ledger. Its token needs read and write on that path.
func (c *Cluster) Store(namespace, path string) fleet.Store {
	return &store{c, namespace, path + "/ledger"}
}

func (s *store) String() string {
	return fmt.Sprintf("variable %s in namespace %s of Nomad region %s", s.path, namespaceName(s.namespace), s.o.Name)
}

func namespaceName(namespace string) string {
	if namespace == "" {
		return api.DefaultNamespace
	}
	return namespace
}

// Read reads the ledger from the leader of the servers.
func (s *store) Read(ctx context.Context) (rescue.Ledger, fleet.Version, error) {
	q, err := s.in(ctx, s.namespace)
	if err != nil {
		return rescue.Ledger{}, "", err
	}
	v, _, err := s.client.Variables().Read(s.path, q)
	switch {
	case errors.Is(err, api.ErrVariablePathNotFound):
		return rescue.Ledger{}, "", fleet.ErrNoLedger
	case err != nil:
		return rescue.Ledger{}, "", s.failed("read", err)
	}
	l, err := parseLedger(v)
	if err != nil {
		return rescue.Ledger{}, "", &fleet.DamagedError{Err: err}
	}
	return l, versionOf(v), nil
}

func parseLedger(v *api.Variable) (l rescue.Ledger, err error) {
	text, ok := v.Items[ledgerItem]
	if !ok {
		return l, fmt.Errorf("variable %s has no item %q", v.Path, ledgerItem)
	}
	if l, err = rescue.ParseLedger([]byte(text)); err != nil {
		return l, fmt.Errorf("variable %s: %w", v.Path, err)
	}
	return l, nil
}

func versionOf(v *api.Variable) fleet.Version {
	return fleet.Version(strconv.FormatUint(v.ModifyIndex, 10))
}

// Write replaces the version of the ledger that was read.
func (s *store) Write(ctx context.Context, l rescue.Ledger, was fleet.Version) (fleet.Version, error) {
	index, err := strconv.ParseUint(string(was), 10, 64)
	if err != nil || index == 0 { // 0 would create it
		return "", fmt.Errorf("%q is no version of %s", was, s)
	}
	v, err := s.variable(l)
	if err != nil {
		return "", err
	}
	v.ModifyIndex = index
	q, err := s.write(ctx, s.namespace)
	if err != nil {
		return "", err
	}
	written, _, err := s.client.Variables().CheckedUpdate(v, q)
	if isConflict(err) {
		return "", fleet.ErrConflict
	}
	if err != nil {
		return "", s.failed("write", err)
	}
	return versionOf(written), nil
}

// Create stores an empty ledger, if there is none.
func (s *store) Create(ctx context.Context) error {
	v, err := s.variable(rescue.NewLedger())
	if err != nil {
		return err
	}
	q, err := s.write(ctx, s.namespace)
	if err != nil {
		return err
	}
	_, _, err = s.client.Variables().CheckedCreate(v, q)
	if isConflict(err) {
		return fleet.ErrExists
	}
	if err != nil {
		return s.failed("create", err)
	}
	return nil
}

func (s *store) variable(l rescue.Ledger) (*api.Variable, error) {
	text, err := l.Encode()
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", s, err)
	}
	return &api.Variable{Path: s.path, Items: api.VariableItems{ledgerItem: text}}, nil
}

func isConflict(err error) bool {
	var conflict api.ErrCASConflict
	return errors.As(err, &conflict)
}

func (s *store) failed(what string, err error) error {
	return fmt.Errorf("%s %s: %w", what, s, denied(err, "the token is not valid, or its policies do not permit it"))
}
