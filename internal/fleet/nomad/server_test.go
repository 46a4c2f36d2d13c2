package nomad

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/check"
)

// server answers in place of Nomad's servers, without a network, so that time can pass at once.
type server struct {
	mu      sync.Mutex
	region  *region
	refuses map[string]int    // status of the answers to a path
	bodies  map[string]string // body of the answers to a path
	asked   map[string]int    // how often a path was asked
	calls   []string          // writes, with their bodies
	hidden  map[string]bool   // namespaces that the token may not read
	tokens  []string
	streams []*io.PipeWriter
	refused bool // no stream has an event: as without rights
}

func newServer(nodes, gpus int) *server {
	return &server{region: newRegion(nodes, gpus), refuses: map[string]int{}, bodies: map[string]string{}, asked: map[string]int{}}
}

func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	path := strings.TrimPrefix(r.URL.Path, "/v1")
	s.asked[path]++
	s.tokens = append(s.tokens, r.Header.Get("X-Nomad-Token"))
	if r.Method != http.MethodGet && r.Body != nil {
		text, _ := io.ReadAll(r.Body)
		s.calls = append(s.calls, path+" "+strings.TrimSpace(string(text)))
	}
	if s.hidden[r.URL.Query().Get("namespace")] {
		return &http.Response{StatusCode: http.StatusForbidden, Body: io.NopCloser(strings.NewReader("Permission denied"))}, nil
	}
	if path == "/event/stream" && s.refuses[path] == 0 {
		return s.stream(r.Context()), nil
	}
	w := httptest.NewRecorder()
	w.Header().Set("X-Nomad-Index", "700")
	if status := s.refuses[path]; status != 0 {
		if status < 0 {
			return nil, io.ErrUnexpectedEOF
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, s.bodies[path])
		return w.Result(), nil
	}
	s.answer(w, path)
	return w.Result(), nil
}

// stream answers with one that the test writes to. It ends with the request.
func (s *server) stream(ctx context.Context) *http.Response {
	out, in := io.Pipe()
	if s.refused {
		_ = in.Close()
	}
	s.streams = append(s.streams, in)
	context.AfterFunc(ctx, func() { _ = in.CloseWithError(ctx.Err()) })
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: out}
}

func (s *server) answer(w http.ResponseWriter, path string) {
	var body any
	switch {
	case s.bodies[path] != "":
		_, _ = io.WriteString(w, s.bodies[path])
		return
	case path == "/nodes":
		body = s.region.nodes
	case path == "/allocations":
		body = s.region.allocs
	case path == "/acl/token/self":
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, "ACL support disabled")
		return
	case path == "/operator/scheduler/configuration":
		body = api.SchedulerConfigurationResponse{SchedulerConfig: &api.SchedulerConfiguration{}}
	case strings.HasPrefix(path, "/node/"):
		body = s.region.details[strings.TrimPrefix(path, "/node/")]
	default:
		w.WriteHeader(http.StatusNotFound)
		return
	}
	_ = json.NewEncoder(w).Encode(body)
}

func (s *server) times(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[path]
}

func (s *server) refuse(path string, status int, body string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuses[path], s.bodies[path] = status, body
}

// send writes a line to the latest stream.
func (s *server) send(line string) {
	s.mu.Lock()
	in := s.streams[len(s.streams)-1]
	s.mu.Unlock()
	_, _ = io.WriteString(in, line+"\n")
}

func (s *server) cluster(t *testing.T) *Cluster {
	t.Helper()
	c, err := New(Options{Name: "dc1", Mode: rescue.ModeAct, Address: "http://nomad:4646"})
	check.NoError(t, err)
	c.client, err = api.NewClient(&api.Config{Address: "http://nomad:4646", HttpClient: &http.Client{Transport: s}})
	check.NoError(t, err)
	return c
}

