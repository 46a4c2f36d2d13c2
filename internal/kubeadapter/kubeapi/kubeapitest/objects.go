package kubeapitest

import (
	"net/http"
	"slices"
	"strconv"

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
	var object body
	decode(encode(n), &object)
	decode(encode(s.putNode(n.Metadata.Name, object)), &n)
	return n
}

// PutRawNode stores a Node as JSON: with fields that kubeapi lacks.
func (s *Server) PutRawNode(name string, content []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var object body
	decode(content, &object)
	s.putNode(name, object)
}

// RawNode returns a stored Node as JSON.
func (s *Server) RawNode(name string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return encode(s.store.nodes[name])
}

// putNode stores a Node under a new resource version. The caller holds the lock.
func (s *Server) putNode(name string, object body) body {
	m := metadata(object)
	m["name"] = name
	kind := kubeapi.Added
	if old, ok := s.store.nodes[name]; ok {
		kind = kubeapi.Modified
		if text(m, "uid") == "" {
			m["uid"] = metadata(old)["uid"]
		}
	}
	if text(m, "uid") == "" {
		m["uid"] = s.store.uid()
	}
	s.store.version++
	m["resourceVersion"] = strconv.FormatInt(s.store.version, 10)
	s.store.nodes[name] = object
	s.store.log = append(s.store.log, change{s.store.version, "nodes", kind, object})
	s.notify()
	return object
}

// PutPod stores a pod.
func (s *Server) PutPod(pod kubeapi.ObjectMeta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store.pods[pod.Namespace+"/"+pod.Name] = pod
}

// NodeFeature returns a stored NodeFeature, and whether there is one.
func (s *Server) NodeFeature(namespace, name string) (kubeapi.NodeFeature, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.store.feature[namespace+"/"+name]
	return f, ok
}

// putFeature creates or updates a NodeFeature. The caller holds the lock.
func (s *Server) putFeature(req *Request, content []byte) answer {
	var f kubeapi.NodeFeature
	decode(content, &f)
	key := req.Namespace + "/" + req.Name
	old, exists := s.store.feature[key]
	switch {
	case req.Verb == "create" && exists:
		return answer{code: http.StatusConflict, reason: "AlreadyExists", message: key + " already exists"}
	case req.Verb == "update" && f.Metadata.ResourceVersion != old.Metadata.ResourceVersion:
		return answer{code: http.StatusConflict, reason: "Conflict", message: key + ": the object has been modified"}
	}
	s.store.version++
	f.Metadata.Namespace, f.Metadata.ResourceVersion = req.Namespace, strconv.FormatInt(s.store.version, 10)
	s.store.feature[key] = f
	return answer{code: http.StatusOK, object: f}
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
		uids[text(metadata(n), "uid")] = true
	}
	s.mu.Unlock()
	return s.deleteWhere(func(object body) bool {
		owners := typed(object).Metadata.OwnerReferences
		return len(owners) > 0 && !slices.ContainsFunc(owners, func(o kubeapi.OwnerReference) bool { return uids[o.UID] })
	})
}
