package server

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// kind is one of the documents that are made from a view.
type kind string

const (
	whole kind = "all"
	brief kind = "brief"
)

func planOf(m rescue.Mode) kind { return kind("plan " + m.String()) }

// pages makes each document once for each view, whatever the number of clients.
type pages struct {
	view *watch.Value[fleet.View]

	mu   sync.Mutex
	of   <-chan struct{} // closed by the next view: names the one that the rest is of
	doc  *report.Document
	made map[kind]*body
}

// body is a document as it is sent. It is immutable.
type body struct {
	plain, zipped []byte
	tag           string
}

// latest returns the document of the latest view.
func (p *pages) latest() report.Document {
	p.mu.Lock()
	defer p.mu.Unlock()
	d, _ := p.document()
	return d
}

// document returns the latest view and its document. The caller holds mu.
func (p *pages) document() (report.Document, fleet.View) {
	v, next := p.view.LoadNext()
	if p.doc == nil || p.of != next {
		d := report.Of(v)
		p.of, p.doc, p.made = next, &d, map[kind]*body{}
	}
	return *p.doc, v
}

func (p *pages) get(k kind) (*body, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d, v := p.document()
	if b := p.made[k]; b != nil {
		return b, nil
	}
	var what any
	switch k {
	case whole:
		what = d
	case brief:
		what = d.Brief()
	case planOf(rescue.ModeAct):
		what = report.PlanOf(v, rescue.ModeAct, fleet.Plan(v, rescue.ModeAct))
	case planOf(rescue.ModeReport):
		what = report.PlanOf(v, rescue.ModeReport, fleet.Plan(v, rescue.ModeReport))
	}
	b, err := bodyOf(what)
	if err == nil {
		p.made[k] = b
	}
	return b, err
}

func bodyOf(what any) (*body, error) {
	text, err := json.Marshal(what)
	if err != nil {
		return nil, err
	}
	var zipped bytes.Buffer
	z, err := gzip.NewWriterLevel(&zipped, gzip.BestSpeed)
	if err != nil {
		return nil, err
	}
	_, _ = z.Write(text) // a bytes.Buffer does not fail
	_ = z.Close()
	sum := sha256.Sum256(text)
	return &body{text, zipped.Bytes(), `W/"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`}, nil
}

// serve sends a document, unless the client has it.
func (p *pages) serve(w http.ResponseWriter, r *http.Request, k kind) {
	b, err := p.get(k)
	if err != nil {
		writeText(w, http.StatusInternalServerError, err.Error())
		return
	}
	h := w.Header()
	h.Set("ETag", b.tag)
	h.Set("Cache-Control", "no-cache") // keep it, and ask each time whether it is the latest
	h.Set("Vary", "Accept-Encoding")
	if matches(r.Header.Get("If-None-Match"), b.tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	text := b.plain
	if httpserver.AcceptsGzip(r.Header.Get("Accept-Encoding")) {
		h.Set("Content-Encoding", "gzip")
		text = b.zipped
	}
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(text)))
	_, _ = w.Write(text) // a client that does not read is disconnected after writeTimeout
}

// matches reads the header If-None-Match (RFC 9110, 13.1.2).
func matches(header, tag string) bool {
	for one := range strings.SplitSeq(header, ",") {
		if one = strings.TrimSpace(one); one == "*" || strings.TrimPrefix(one, "W/") == strings.TrimPrefix(tag, "W/") {
			return true
		}
	}
	return false
}