// run runs a cluster in a bubble, until the test ends.
func (s *server) run(t *testing.T) *Cluster {
	t.Helper()
	c := s.cluster(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = c.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	synctest.Wait()
	return c
}

// A region is read at once, each 15 s, and soon after events that matter; nodes only when they have changed.
func TestLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(3, 2)
		c := s.run(t)
		if got := c.Shown().Load(); got.Problem != "" || len(got.Nodes) != 3 || !got.ReadAt.Equal(time.Now()) {
			t.Fatalf("%+v", got)
		}
		beats := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); {
				time.Sleep(10 * time.Second)
				s.send("{}")
			}
		}
		beats(time.Minute)
		time.Sleep(time.Second)
		synctest.Wait()
		if n, m, streams := s.times("/nodes"), s.times("/node/"+nodeID(0)), s.times("/event/stream"); n != 5 || m != 1 || streams != 1 {
			t.Errorf("in a minute: %d lists, %d reads of a node, %d streams", n, m, streams)
		}
		s.mu.Lock()
		s.region.fail(1, 0, xid95)
		s.region.nodes[1].ModifyIndex++
		s.mu.Unlock()
		for range 300 {
			s.send(`{"Index":701,"Events":[{"Topic":"Node","Type":"AllocationUpdated","Key":"x"},{"Topic":"Allocation","Key":"other","Payload":{"Allocation":{"JobID":"j","Namespace":"n"}}}]}`)
		}
		time.Sleep(2 * time.Second)
		if n := s.times("/nodes"); n != 5 {
			t.Errorf("events that do not matter: %d lists", n)
		}
		for range 300 {
			s.send(`{"Index":702,"Events":[{"Topic":"Node","Type":"NodeRegistration","Key":"x"}]}`)
		}
		time.Sleep(5 * time.Second)
		if n, faults := s.times("/nodes"), c.Shown().Load().Nodes[1].Faults; n > 8 || len(faults) != 1 {
			t.Errorf("%d lists after 300 events, faults %v", n, faults)
		}
	})
}

// A fault without an event on the stream is in the next list.
func TestFaultWithoutEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(1, 1)
		c := s.run(t)
		s.mu.Lock()
		s.region.fail(0, 0, xid95)
		s.mu.Unlock()
		time.Sleep(listPeriod)
		synctest.Wait()
		if len(c.Shown().Load().Nodes[0].Faults) != 1 {
			t.Error("the fault is not shown within the period of lists")
		}
	})
}

// A stream that is empty, or has no heartbeat for 30 s, is opened again, and the region listed.
func TestStreamEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(1, 1)
		s.run(t)
		time.Sleep(heartbeatLimit + streamPause + time.Millisecond)
		synctest.Wait()
		if n, lists := s.times("/event/stream"), s.times("/nodes"); n != 2 || lists < 4 {
			t.Errorf("no heartbeat: %d streams, %d lists", n, lists)
		}
		s.mu.Lock()
		s.refused = true
		s.mu.Unlock()
		s.send("not JSON")
		before := s.times("/nodes")
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		if n, lists := s.times("/event/stream"), s.times("/nodes")-before; n < 12 || n > 16 || lists < 10 || lists > 16 {
			t.Errorf("empty streams: %d in a minute, %d lists", n, lists)
		}
	})
}

// Servers that refuse or do not answer are a problem. What was shown stays, and gets old.
func TestUnread(t *testing.T) {
	for _, tc := range []struct {
		path   string
		status int
		body   string
		want   string
	}{
		{"/nodes", http.StatusForbidden, "Permission denied", "nodes can't be read"},
		{"/allocations", http.StatusForbidden, "Permission denied", "allocations can't be read"},
		{"/allocations", http.StatusInternalServerError, "No cluster leader", "No cluster leader"},
		{"/nodes", -1, "", "unexpected EOF"},
		{"/node/" + nodeID(0), http.StatusInternalServerError, "no path to region", "no path to region"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(1, 1)
			c := s.run(t)
			read := c.Shown().Load().ReadAt
			s.refuse(tc.path, tc.status, tc.body)
			s.mu.Lock()
			s.region.nodes[0].ModifyIndex++
			s.mu.Unlock()
			time.Sleep(3 * listPeriod)
			synctest.Wait()
			got := c.Shown().Load()
			if !strings.Contains(got.Problem, tc.want) || !got.ReadAt.Equal(read) || len(got.Nodes) != 1 || len(c.Problems()) != 1 {
				t.Errorf("%s: %q, read at %v, %d problems", tc.path, got.Problem, got.ReadAt, len(c.Problems()))
			}
			s.refuse(tc.path, 0, "")
			time.Sleep(listPeriod)
			synctest.Wait()
			if got := c.Shown().Load(); got.Problem != "" || len(c.Problems()) != 0 {
				t.Errorf("%s: still %q, %v", tc.path, got.Problem, c.Problems())
			}
		})
	}
}

