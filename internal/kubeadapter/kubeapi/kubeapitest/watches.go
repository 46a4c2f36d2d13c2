package kubeapitest

import (
	"net/http"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const bookmarkEvery = time.Minute

// watchMode is what all watches do. A watch ends when the number of cuts or ends is another one than at its start.
type watchMode struct {
	silent      bool
	cuts, ended int
	open        int
}

// CutWatches cuts the connections of all watches.
func (s *Server) CutWatches() { s.changeWatches(func(m *watchMode) { m.cuts++ }) }

// EndWatches ends all watches in order, as with the end of their time.
func (s *Server) EndWatches() { s.changeWatches(func(m *watchMode) { m.ended++ }) }

// SilenceWatches keeps all watches open without an event and without an end, until Resume: a connection that is dead without a sign.
func (s *Server) SilenceWatches() { s.changeWatches(func(m *watchMode) { m.silent = true }) }

// ExpireWatches makes all versions too old (410): open watches get the error, and new ones from before now.
func (s *Server) ExpireWatches() {
	s.changeWatches(func(m *watchMode) {
		s.store.version++
		s.store.oldest = s.store.version
	})
}

// OpenWatches is how many watches are open.
func (s *Server) OpenWatches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches.open
}

// Connections is how many connections clients have.
func (s *Server) Connections() int {
	s.conns.mu.Lock()
	defer s.conns.mu.Unlock()
	return len(s.conns.open)
}

func (s *Server) changeWatches(change func(*watchMode)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.watches)
	s.notify()
}

// watch sends the events of a resource after a version until its time is over.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, resource string) {
	query := r.URL.Query()
	from, _ := strconv.ParseInt(query.Get("resourceVersion"), 10, 64) // 0 = all
	seconds, _ := strconv.Atoi(query.Get("timeoutSeconds"))
	if seconds == 0 {
		seconds = 1800
	}
	end := time.NewTimer(time.Duration(seconds) * time.Second)
	defer end.Stop()
	bookmark := time.NewTicker(bookmarkEvery)
	defer bookmark.Stop()
	s.mu.Lock()
	s.watches.open++
	began := s.watches
	s.mu.Unlock()
	defer s.changeWatches(func(m *watchMode) { m.open-- })

	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	send := func(kind string, object any) {
		_, _ = w.Write(append(encode(body{"type": kind, "object": object}), '\n')) // the client may be gone
	}
	for {
		s.mu.Lock()
		mode, next, changed := s.watches, s.eventsAfter(from), s.changed
		version, oldest := s.store.version, s.store.oldest
		s.mu.Unlock()
		switch {
		case mode.silent:
			next = nil
		case mode.cuts != began.cuts:
			panic(http.ErrAbortHandler)
		case mode.ended != began.ended:
			return
		case from < oldest:
			send("ERROR", status(http.StatusGone, "Expired", "too old resource version"))
			return
		}
		for _, c := range next {
			if c.resource == resource && selected(c.object, query.Get("fieldSelector")) {
				send(string(c.kind), c.object)
			}
			from = c.version
		}
		_ = http.NewResponseController(w).Flush() // the client may be gone
		select {
		case <-changed:
		case <-bookmark.C:
			if !mode.silent {
				send(string(kubeapi.Bookmark), body{"kind": "ResourceSlice", "apiVersion": "resource.k8s.io/v1", "spec": body{},
					"metadata": body{"resourceVersion": strconv.FormatInt(version, 10)}})
				from = max(from, version)
			}
		case <-end.C:
			if !mode.silent {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

// eventsAfter returns the changes after a version. The caller holds the lock.
func (s *Server) eventsAfter(version int64) []change {
	for i, c := range s.store.log {
		if c.version > version {
			return s.store.log[i:]
		}
	}
	return nil
}
