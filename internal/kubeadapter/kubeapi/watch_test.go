package kubeapi_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// watched is what one watch yielded: its events in a line, its error, and how long it was.
type watched struct {
	events string
	err    error
	took   time.Duration
}

// watchDuring watches from a version while during runs, until the watch ends, in a bubble.
func watchDuring(t *testing.T, version string, during func(*kubeapitest.Server)) (w watched) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := kubeapitest.NewInMemory()
		t.Cleanup(s.Close)
		c := client(t, kubeapi.Options{Address: s.URL, Dial: s.Dial})
		done := make(chan struct{})
		began := time.Now()
		go func() {
			defer close(done)
			for e, err := range c.WatchSlices(t.Context(), kubeapi.SliceSelector{Node: "n1"}, version) {
				if w.err = err; err == nil {
					w.events += string(e.Type) + " " + e.Slice.Metadata.Name + ","
				}
			}
			w.took = time.Since(began)
		}()
		synctest.Wait()
		during(s)
		<-done
	})
	return w
}

// A watch yields that it was opened, the events of what it selects and bookmarks, and ends after about five minutes without an error.
func TestWatch(t *testing.T) {
	w := watchDuring(t, "100", func(s *kubeapitest.Server) {
		far := slice("far")
		far.Spec.NodeName = "n2"
		s.PutSlice(slice("a"))
		s.PutSlice(far)
		s.PutSlice(slice("a", kubeapi.Device{Name: "gpu"}))
		s.DeleteSlice("a")
	})
	events, bookmarks, _ := strings.Cut(w.events, "BOOKMARK ")
	if events != " ,ADDED a,MODIFIED a,DELETED a," || strings.Count(bookmarks, "BOOKMARK") < 2 || w.err != nil {
		t.Errorf("%+v", w)
	}
	if w.took < 270*time.Second || w.took > 330*time.Second {
		t.Errorf("ended after %s", w.took)
	}
}

// Each way in which a watch fails is an error that has the remedy.
func TestWatchErrors(t *testing.T) {
	for name, c := range map[string]struct {
		version string
		during  func(*kubeapitest.Server)
		want    error
		text    string
	}{
		"version too old": {"1", func(s *kubeapitest.Server) { s.ExpireWatches() }, kubeapi.ErrGone, "too old resource version"},
		"cut":             {"100", func(s *kubeapitest.Server) { s.CutWatches() }, kubeapi.ErrUnavailable, "unexpected EOF"},
		"silent":          {"100", func(s *kubeapitest.Server) { s.SilenceWatches() }, kubeapi.ErrUnavailable, "the watch did not end within"},
	} {
		t.Run(name, func(t *testing.T) {
			w := watchDuring(t, c.version, c.during)
			if !errors.Is(w.err, c.want) || !strings.Contains(w.err.Error(), c.text) {
				t.Errorf("%v, want %v: %s", w.err, c.want, c.text)
			}
			if w.took > 361*time.Second {
				t.Errorf("ended after %s", w.took)
			}
		})
	}
}

// A request without an answer fails after 15 s, however long its caller waits.
func TestRequestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kubeapitest.NewInMemory()
		t.Cleanup(s.Close)
		s.Hang()
		c := client(t, kubeapi.Options{Address: s.URL, Dial: s.Dial})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		_, err := c.Node(ctx, "n1")
		if took := time.Since(began); took != 15*time.Second || !errors.Is(err, kubeapi.ErrUnavailable) || !strings.Contains(err.Error(), "no answer within 15s") {
			t.Errorf("%v after %s", err, took)
		}
	})
}
