package kubeapitest

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// PutClaim stores a claim; a UID of "" becomes a new one.
func (s *Server) PutClaim(c kubeapi.ResourceClaim) kubeapi.ResourceClaim {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.Metadata.UID == "" {
		c.Metadata.UID = s.store.uid()
	}
	s.store.claims[c.Metadata.Namespace+"/"+c.Metadata.Name] = c
	return c
}

// PutNode stores a Node; a UID of "" becomes that of the Node of this name, or a new one.
func (s *Server) PutNode(n kubeapi.Node) kubeapi.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.store.nodes[n.Metadata.Name]; ok && n.Metadata.UID == "" {
		n.Metadata.UID = old.Metadata.UID
	}
	if n.Metadata.UID == "" {
		n.Metadata.UID = s.store.uid()
	}
	s.store.nodes[n.Metadata.Name] = n
	return n
}

// DeleteNode removes a Node. CollectGarbage then removes its slices.
func (s *Server) DeleteNode(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.store.nodes, name)
}

// CollectGarbage deletes slices whose owner does not exist, as the garbage collector does. It returns how many.
func (s *Server) CollectGarbage() int {
	s.mu.Lock()
	uids := map[string]bool{}
	for _, n := range s.store.nodes {
		uids[n.Metadata.UID] = true
	}
	s.mu.Unlock()
	return s.deleteWhere(func(object body) bool {
		owners := typed(object).Metadata.OwnerReferences
		return len(owners) > 0 && !slices.ContainsFunc(owners, func(o kubeapi.OwnerReference) bool { return uids[o.UID] })
	})
}
