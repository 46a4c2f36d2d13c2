package kubeapitest

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	req, ok := parse(r)
	if !ok {
		http.Error(w, "404 page not found", http.StatusNotFound)
		return
	}
	content, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	req.Bytes = len(content)
	if req.Verb == "create" {
		var object body
		decode(content, &object)
		req.Name = text(metadata(object), "name")
	}
	s.mu.Lock()
	s.requests = append(s.requests, req)
	index, hung, delay := len(s.requests)-1, s.hung, s.delays[req.Verb]
	s.mu.Unlock()
	if delay > 0 {
		time.Sleep(delay)
	}
	if hung != nil {
		select {
		case <-hung:
		case <-r.Context().Done():
			return
		}
	}
	record := func(code int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if index < len(s.requests) { // else they were forgotten
			s.requests[index].Code = code
		}
	}
	a, refused := s.answer(&req, r, content)
	if req.Verb == "watch" && !refused {
		record(http.StatusOK)
		s.watch(w, r, req.Resource)
		return
	}
	record(a.code)
	a.write(w)
}

func parse(r *http.Request) (Request, bool) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	req := Request{At: time.Now(), DryRun: r.URL.Query().Get("dryRun") == "All"}
	req.Token = strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	switch {
	case len(parts) >= 4 && slices.Contains([]string{"apis/resource.k8s.io/v1", "apis/nfd.k8s-sigs.io/v1alpha1", "apis/events.k8s.io/v1"}, strings.Join(parts[:3], "/")):
		parts = parts[3:]
	case len(parts) >= 3 && strings.Join(parts[:2], "/") == "api/v1":
		parts = parts[2:]
	default:
		return req, false
	}
	if parts[0] == "namespaces" && len(parts) >= 3 {
		req.Namespace, parts = parts[1], parts[2:]
	}
	req.Resource = parts[0]
	if len(parts) > 1 {
		req.Name = parts[1]
	}
	if len(parts) > 2 {
		req.Resource += "/" + parts[2]
	}
	req.Verb = map[string]string{http.MethodGet: "get", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
	if req.Verb == "get" && req.Name == "" {
		req.Verb = "list"
		if r.URL.Query().Get("watch") == "1" {
			req.Verb = "watch"
		}
	}
	return req, slices.Contains([]string{sliceResource, "resourceclaims", "nodes", "nodes/status", "pods", "nodefeatures", "events"}, req.Resource)
}

// refuse returns the answer to a request that is not carried out, and whether one that is has its answer lost. A cut connection does not
// return. The caller holds the lock.
func (s *Server) refuse(r *Request) (a answer, refused, lost bool) {
	switch f, ok := s.takeFailure(r); {
	case ok && f.Applied:
		lost = true
	case ok && f.Code == 0:
		panic(http.ErrAbortHandler)
	case ok:
		return answer{code: f.Code, reason: f.Reason, message: f.Message, retryAfter: f.RetryAfter}, true, false
	}
	a, refused = s.unauthorized(r)
	return a, refused, lost
}

func (s *Server) unauthorized(r *Request) (answer, bool) {
	if s.tokens != nil && !slices.Contains(s.tokens, r.Token) {
		return answer{code: http.StatusUnauthorized, reason: "Unauthorized", message: "Unauthorized"}, true
	}
	if s.denied[rule{r.Verb, r.Resource}] {
		group := map[string]string{sliceResource: "resource.k8s.io", "resourceclaims": "resource.k8s.io", "nodefeatures": "nfd.k8s-sigs.io", "events": "events.k8s.io"}[r.Resource]
		return answer{code: http.StatusForbidden, reason: "Forbidden", message: fmt.Sprintf(
			"%s.%s is forbidden: User %q cannot %s resource %q in API group %q at the cluster scope",
			r.Resource, group, "system:serviceaccount:tandem:tandem", r.Verb, r.Resource, group)}, true
	}
	return answer{}, false
}

// answer answers a request; of a watch, it returns only whether that is refused.
func (s *Server) answer(req *Request, r *http.Request, content []byte) (a answer, refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, refused, lost := s.refuse(req)
	if !refused && req.Verb != "watch" {
		a = s.carryOut(req, r, content)
		s.notify()
	}
	if lost && req.Verb != "watch" {
		panic(http.ErrAbortHandler)
	}
	return a, refused
}

// carryOut changes or reads the store. The caller holds the lock.
func (s *Server) carryOut(req *Request, r *http.Request, content []byte) answer {
	missing := answer{code: http.StatusNotFound, reason: "NotFound", message: fmt.Sprintf("%s %q not found", req.Resource, req.Name)}
	switch req.Resource {
	case "nodes":
		if n, ok := s.store.nodes[req.Name]; ok {
			return answer{code: http.StatusOK, object: n}
		}
		return missing
	case "nodes/status":
		if n, ok := s.store.nodes[req.Name]; ok {
			return s.patchNode(req, n, r.Header.Get("Content-Type"), content)
		}
		return missing
	case "events":
		return s.createEvent(req, content)
	case "pods":
		if p, ok := s.store.pods[req.Namespace+"/"+req.Name]; ok {
			return answer{code: http.StatusOK, object: body{"metadata": p}}
		}
		return missing
	case "nodefeatures":
		f, ok := s.store.feature[req.Namespace+"/"+req.Name]
		switch {
		case req.Verb == "create", req.Verb == "update" && ok:
			return s.putFeature(req, content)
		case ok:
			return answer{code: http.StatusOK, object: f}
		}
		return missing
	case "resourceclaims":
		if c, ok := s.store.claims[req.Namespace+"/"+req.Name]; ok {
			return answer{code: http.StatusOK, object: c}
		}
		return missing
	}
	old, exists := s.store.slices[req.Name]
	switch {
	case req.Verb == "list":
		return s.list(r)
	case req.Verb == "create":
		return s.create(req, content)
	case !exists:
		return missing
	case req.Verb == "update":
		return s.update(req, old, content)
	case req.Verb == "delete":
		return s.remove(req, old, content)
	}
	return answer{code: http.StatusOK, object: old}
}

