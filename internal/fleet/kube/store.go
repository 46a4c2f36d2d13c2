package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// ledgerKey is the key of a ConfigMap's data that has the ledger.
const ledgerKey = "ledger"

// store has the ledger in a ConfigMap.
type store struct {
	c               *Cluster
	namespace, name string
}

// Store returns the store of a ledger in a ConfigMap.
func (c *Cluster) Store(namespace, name string) fleet.Store { return &store{c, namespace, name} }

func (s *store) String() string {
	return fmt.Sprintf("ConfigMap %s/%s in cluster %s", s.namespace, s.name, s.c.o.Name)
}

// Read returns the ledger, and the resourceVersion of its ConfigMap.
func (s *store) Read(ctx context.Context) (rescue.Ledger, fleet.Version, error) {
	m, err := s.get(ctx)
	if err != nil {
		return rescue.Ledger{}, "", err
	}
	l, err := parse(m.Data)
	if err != nil {
		return rescue.Ledger{}, fleet.Version(m.ResourceVersion), &fleet.DamagedError{Err: fmt.Errorf("%s: %w", s, err)}
	}
	return l, fleet.Version(m.ResourceVersion), nil
}

func (s *store) get(ctx context.Context) (*corev1.ConfigMap, error) {
	ctx, cancel := deadline(ctx)
	defer cancel()
	m, err := s.c.client.CoreV1().ConfigMaps(s.namespace).Get(ctx, s.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%s: %w", s, fleet.ErrNoLedger)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", s, err)
	}
	return m, nil
}

func parse(data map[string]string) (l rescue.Ledger, err error) {
	text, ok := data[ledgerKey]
	if !ok {
		return l, fmt.Errorf("it has no key %q", ledgerKey)
	}
	return rescue.ParseLedger([]byte(text))
}

// Write replaces the ledger that was read. Labels and annotations of others stay as they are.
func (s *store) Write(ctx context.Context, l rescue.Ledger, was fleet.Version) (fleet.Version, error) {
	text, err := l.Encode()
	if err != nil {
		return "", fmt.Errorf("write %s: %w", s, err)
	}
	m, err := s.get(ctx)
	if err != nil {
		return "", err
	}
	if m.ResourceVersion != string(was) {
		return "", fmt.Errorf("%s: %w", s, fleet.ErrConflict)
	}
	if m.Data == nil {
		m.Data = map[string]string{}
	}
	m.Data[ledgerKey] = text
	ctx, cancel := deadline(ctx)
	defer cancel()
	m, err = s.c.client.CoreV1().ConfigMaps(s.namespace).Update(ctx, m, metav1.UpdateOptions{})
	switch {
	case apierrors.IsConflict(err):
		return "", fmt.Errorf("%s: %w", s, fleet.ErrConflict)
	case apierrors.IsNotFound(err):
		return "", fmt.Errorf("%s: %w", s, fleet.ErrNoLedger)
	case err != nil:
		return "", fmt.Errorf("write %s: %w", s, err)
	}
	return fleet.Version(m.ResourceVersion), nil
}

// Create stores an empty ledger.
func (s *store) Create(ctx context.Context) error {
	text, err := rescue.NewLedger().Encode()
	if err != nil {
		return err
	}
	ctx, cancel := deadline(ctx)
	defer cancel()
	_, err = s.c.client.CoreV1().ConfigMaps(s.namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: s.name, Labels: map[string]string{"app.kubernetes.io/name": "gpu-fleet"}},
		Data:       map[string]string{ledgerKey: text},
	}, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%s: %w", s, fleet.ErrExists)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("create %s: the namespace is missing: %w", s, err)
	case err != nil:
		return fmt.Errorf("create %s: %w", s, err)
	}
	return nil
}
