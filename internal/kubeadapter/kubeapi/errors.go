package kubeapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// What an error of a request means; match with errors.Is.
var (
	ErrNotFound     = errors.New("not found")          // 404: the object, or the API if Unserved
	ErrExists       = errors.New("exists already")     // 409 of a create
	ErrConflict     = errors.New("was changed since")  // 409 of an update or delete
	ErrForbidden    = errors.New("forbidden")          // 403: a rule of RBAC or an admission policy
	ErrUnauthorized = errors.New("token refused")      // 401, also with the token read anew
	ErrInvalid      = errors.New("refused as invalid") // 400, 413, 422: the same request fails again, unless it is a webhook that failed
	ErrGone         = errors.New("resource version too old")
	ErrUnavailable  = errors.New("API server not available") // 408, 429, 5xx, and no answer: later it may work
	ErrUnreached    = errors.New("no connection")            // refused, no route, or cut before it was secured: the request cost the server nothing
)

// StatusError is an answer of the API server that is not a success.
type StatusError struct {
	Verb    string // as in rules of RBAC: "get"
	Object  string // "resourceslices node1-gpu.nvidia.com-0"
	Server  string // https://host:port
	Code    int    // of HTTP
	Reason  string // of metav1.Status: "AlreadyExists"; "" = the answer was none
	Message string // of metav1.Status, or the start of the answer

	RetryAfter time.Duration // 0 = not given
	api        string        // group and version that serves the object
	rule       string        // the rule of RBAC that allows the request
}

// RequestError is a request without an answer: the network, TLS, the token's file, a deadline. It may have been carried out.
type RequestError struct {
	Verb, Object, Server string
	Err                  error
}

// clientAddress is the client's side of a connection in an error of package net: "10.0.0.5:43210->" before the server's.
var clientAddress = regexp.MustCompile(`[^ ]+:[0-9]+->`)

// Error has verb, object, server and cause. It is the same text for the same cause: without the client's port, which is another one with
// each connection.
func (e *RequestError) Error() string {
	return fmt.Sprintf("%s %s at %s: %s", e.Verb, e.Object, e.Server, clientAddress.ReplaceAllString(e.Err.Error(), ""))
}

// Unwrap returns the cause.
func (e *RequestError) Unwrap() error { return e.Err }

// Is reports true for ErrUnavailable, and for ErrUnreached without a connection.
func (e *RequestError) Is(target error) bool {
	if target == ErrUnreached {
		var failed *connectError
		return errors.As(e.Err, &failed)
	}
	return target == ErrUnavailable
}

// connectError is why there is no connection.
type connectError struct{ error }

// Unwrap returns the cause.
func (e *connectError) Unwrap() error { return e.error }

// WaitAtLeast returns the wait before the next try: wait, or if the server asks for a longer one (Retry-After; at most a minute counts) that,
// and a random part of its half, because all clients may have got the same.
func WaitAtLeast(err error, wait time.Duration) time.Duration {
	status, ok := errors.AsType[*StatusError](err)
	if !ok || status.RetryAfter <= 0 {
		return wait
	}
	asked := min(status.RetryAfter, time.Minute)
	return max(wait, asked+rand.N(asked/2+1))
}

// newStatusError returns the error of an answer.
func newStatusError(server string, r call, answer *http.Response, content []byte) *StatusError {
	e := &StatusError{Verb: r.verb, Object: r.about(), Server: server, Code: answer.StatusCode, api: r.object.version(), rule: rule(r)}
	e.read(content)
	if seconds, err := strconv.Atoi(answer.Header.Get("Retry-After")); err == nil && seconds > 0 {
		e.RetryAfter = time.Duration(min(seconds, 600)) * time.Second
	}
	if location := answer.Header.Get("Location"); location != "" && e.Code >= 300 && e.Code < 400 {
		e.Message = "redirects to " + location
	}
	return e
}

// read takes reason and message from a metav1.Status, or else the text.
func (e *StatusError) read(content []byte) {
	var status struct {
		Kind, Reason, Message string
		Code                  int
	}
	if json.Unmarshal(content, &status) == nil && status.Kind == "Status" {
		e.Reason, e.Message = status.Reason, status.Message
		if e.Code == http.StatusOK && status.Code != 0 { // an event of a watch
			e.Code = status.Code
		}
		return
	}
	e.Message = strings.TrimSpace(string(content))
	if len(e.Message) > 512 {
		e.Message = strings.ToValidUTF8(e.Message[:512], "") + "..."
	}
}

// Error has verb, object, server, the server's message and the remedy.
func (e *StatusError) Error() string {
	text := fmt.Sprintf("%s %s at %s: %d %s", e.Verb, e.Object, e.Server, e.Code, http.StatusText(e.Code))
	if e.Message != "" {
		text += ": " + e.Message
	}
	if remedy := e.remedy(); remedy != "" {
		text += " (" + remedy + ")"
	}
	return text
}

// Unserved reports whether the server does not serve the API at all, other than an object that does not exist.
func (e *StatusError) Unserved() bool { return e.Code == http.StatusNotFound && e.Reason == "" }

// unservedRemedies are what follows the name of an API that is not served.
var unservedRemedies = map[string]string{
	apiVersion:                 ", which Kubernetes has since 1.34",
	featureGroup + "/v1alpha1": ": install Node Feature Discovery with its CustomResourceDefinitions",
}

func (e *StatusError) remedy() string {
	switch {
	case e.byPolicy():
		return "an admission policy refuses it; it expects a token that is bound to a pod of this node"
	case e.Code == http.StatusForbidden && e.rule != "":
		return "the agent's ClusterRole needs the rule " + e.rule
	case e.Code == http.StatusUnauthorized:
		return "the token is not valid at this server; it was read anew and refused again"
	case e.Unserved():
		return "the server does not serve " + e.api + unservedRemedies[e.api]
	case e.Code >= 300 && e.Code < 400:
		return "redirects are not followed; set the address of the API server itself"
	}
	return ""
}

// byPolicy reports whether an admission policy refused the request: with 422, or 403 if the policy asks for it.
func (e *StatusError) byPolicy() bool {
	return e.Code >= 400 && e.Code < 500 && strings.Contains(e.Message, "ValidatingAdmissionPolicy")
}

// Is reports whether the answer means target, which is one of this package's errors.
func (e *StatusError) Is(target error) bool { return target != nil && target == e.meaning() }

func (e *StatusError) meaning() error {
	switch {
	case e.byPolicy():
		return ErrForbidden
	case e.Code == http.StatusConflict && e.Reason == "AlreadyExists":
		return ErrExists
	case e.Reason == "Expired":
		return ErrGone
	case e.Code == http.StatusTooManyRequests, e.Code == http.StatusRequestTimeout, e.Code >= 500:
		return ErrUnavailable
	}
	return map[int]error{
		http.StatusNotFound: ErrNotFound, http.StatusConflict: ErrConflict, http.StatusForbidden: ErrForbidden,
		http.StatusUnauthorized: ErrUnauthorized, http.StatusGone: ErrGone, http.StatusBadRequest: ErrInvalid,
		http.StatusRequestEntityTooLarge: ErrInvalid, http.StatusUnprocessableEntity: ErrInvalid,
	}[e.Code]
}

// rule returns the rule of RBAC that allows a request, as in a ClusterRole.
func rule(r call) string {
	return fmt.Sprintf("{apiGroups: [%q], resources: [%q], verbs: [%q]}", r.object.group, r.resource(), r.verb)
}