func (s *Server) list(r *http.Request) answer {
	items := []body{}
	for _, name := range s.store.names() {
		if o := s.store.slices[name]; selected(o, r.URL.Query().Get("fieldSelector")) {
			items = append(items, o)
		}
	}
	return answer{code: http.StatusOK, object: body{
		"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "items": items,
		"metadata": body{"resourceVersion": strconv.FormatInt(s.store.version, 10)},
	}}
}

// selected matches spec.nodeName, spec.driver, spec.pool.name and metadata.name.
func selected(object body, selector string) bool {
	for _, term := range strings.FieldsFunc(selector, func(r rune) bool { return r == ',' }) {
		key, want, _ := strings.Cut(term, "=")
		pool, _ := spec(object)["pool"].(body) // a nil map can be read
		got, known := map[string]string{
			"spec.nodeName": text(spec(object), "nodeName"), "spec.driver": text(spec(object), "driver"),
			"spec.pool.name": text(pool, "name"), "metadata.name": text(metadata(object), "name"),
		}[key]
		if !known || got != want {
			return false
		}
	}
	return true
}

func (s *Server) create(req *Request, content []byte) answer {
	var object body
	decode(content, &object)
	if a, ok := s.refuseSlice(req.Name, object, nil); ok {
		return a
	}
	if _, exists := s.store.slices[req.Name]; exists {
		return answer{code: http.StatusConflict, reason: "AlreadyExists", message: fmt.Sprintf("resourceslices.resource.k8s.io %q already exists", req.Name)}
	}
	m := metadata(object)
	m["uid"], m["generation"], m["creationTimestamp"] = s.store.uid(), 1, time.Now().UTC().Format(time.RFC3339)
	if req.DryRun {
		return answer{code: http.StatusCreated, object: object}
	}
	return answer{code: http.StatusCreated, object: s.store.put(req.Name, object, kubeapi.Added)}
}

func (s *Server) update(req *Request, old body, content []byte) answer {
	var object body
	decode(content, &object)
	m, before := metadata(object), metadata(old)
	if v := text(m, "resourceVersion"); v != "" && v != text(before, "resourceVersion") {
		return answer{code: http.StatusConflict, reason: "Conflict", message: fmt.Sprintf(
			"Operation cannot be fulfilled on resourceslices.resource.k8s.io %q: the object has been modified; please apply your changes to the latest version and try again", req.Name)}
	}
	m["uid"], m["generation"], m["creationTimestamp"], m["resourceVersion"] = before["uid"], before["generation"], before["creationTimestamp"], before["resourceVersion"]
	if a, ok := s.refuseSlice(req.Name, object, old); ok {
		return a
	}
	o, was := typed(object).Spec, typed(old).Spec
	if o.Driver != was.Driver || o.NodeName != was.NodeName || o.Pool.Name != was.Pool.Name {
		return invalid(req.Name, "spec: field is immutable")
	}
	if req.DryRun {
		return answer{code: http.StatusOK, object: object}
	}
	return answer{code: http.StatusOK, object: s.store.put(req.Name, object, kubeapi.Modified)}
}

func (s *Server) remove(req *Request, old body, content []byte) answer {
	var options struct{ Preconditions struct{ UID string } }
	if len(content) > 0 {
		decode(content, &options)
	}
	if uid := options.Preconditions.UID; uid != "" && uid != text(metadata(old), "uid") {
		return answer{code: http.StatusConflict, reason: "Conflict", message: fmt.Sprintf(
			"Operation cannot be fulfilled on resourceslices.resource.k8s.io %q: the UID in the precondition (%s) does not match", req.Name, uid)}
	}
	return answer{code: http.StatusOK, object: s.store.remove(req.Name)}
}

func invalid(name, message string) answer {
	return answer{code: http.StatusUnprocessableEntity, reason: "Invalid", message: fmt.Sprintf("ResourceSlice.resource.k8s.io %q is invalid: %s", name, message)}
}

// refuseSlice prepares a slice, and returns the answer if it is not valid: by the number of devices, or by Admit or Validate.
func (s *Server) refuseSlice(name string, object, old body) (answer, bool) {
	if err := s.prepare(object, old); err != nil {
		return invalid(name, err.Error()), true
	}
	slice := typed(object)
	limit := 128
	if slices.ContainsFunc(slice.Spec.Devices, func(d kubeapi.Device) bool { return len(d.Taints) > 0 }) {
		limit = 64
	}
	if n := len(slice.Spec.Devices); n > limit {
		return invalid(name, fmt.Sprintf("spec.devices: Too many: %d: must have at most %d items", n, limit)), true
	}
	if s.validate != nil {
		if err := s.validate(slice); err != nil {
			return invalid(name, err.Error()), true
		}
	}
	return answer{}, false
}
