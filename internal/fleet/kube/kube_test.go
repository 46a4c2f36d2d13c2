package kube

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

const kubeconfig = `apiVersion: v1
kind: Config
current-context: one
clusters: [{name: c, cluster: {server: "https://one.example"}}, {name: d, cluster: {server: "https://two.example"}}]
users: [{name: u, user: {token: x}}]
contexts: [{name: one, context: {cluster: c, user: u}}, {name: two, context: {cluster: d, user: u}}]
`

// The address is that of the context; what can't be used is an error that names what and where.
func TestOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for name, tc := range map[string]struct {
		o    Options
		host string
		err  string
	}{
		"current context":  {Options{Kubeconfig: file}, "https://one.example", ""},
		"another context":  {Options{Kubeconfig: file, Context: "two"}, "https://two.example", ""},
		"unknown context":  {Options{Kubeconfig: file, Context: "three"}, "", `context "three"`},
		"no file":          {Options{Kubeconfig: file + "x"}, "", "no such file"},
		"not in a cluster": {Options{}, "", "name a file in kubeconfig"},
	} {
		config, err := configOf(tc.o)
		if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) || err == nil && (config.Host != tc.host || config.QPS < 50) {
			t.Errorf("%s: %+v, %v", name, config, err)
		}
		if _, err := New(tc.o); (err == nil) != (tc.err == "") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// It is a cluster of Kubernetes, and marks no nodes.
func TestCluster(t *testing.T) {
	var c fleet.Cluster
	c, _ = fakeCluster()
	if c.Name() != "east" || c.Kind() != fleet.Kubernetes || c.Shown().Load().Marks {
		t.Errorf("%+v", c.Shown().Load())
	}
	if _, err := c.Mark(context.Background(), rescue.Mark{}); err == nil {
		t.Error("a node was marked")
	}
}

// Lines of client-go are in the log for debugging, with the name of the cluster.
func TestLibraryLog(t *testing.T) {
	for level, want := range map[slog.Level]string{slog.LevelDebug: "level=INFO msg=\"a watch\" cluster=east resource=pods\n", slog.LevelInfo: ""} {
		var log bytes.Buffer
		o := slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}
		c := newCluster(Options{Name: "east", Log: slog.New(slog.NewTextHandler(&log, &o))}, nil, nil)
		c.libraryLog().Info("a watch", "resource", "pods")
		if log.String() != want {
			t.Errorf("%v: %q", level, &log)
		}
	}
}
