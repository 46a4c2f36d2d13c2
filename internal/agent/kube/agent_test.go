package kube

import (
	"log/slog"
	"strings"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

func TestCompare(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*config.Kubernetes)
		want   agent.Change
	}{
		"nothing":                    {func(*config.Kubernetes) {}, agent.Unchanged},
		"MIG strategy":               {func(s *config.Kubernetes) { s.Core.MIG = inventory.MIGMixed }, agent.PolicyChanged},
		"what is proved":             {func(s *config.Kubernetes) { s.File.Prove.Command = []string{"/check"} }, agent.RunChanged},
		"what is reset":              {func(s *config.Kubernetes) { s.File.Reset.Mode = reset.Act }, agent.RunChanged},
		"kubelet socket":             {func(s *config.Kubernetes) { s.KubeletSocket = "other" }, agent.RunChanged},
		"another driver root":        {func(s *config.Kubernetes) { s.Core.Roots.Driver = "/run/nvidia/driver" }, agent.LibraryChanged},
		"another way to the library": {func(s *config.Kubernetes) { s.FallbackDriver = true }, agent.LibraryChanged},
		"other device nodes":         {func(s *config.Kubernetes) { s.Core.Roots.Dev = "/run/nvidia/driver" }, agent.RunChanged},
	} {
		was, is := config.Kubernetes{Core: core.DefaultConfig()}, config.Kubernetes{Core: core.DefaultConfig()}
		tc.change(&is)
		if got, _ := compare(was, is); got != tc.want {
			t.Errorf("%s: change %d, want %d", name, got, tc.want)
		}
	}
}

// The warnings of a configuration file are logged once for each text of the file.
func TestWarningsAreLoggedOncePerFile(t *testing.T) {
	var text strings.Builder
	log := slog.New(slog.NewTextHandler(&text, nil))
	r := New(Options{}).reloader()
	one, two := []string{"c.yaml:1: a", "c.yaml:2: b"}, []string{"c.yaml:9: c"}
	for _, step := range []struct {
		name    string
		s       config.Kubernetes
		a, b, c int // how often each was logged so far
	}{
		{"at the start", withFile("one", one), 1, 1, 0},
		{"the same file", withFile("one", one), 1, 1, 0},
		{"another text with the same meaning", withFile("# one", one), 2, 2, 0},
		{"another file", withFile("two", two), 2, 2, 1},
	} {
		r.Announce(step.s, log)
		count := func(of string) int { return strings.Count(text.String(), `warning="`+of) }
		if count("c.yaml:1: a") != step.a || count("c.yaml:2: b") != step.b || count("c.yaml:9: c") != step.c {
			t.Errorf("%s:\n%s", step.name, text.String())
		}
	}
}

// withFile are settings by a file with that text and those warnings.
func withFile(text string, warnings []string) (s config.Kubernetes) {
	s.File.Text, s.File.Warnings = text, warnings
	return s
}

// Package config links no Kubernetes API, so it has its own copies of these paths.
func TestDefaultSockets(t *testing.T) {
	want := map[string]string{"kubelet-socket": v1beta1.KubeletSocket, "pod-resources-socket": podresources.DefaultSocket}
	for _, s := range config.KubernetesSpecs() {
		if path, ok := want[s.Flag]; ok && s.Default != path {
			t.Errorf("--%s is %s by default, want %s", s.Flag, s.Default, path)
		}
	}
}
