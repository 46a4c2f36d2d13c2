package config

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
)

// blanks are the spellings of a value that is not there.
var blanks = []string{"", " ~", " null", " Null", " # none"}

// nested is a file with one key: "flags.plugin.x" and " ~" are "flags:\n  plugin:\n    x: ~\n".
func nested(key, value string) string {
	var text strings.Builder
	names := strings.Split(key, ".")
	for i, name := range names {
		text.WriteString(strings.Repeat("  ", i) + name + ":")
		if i == len(names)-1 {
			text.WriteString(value)
		}
		text.WriteString("\n")
	}
	return text.String()
}

// sameInBoth checks that two files mean the same to k8s-gpu, and the same to nomad-gpu.
func sameInBoth(t *testing.T, text, other string) {
	t.Helper()
	forKubernetes := func(text string) Kubernetes {
		t.Helper()
		s, err := resolveAll(t, nil, nil, text)
		if err != nil {
			t.Errorf("k8s-gpu refuses %q: %v", text, err)
		}
		delete(s.values, "--"+FlagConfigFile) // each test file has a path of its own
		return s
	}
	forNomad := func(text string) File {
		t.Helper()
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := ReadFile(path, policy.Nomad)
		if err != nil {
			t.Errorf("nomad-gpu refuses %q: %v", text, err)
		}
		return r
	}
	k, want := forKubernetes(text), forKubernetes(other)
	if !k.Equal(want) || !maps.Equal(k.values, want.values) || !slices.Equal(k.Notes, want.Notes) {
		t.Errorf("to k8s-gpu %q is %v %q", text, k.Changes(want), k.Notes)
	}
	n, wanted := forNomad(text), forNomad(other)
	if diff := cmp.Diff(wanted.Normalized, n.Normalized); diff != "" || n.MIG != wanted.MIG || n.MPSRoot != wanted.MPSRoot {
		t.Errorf("to nomad-gpu %q is MIG %q, MPS root %q, %s", text, n.MIG, n.MPSRoot, diff)
	}
}

// A key without a value is the default to both agents, as to NVIDIA's plugin: whichever it is, and a whole section too.
func TestBlankKeysAreTheDefaultToBothAgents(t *testing.T) {
	keys := map[string]bool{"version": true, "resources": true, "sharing": true, "policy": true}
	for key := range fileKinds(func(s Spec) Kind { return s.Kind }) {
		for ; key != "" && !keys[key]; key = key[:max(strings.LastIndex(key, "."), 0)] {
			keys[key] = true
		}
	}
	for _, key := range []string{
		"sharing.timeSlicing", "sharing.timeSlicing.resources", "sharing.timeSlicing.renameByDefault", "sharing.timeSlicing.failRequestsGreaterThanOne",
		"sharing.mps", "sharing.mps.resources", "sharing.mps.renameByDefault", "sharing.mps.failRequestsGreaterThanOne",
		"resources.gpus", "resources.mig", "policy.include", "policy.exclude", "policy.rules",
	} {
		keys[key] = true
	}
	if len(keys) < 50 {
		t.Fatalf("only %d keys", len(keys))
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		for _, blank := range blanks {
			sameInBoth(t, nested(key, blank), "version: v1\n")
		}
	}
}

// Of NVIDIA's keys that both agents read, and of the version, an empty text is the default, as to NVIDIA's plugin.
func TestEmptyTextIsTheDefaultToBothAgents(t *testing.T) {
	for _, key := range []string{"version", "flags.migStrategy", "flags.mpsRoot", "flags.nvidiaDevRoot"} {
		sameInBoth(t, nested(key, ` ""`), "version: v1\n")
	}
}

// Within a rule and a shared resource, too, a key without a value is one that is not there.
func TestBlankKeysWithinLists(t *testing.T) {
	const file = `flags: {mpsRoot: /run/nvidia/mps}
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing: {timeSlicing: {resources: [{name: h100, replicas: 2%s}]}}
policy: {rules: [{select: {index: 0%s}, use: exclusive%s}, {select: {index: 1}, use: mps, replicas: 2%s}, {select: {index: 2}, use: time-slicing, replicas: 2%s}]}
`
	parts := []string{
		", rename: , devices: ", ", uuid: , pci: , model: ~, migProfile: , memory: ",
		", for: , replicas: , failRequestsGreaterThanOne: , memory: , threads: , migStrategy: , name: ",
		", for: , failRequestsGreaterThanOne: ~, memory: , threads: , migStrategy: , name: ",
		", for: , failRequestsGreaterThanOne: , memory: , threads: ~, migStrategy: , name: ",
	}
	text, plain := file, file
	for _, part := range parts {
		text, plain = strings.Replace(text, "%s", part, 1), strings.Replace(plain, "%s", "", 1)
	}
	sameInBoth(t, text, plain)
}
