package server

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // the parts of the page
	"encoding/base64"
	"html"
	"net/http"
	"strings"
)

//go:embed page.html
var pageHTML string

//go:embed page.css
var pageCSS string

//go:embed page.js
var pageJS string

// script is that of the page.
var script = "\"use strict\";\n" + pageJS

// policy allows the document its own style and script, and requests to its own server. Nothing else is loaded, so that names of
// pods and answers of servers can't make a browser do anything.
var policy = strings.Join([]string{
	"default-src 'none'", "script-src " + hashSource(script), "style-src " + hashSource(pageCSS), "connect-src 'self'", "img-src data:",
	"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
}, "; ")

// hashSource is a hash source of the Content Security Policy (CSP Level 3, 2.3.1).
func hashSource(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// page is the page for people. For browsers without scripts it has what gpu-fleet status prints.
func (s *Server) page(w http.ResponseWriter, _ *http.Request) {
	var text, page bytes.Buffer
	s.pages.latest().WriteText(&text)
	_, _ = strings.NewReplacer(
		"{{version}}", html.EscapeString(s.Version), "{{text}}", html.EscapeString(text.String()), "{{style}}", pageCSS, "{{script}}", script,
	).WriteString(&page, pageHTML) // a bytes.Buffer does not fail
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", policy)
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(page.Bytes()) // a client may disconnect
}
