package server

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Limits of what a person sends, and of the time for it.
const (
	maxBody    = 4 << 10
	maxToken   = 4096 // bytes
	storeLimit = 15 * time.Second
)

// order is what a person sends: who they are, and why.
type order struct {
	By   string `json:"by"`
	Text string `json:"text"`
}

// refusal is why an order is not carried out.
type refusal struct {
	status int
	text   string
}

func (e *refusal) Error() string { return e.text }

func (s *Server) stop(w http.ResponseWriter, r *http.Request) {
	s.order(w, r, "stop", func(ctx context.Context, o order) error {
		if o.Text == "" {
			return &refusal{http.StatusBadRequest, "text is missing: say why acts are stopped, for those who see it"}
		}
		return s.Stop(ctx, o.By, o.Text)
	})
}

func (s *Server) resume(w http.ResponseWriter, r *http.Request) {
	s.order(w, r, "resume", func(ctx context.Context, o order) error { return s.Resume(ctx, o.By) })
}

// order does what a person asks for, if they have the token.
func (s *Server) order(w http.ResponseWriter, r *http.Request, what string, do func(context.Context, order) error) {
	o, err := s.accept(w, r)
	if err == nil {
		ctx, cancel := context.WithTimeout(r.Context(), storeLimit)
		defer cancel()
		err = do(ctx, o)
	}
	var refused *refusal
	if invalid, ok := errors.AsType[*setting.Error](err); ok {
		err = &refusal{http.StatusBadRequest, invalid.Error()}
	}
	switch {
	case errors.As(err, &refused):
		s.Log.Warn("request refused", "request", what, "client", r.RemoteAddr, "reason", refused.text)
		if refused.status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		writeText(w, refused.status, refused.text)
	case err != nil:
		s.Log.Error("request failed", "request", what, "by", o.By, "error", err)
		writeText(w, http.StatusServiceUnavailable, what+" failed: "+err.Error())
	default:
		s.Log.Info("request done", "request", what, "by", o.By, "text", o.Text, "client", r.RemoteAddr)
		writeText(w, http.StatusOK, what+": done")
	}
}

// accept returns what a person sends, if the request has the token.
func (s *Server) accept(w http.ResponseWriter, r *http.Request) (o order, err error) {
	if err := s.authorize(r); err != nil {
		return o, err
	}
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	decoder.DisallowUnknownFields()
	var large *http.MaxBytesError
	if err := decoder.Decode(&o); errors.As(err, &large) {
		return o, &refusal{http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is longer than %d bytes", maxBody)}
	} else if err != nil {
		return o, &refusal{http.StatusBadRequest, `the body is not JSON as {"by": "ada", "text": "driver rollout"}: ` + err.Error()}
	}
	o.By, o.Text = strings.TrimSpace(o.By), strings.TrimSpace(o.Text)
	switch o.By {
	case "":
		return o, &refusal{http.StatusBadRequest, "by is missing: say who you are"}
	case rescue.ByQuorum:
		return o, &refusal{http.StatusBadRequest, fmt.Sprintf("by = %q is the name of the automatic stop: use your own", o.By)}
	}
	return o, nil
}

// authorize returns why a request may not stop or resume acts.
func (s *Server) authorize(r *http.Request) error {
	if s.TokenFile == "" {
		return &refusal{http.StatusForbidden, "stop and resume over HTTP are off: set token_file to a file with a token, or run gpu-fleet stop --ledger or gpu-fleet resume --ledger"}
	}
	text, err := os.ReadFile(s.TokenFile)
	if err != nil {
		return &refusal{http.StatusForbidden, fmt.Sprintf("the token can't be read: %v (token_file)", err)}
	}
	token := strings.TrimSpace(string(text))
	if token == "" || len(token) > maxToken || !utf8.ValidString(token) {
		return &refusal{http.StatusForbidden, fmt.Sprintf("%s has no token of 1 to %d bytes (token_file)", s.TokenFile, maxToken)}
	}
	scheme, got, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	want, sent := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(strings.TrimSpace(got)))
	if !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(want[:], sent[:]) != 1 {
		return &refusal{http.StatusUnauthorized, "the token is missing or wrong: send it as the header Authorization: Bearer TOKEN"}
	}
	return nil
}