// An act is one call, and its answer is what it means for the move.
func TestDo(t *testing.T) {
	act := rescue.Act{Work: []rescue.Target{{ID: "a1", Namespace: "team"}}}
	const path = "/allocation/a1/stop"
	for _, tc := range []struct {
		status int
		body   string
		want   rescue.AnswerKind
		right  bool // is reported as missing
	}{
		{0, `{"EvalID":"e"}`, rescue.Accepted, false},
		{http.StatusNotFound, "allocation not found", rescue.NotFound, false},
		{http.StatusForbidden, "Permission denied", rescue.Failed, true},
		{http.StatusInternalServerError, "Unknown allocation", rescue.Failed, true},
		{http.StatusInternalServerError, "No cluster leader", rescue.Failed, false},
		{http.StatusTooManyRequests, "slow down", rescue.Blocked, false},
		{-1, "", rescue.Failed, false},
	} {
		s := newServer(1, 1)
		s.refuse(path, tc.status, tc.body)
		c := s.cluster(t)
		answer := c.Do(t.Context(), act)
		if answer.Kind != tc.want || s.times(path) != 1 || (len(c.Problems()) > 0) != tc.right || (answer.Text == "") != (tc.want == rescue.Accepted) {
			t.Errorf("%d %s: %+v, %d calls, %v", tc.status, tc.body, answer, s.times(path), c.Problems())
		}
		s.refuse(path, 0, `{"EvalID":"e"}`)
		if c.Do(t.Context(), act); len(c.Problems()) != 0 {
			t.Errorf("the right is there: %v", c.Problems())
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if answer := c.Do(ctx, act); answer.Kind != rescue.NotMade || s.times(path) != 2 {
			t.Errorf("with a context that has ended: %+v, %d calls", answer, s.times(path))
		}
	}
}

// Many jobs are read in turns, and those of which work has to be replaced each time.
func TestManyJobs(t *testing.T) {
	s := newServer(50, 8)
	var work []string
	for i := range 2*jobsAtOnce + 50 {
		id := fmt.Sprintf("job-%03d", i)
		a := s.region.run(id, "service", i/8, i%8)
		s.bodies["/job/"+id], work = asJSON(t, job(a, 1)), append(work, id)
		s.bodies["/job/"+id+"/allocations"] = "[]"
	}
	s.region.allocs[7].DesiredStatus = "stop"
	s.bodies["/allocation/job-007"] = asJSON(t, full(s.region.allocs[7], nil))
	c := s.cluster(t)
	c.Follow(work)
	r := newReader(c)
	asked := func() (n int) {
		for _, id := range work {
			n += s.times("/job/" + id)
		}
		return n
	}
	for i, want := range []int{len(work), jobsAtOnce + 1, jobsAtOnce + 1, jobsAtOnce + 1} {
		before := asked()
		_, err := r.read(t.Context())
		check.NoError(t, err)
		if n := asked() - before; n != want {
			t.Errorf("list %d: %d jobs are read, want %d", i, n, want)
		}
	}
	for _, id := range work {
		if n := s.times("/job/" + id); n < 2 || id == "job-007" && n != 4 {
			t.Errorf("%s is read %d times", id, n)
		}
	}
	for id, f := range r.followed {
		if len(f.specs) == 0 {
			t.Errorf("what %s needs is not known", id)
		}
	}
}

// A read that fails goes on with the next one: nodes that have been read are not read again.
func TestReadGoesOn(t *testing.T) {
	s := newServer(100, 1)
	last := "/node/" + nodeID(99)
	s.refuse(last, http.StatusInternalServerError, "no path to region")
	r := newReader(s.cluster(t))
	if _, err := r.read(t.Context()); err == nil {
		t.Error("no error")
	}
	s.refuse(last, 0, "")
	if c, err := r.read(t.Context()); err != nil || len(c.Nodes) != 100 || s.times("/node/"+nodeID(0)) != 1 || s.times(last) != 2 {
		t.Errorf("%d nodes, %v; the first is read %d times, the last %d", len(c.Nodes), err, s.times("/node/"+nodeID(0)), s.times(last))
	}
}
