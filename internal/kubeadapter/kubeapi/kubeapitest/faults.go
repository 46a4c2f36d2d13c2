package kubeapitest

import (
	"net/http"
	"slices"
	"strconv"
	"time"
)

// Failure is what happens to a request instead of a success.
type Failure struct {
	Code            int // of HTTP; 0 = the connection is cut
	Reason, Message string
	RetryAfter      int  // seconds; 0 = not given
	Applied         bool // the request is carried out before: its answer is lost
	DryRuns         bool // dry runs fail, too, and count
}

type failure struct {
	Failure
	verb   string
	left   int  // requests; negative = all
	dryRun bool // of dry runs only
}

// Fail lets the next n requests of a verb fail, or all until Resume if n is negative; verb "" = any. Verbs are those of RBAC: "get",
// "list", "watch", "create", "update", "delete". Dry runs do not count, unless the failure has them.
func (s *Server) Fail(verb string, n int, f Failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = append(s.failures, &failure{Failure: f, verb: verb, left: n})
}

// FailDryRuns lets all dry runs fail until Resume, as with a webhook that can't be asked without a real write.
func (s *Server) FailDryRuns(f Failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.DryRuns = true
	s.failures = append(s.failures, &failure{Failure: f, left: -1, dryRun: true})
}

// takeFailure returns the failure of a request. The caller holds the lock.
func (s *Server) takeFailure(r *Request) (Failure, bool) {
	for _, f := range s.failures {
		if r.DryRun && !f.DryRuns || f.dryRun && !r.DryRun {
			continue
		}
		if f.left != 0 && (f.verb == "" || f.verb == r.Verb) {
			f.left--
			return f.Failure, true
		}
	}
	return Failure{}, false
}

// Delay makes each request of a verb take a time, several at once; 0 = none.
func (s *Server) Delay(verb string, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delays[verb] = d
}

// Deny takes a verb on a resource from all callers, as a ClusterRole without it; Allow gives it back.
func (s *Server) Deny(verb, resource string) { s.setDenied(verb, resource, true) }

// Allow ends Deny.
func (s *Server) Allow(verb, resource string) { s.setDenied(verb, resource, false) }

func (s *Server) setDenied(verb, resource string, denied bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.denied[rule{verb, resource}] = denied
}

// AcceptTokens sets the tokens that are valid; all others get 401.
func (s *Server) AcceptTokens(tokens ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tokens = slices.Clone(tokens)
}

// DropFields sets which fields the server drops, as with the gates DRADeviceTaints and DRAConsumableCapacity off.
func (s *Server) DropFields(taints, shares bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropTaints, s.dropShares = taints, shares
}

// Validate sets a check of each slice that is written; an error is answered with 422. nil = none.
func (s *Server) Validate(check func(Slice) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.validate = check
}

// Admit sets what drops, defaults and checks slices in the place of DropFields: JSON of a slice and of the stored one, which is nil for a
// create. An error is answered with 422.
func (s *Server) Admit(admit func(slice, old []byte) ([]byte, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.admit = admit
}

// answer is a status, or an object with 200 or 201.
type answer struct {
	code       int
	reason     string
	message    string
	retryAfter int
	object     any
}

func (a answer) write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	if a.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(a.retryAfter))
	}
	w.WriteHeader(a.code)
	object := a.object
	if object == nil {
		object = status(a.code, a.reason, a.message)
	}
	_, _ = w.Write(encode(object)) // the client may be gone
}

func status(code int, reason, message string) body {
	return body{
		"kind": "Status", "apiVersion": "v1", "metadata": body{}, "status": "Failure",
		"message": message, "reason": reason, "code": code,
	}
}
