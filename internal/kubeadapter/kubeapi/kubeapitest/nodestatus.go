package kubeapitest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// nodeGuard is an admission policy that allows a patch of nodes/status to change conditions of some types, and one annotation.
type nodeGuard struct {
	annotation string
	types      []string
}

// GuardNodes denies patches of nodes/status that change anything but conditions of these types and one annotation, as the policy of deploy/hand-over.
func (s *Server) GuardNodes(annotation string, types ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guard = &nodeGuard{annotation, types}
}

// UnguardNodes ends GuardNodes.
func (s *Server) UnguardNodes() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guard = nil
}

// patchNode makes a strategic merge patch of a Node, as far as agents need one. The caller holds the lock.
func (s *Server) patchNode(req *Request, old body, contentType string, content []byte) answer {
	if req.Verb != "patch" || contentType != "application/strategic-merge-patch+json" {
		return answer{code: http.StatusUnsupportedMediaType, reason: "UnsupportedMediaType", message: contentType}
	}
	var patch body
	decode(content, &patch)
	next := copyOf(old)
	mergeNode(next, patch)
	if err := s.guard.check(old, next); err != nil {
		return answer{code: http.StatusUnprocessableEntity, reason: "Invalid", message: fmt.Sprintf(
			"nodes %q is forbidden: ValidatingAdmissionPolicy 'hand-over' with binding 'hand-over' denied request: %v", req.Name, err)}
	}
	switch {
	case req.DryRun:
		return answer{code: http.StatusOK, object: next}
	case reflect.DeepEqual(next, old):
		return answer{code: http.StatusOK, object: old}
	}
	return answer{code: http.StatusOK, object: s.putNode(req.Name, next)}
}

// mergeNode merges a patch into an object: maps key by key, conditions by their type.
func mergeNode(object, patch body) {
	for key, value := range patch {
		was, isMap := object[key].(body)
		inner, mapPatch := value.(body)
		switch {
		case value == nil:
			delete(object, key)
		case key == "conditions":
			list, _ := object[key].([]any) // there may be none
			object[key] = mergeConditions(list, value.([]any))
		case mapPatch && isMap:
			mergeNode(was, inner)
		case mapPatch:
			empty := body{}
			mergeNode(empty, inner)
			object[key] = empty
		default:
			object[key] = value
		}
	}
}

func mergeConditions(list, patches []any) []any {
	for _, p := range patches {
		patch := maps.Clone(p.(body))
		i := slices.IndexFunc(list, func(c any) bool { return text(c.(body), "type") == text(patch, "type") })
		remove := text(patch, "$patch") == kubeapi.DeleteCondition
		switch {
		case remove && i >= 0:
			list = slices.Delete(list, i, i+1)
		case remove:
		case i < 0:
			list = append(list, patch)
		default:
			maps.Copy(list[i].(body), patch)
		}
	}
	return list
}

// check returns what a change does that the policy does not allow.
func (g *nodeGuard) check(old, next body) error {
	if g == nil {
		return nil
	}
	stripped := func(object body) body {
		object = copyOf(object)
		if annotations, ok := metadata(object)["annotations"].(body); ok {
			if delete(annotations, g.annotation); len(annotations) == 0 {
				delete(metadata(object), "annotations")
			}
		}
		if status, ok := object["status"].(body); ok {
			list, _ := status["conditions"].([]any) // there may be none
			list = slices.DeleteFunc(list, func(c any) bool { return slices.Contains(g.types, text(c.(body), "type")) })
			if status["conditions"] = list; len(list) == 0 {
				delete(status, "conditions")
			}
			if len(status) == 0 {
				delete(object, "status")
			}
		}
		return object
	}
	if !reflect.DeepEqual(stripped(old), stripped(next)) {
		return fmt.Errorf("the agent changes its own conditions only: %s", strings.Join(g.types, ", "))
	}
	return nil
}

// createEvent stores an event. The caller holds the lock.
func (s *Server) createEvent(req *Request, content []byte) answer {
	var object body
	decode(content, &object)
	key := req.Namespace + "/" + req.Name
	if _, exists := s.store.events[key]; exists {
		return answer{code: http.StatusConflict, reason: "AlreadyExists", message: fmt.Sprintf("events.events.k8s.io %q already exists", req.Name)}
	}
	if err := validEvent(req, object); err != nil {
		return answer{code: http.StatusUnprocessableEntity, reason: "Invalid", message: fmt.Sprintf("Event.events.k8s.io %q is invalid: %v", req.Name, err)}
	}
	s.store.events[key] = object
	return answer{code: http.StatusCreated, object: object}
}

// validEvent checks what Kubernetes' validation of an event requires (pkg/apis/core/validation/events.go).
func validEvent(req *Request, object body) error {
	for key, most := range map[string]int{"eventTime": 128, "reportingController": 128, "reportingInstance": 128, "action": 128, "reason": 128} {
		if v := text(object, key); v == "" || len(v) > most {
			return fmt.Errorf("%s: %q", key, v)
		}
	}
	if v := text(object, "type"); v != "Normal" && v != "Warning" {
		return fmt.Errorf("type: %q", v)
	}
	if v := text(object, "note"); len(v) > kubeapi.MaxEventNote {
		return fmt.Errorf("note: %d bytes", len(v))
	}
	if regarding, ok := object["regarding"].(body); !ok || text(regarding, "namespace") != req.Namespace {
		return fmt.Errorf("regarding: %v", object["regarding"])
	}
	return nil
}

// Events are the stored events, by namespace and name.
func (s *Server) Events() (all []kubeapi.PodEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(s.store.events)) {
		var e kubeapi.PodEvent
		if json.Unmarshal(encode(s.store.events[key]), &e) == nil {
			all = append(all, e)
		}
	}
	return all
}
