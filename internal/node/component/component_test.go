package component_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/node/component"
	"github.com/tandem-gpu/tandem/test/check"
)

type message struct {
	Text string `json:"text"`
}

func handler(served *int) http.HandlerFunc {
	refuse := func(m message) error {
		if m.Text == "refused" {
			return errors.New("it is refused")
		}
		return nil
	}
	return component.Handle(slog.New(slog.DiscardHandler), "only root may do this", refuse, func(_ context.Context, m message, w http.ResponseWriter) any {
		*served++
		w.Header().Set("X", "y")
		return message{m.Text + "!"}
	})
}

func TestOnlyRootIsServed(t *testing.T) {
	served := 0
	w := httptest.NewRecorder()
	handler(&served).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{}"))) // no credentials
	if w.Code != http.StatusForbidden || served != 0 {
		t.Errorf("status %d, served %d", w.Code, served)
	}
}

// What is no request, or one that is refused, is not served, and the client knows that.
func TestCall(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a component serves root only")
	}
	served, path := 0, coretest.ShortDir(t)+"/s"
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		component.Run(ctx, path, handler(&served), time.Second, slog.New(slog.DiscardHandler))
	}()
	defer func() { cancel(); <-ended }()
	var got message
	check.Until(t, "it listens", func() bool {
		header, err := component.Call(ctx, path, "/", message{"a"}, &got)
		return err == nil && header.Get("X") == "y" && got.Text == "a!"
	})
	if file, err := os.Stat(path); err != nil || file.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("mode %v, %v", file.Mode(), err)
	}
	for what, request := range map[string]any{"no object": "text", "too long": message{strings.Repeat("a", 8<<10)}, "refused": message{"refused"}} {
		served = 0
		if _, err := component.Call(ctx, path, "/", request, &got); served != 0 || !notServed(err) {
			t.Errorf("%s: %v, served %d", what, err, served)
		}
	}
	if _, err := component.Call(ctx, path+"/none", "/", message{}, &got); !notServed(err) || strings.Contains(err.Error(), "http:") {
		t.Errorf("no socket: %v", err)
	}
}

func notServed(err error) bool {
	_, ok := errors.AsType[*component.NotServedError](err)
	return ok
}
