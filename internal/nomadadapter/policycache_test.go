package nomadadapter

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// newPluginOf returns a plugin process of an agent, with its configuration.
func newPluginOf(t *testing.T, agent string, keys map[string]any) (*fixture, error) {
	t.Helper()
	s := newFixture(t)
	s.PersistPolicy(agent)
	return s, s.configure(keys)
}

// writeReplicas writes validPolicy with another number of replicas.
func writeReplicas(t *testing.T, path, n string) {
	t.Helper()
	write(t, path, strings.ReplaceAll(validPolicy, "replicas: 2", "replicas: "+n))
}

// cachedPolicy returns the file in the state directory; "" = there is none.
func cachedPolicy(dir string) string {
	text, _ := os.ReadFile(filepath.Join(dir, policyCacheName))
	return string(text)
}

// awaitCachedPolicy waits until the file in the state directory has a text.
func awaitCachedPolicy(t *testing.T, dir, text string) {
	t.Helper()
	await(t, text, func() bool { return strings.Contains(cachedPolicy(dir), text) })
}

// With an invalid policy file, another plugin process of the same agent starts with the saved policy. Any other process
// fails.
func TestPolicyIsSaved(t *testing.T) {
	dir, path := t.TempDir(), policyFile(t, validPolicy)
	block := map[string]any{"policy_file": path, "state_dir": dir}
	first, err := newPluginOf(t, "agent 1", block)
	if err != nil {
		t.Fatal(err)
	}
	if cachedPolicy(dir) != "" {
		t.Error("saved by a process that only validates the configuration")
	}
	first.currentRun()
	awaitCachedPolicy(t, dir, "replicas: 2")
	writeReplicas(t, path, "5")
	first.Reload(t.Context())
	awaitCachedPolicy(t, dir, "replicas: 5")
	write(t, path, invalidPolicy)
	first.Reload(t.Context())
	first.diskWork.Wait()

	for name, tc := range map[string]struct {
		agent string
		keys  map[string]any
		want  string // in the error
	}{
		"another agent":      {"agent 2", nil, "quartered"},
		"no agent":           {"", nil, "quartered"},
		"another file":       {"agent 1", map[string]any{"policy_file": policyFile(t, invalidPolicy)}, "quartered"},
		"no state directory": {"agent 1", map[string]any{"state_dir": ""}, "quartered"},
		"an invalid block":   {"agent 1", map[string]any{"group_by": "rack"}, `group_by = "rack"`},
	} {
		keys := maps.Clone(block)
		maps.Copy(keys, tc.keys)
		if _, err := newPluginOf(t, tc.agent, keys); err == nil || !errorContains(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}

	next, err := newPluginOf(t, "agent 1", block)
	if err != nil {
		t.Fatal(err)
	}
	next.currentRun()
	if got := next.Started()[0].Core.Policy.Rules; len(got) != 2 || got[1].Sharing.Replicas != 5 {
		t.Errorf("the next process has %+v", got)
	}
	if all := next.Log.String(); !strings.Contains(all, "policy.yaml:4") || !strings.Contains(all, "policy.yaml:5") {
		t.Errorf("logged:\n%s", all)
	}
	write(t, path, "version: v1\n") // repaired
	next.Reload(t.Context())
	next.currentRun()
	if got := next.Started(); len(got) != 2 || len(got[1].Core.Policy.Rules) != 0 {
		t.Errorf("the repaired file has no effect: %+v", got)
	}
	next.diskWork.Wait()
}

// The plugin works without a writable state directory.
func TestPolicyIsNotSaved(t *testing.T) {
	dir := filepath.Join(policyFile(t, ""), "state") // in a regular file
	s, err := newPluginOf(t, "agent 1", map[string]any{"policy_file": policyFile(t, validPolicy), "state_dir": dir})
	if err != nil {
		t.Fatal(err)
	}
	s.Source.Set(nodeInventory(coretest.GPUs(1)))
	s.currentRun()
	await(t, "a line of the log", func() bool { return strings.Contains(s.Log.String(), "policy not saved") })
	if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
		t.Error(err)
	}
}

// The policy is saved as it was read: an edit between SetConfig and the first run, which saves it, has no effect.
func TestPolicyIsSavedAsRead(t *testing.T) {
	for name, edited := range map[string]string{
		"invalid": invalidPolicy,
		"valid":   strings.ReplaceAll(validPolicy, "replicas: 2", "replicas: 7"),
		"longer":  validPolicy + strings.Repeat("# a comment\n", 1000),
	} {
		t.Run(name, func(t *testing.T) {
			dir, path := t.TempDir(), policyFile(t, validPolicy)
			block := map[string]any{"policy_file": path, "state_dir": dir}
			first, err := newPluginOf(t, "agent 1", block)
			if err != nil {
				t.Fatal(err)
			}
			write(t, path, edited)
			first.currentRun()
			first.diskWork.Wait()

			write(t, path, invalidPolicy)
			next, err := newPluginOf(t, "agent 1", block)
			if err != nil {
				t.Fatalf("the next process: %v", err)
			}
			next.currentRun()
			if got := next.Started()[0].Core.Policy.Rules; len(got) != 2 || got[1].Sharing.Replicas != 2 {
				t.Errorf("the next process has %+v", got)
			}
		})
	}
}

// The latest of several policies is saved, whatever the order of the writes.
func TestLatestPolicyIsSaved(t *testing.T) {
	for range 20 {
		dir, path := t.TempDir(), policyFile(t, validPolicy)
		s, err := newPluginOf(t, "agent 1", map[string]any{"policy_file": path, "state_dir": dir})
		if err != nil {
			t.Fatal(err)
		}
		s.currentRun()
		for _, n := range []string{"3", "4", "5", "6"} {
			writeReplicas(t, path, n)
			s.Reload(t.Context())
			s.currentRun()
		}
		s.diskWork.Wait()
		if saved := cachedPolicy(dir); !strings.Contains(saved, "replicas: 6") {
			t.Fatalf("saved:\n%s", saved)
		}
	}
}
