package nomadadapter

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/check"
)

// newPolicyFixture returns a plugin with a policy file.
func newPolicyFixture(t *testing.T, text string) (s *fixture, path string) {
	t.Helper()
	s, path = newFixture(t, nil), policyFile(t, text)
	s.mustConfigure(t, map[string]any{"policy_file": path})
	return s, path
}

// A changed policy is applied to the running source; an unchanged or invalid one is not, and each error is logged.
func TestReload(t *testing.T) {
	s, path := newPolicyFixture(t, "version: v1\n")
	s.currentRun()
	s.Reload(t.Context()) // nothing changed
	write(t, path, invalidPolicy)
	s.Reload(t.Context())
	if n := len(s.Source.applied); n != 0 {
		t.Fatalf("applied %d policies", n)
	}
	var problems []string
	for _, line := range s.Log.Lines() {
		if strings.Contains(line, `"problem"`) {
			problems = append(problems, line)
		}
	}
	if all := strings.Join(problems, "\n"); len(problems) != 2 || !strings.Contains(all, "policy.yaml:4") || !strings.Contains(all, "policy.yaml:5") || !strings.Contains(all, `"@level":"error"`) {
		t.Errorf("logged:\n%s", all)
	}

	write(t, path, validPolicy)
	s.Reload(t.Context())
	if len(s.Source.applied) != 1 {
		t.Fatalf("applied %d policies", len(s.Source.applied))
	}
	inv := inventoryWith(s.Source.applied[0], coretest.GPUs(3))
	checkEqual(t, "groups", map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2}, groupSizes(firstGroups(inv)))
	s.mustConfigure(t, map[string]any{"policy_file": path}) // the applied policy
	s.currentRun()
	if n := len(s.Started()); n != 1 {
		t.Errorf("%d sources were started", n)
	}
}

// A change of more than the policy starts another source.
func TestReloadOfOtherSettings(t *testing.T) {
	s, path := newPolicyFixture(t, "version: v1\n")
	s.currentRun()
	write(t, path, "version: v1\nflags: {mpsRoot: /srv/mps}\n")
	s.Reload(t.Context())
	s.currentRun()
	if all := s.Started(); len(all) != 2 || all[1].MPSRoot != "/srv/mps" || len(s.Source.applied) != 0 {
		t.Errorf("%d starts, %d applied", len(all), len(s.Source.applied))
	}
}

// Without a file, or while disabled, nothing happens. Before the first run the new policy is that of the first source.
func TestReloadWithoutARun(t *testing.T) {
	for name, tc := range map[string]struct {
		keys    map[string]any
		running bool
		rules   []int // of each source that is started
	}{
		"no file":  {map[string]any{"policy_file": ""}, true, []int{0}},
		"disabled": {map[string]any{"enabled": false}, true, nil},
		"no run":   {nil, false, []int{2}},
	} {
		s := newFixture(t, nil)
		path := policyFile(t, "version: v1\n")
		keys := map[string]any{"policy_file": path}
		maps.Copy(keys, tc.keys)
		s.mustConfigure(t, keys)
		if tc.running {
			s.currentRun()
		}
		write(t, path, validPolicy)
		s.Reload(t.Context())
		s.currentRun()
		var rules []int
		for _, started := range s.Started() {
			rules = append(rules, len(started.Core.Policy.Rules))
		}
		if !cmp.Equal(rules, tc.rules) || len(s.Source.applied) != 0 {
			t.Errorf("%s: %v rules, want %v; %d applied", name, rules, tc.rules, len(s.Source.applied))
		}
	}
}

// Reload ends with the context of New, even if the source never applies the policy.
func TestReloadEndsWithThePlugin(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	s, path := newFixtureUntil(ctx, nil), policyFile(t, "version: v1\n")
	s.Source.apply = func(ctx context.Context, _ core.Config) error {
		<-ctx.Done()
		return ctx.Err()
	}
	s.mustConfigure(t, map[string]any{"policy_file": path})
	s.currentRun()
	write(t, path, validPolicy)
	done := make(chan struct{})
	go func() {
		s.Reload(context.Background())
		close(done)
	}()
	end()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Error("timeout")
	}
}

// Differences from NVIDIA's plugin are logged when the first run starts, and again when the file has changed, but not by
// the process that only validates the configuration, and not by each Reload.
func TestWarningsAreLoggedOncePerFile(t *testing.T) {
	const renamed = "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, rename: small, replicas: 2}]}}\n"
	s, path := newPolicyFixture(t, renamed)
	expect := func(when string, n int) {
		t.Helper()
		if got := strings.Count(s.Log.String(), "sharing.timeSlicing.resources[0].rename: NVIDIA"); got != n {
			t.Errorf("%s: %d warnings, want %d", when, got, n)
		}
	}
	expect("configured", 0)
	s.currentRun()
	expect("first run", 1)
	for _, step := range []struct {
		when, text string
		warnings   int // so far
	}{
		{"the same file", renamed, 1},
		{"another file with the same policy", "# as before\n" + renamed, 2},
		{"an invalid file", invalidPolicy, 2},
		{"another policy", strings.ReplaceAll(renamed, "small", "tiny"), 3},
	} {
		write(t, path, step.text)
		s.Reload(t.Context())
		s.currentRun()
		expect(step.when, step.warnings)
	}
}

// newProcess returns a plugin process of an agent, with its configuration.
func newProcess(t *testing.T, agent string, keys map[string]any) (*fixture, error) {
	t.Helper()
	s := newFixture(t, nil)
	s.PersistPolicy(agent)
	return s, s.configure(keys)
}

// newAgentProcess is newProcess of agent 1 with a valid configuration.
func newAgentProcess(t *testing.T, keys map[string]any) *fixture {
	t.Helper()
	s, err := newProcess(t, "agent 1", keys)
	check.NoError(t, err)
	return s
}

// replicas returns validPolicy with another number of replicas.
func replicas(n string) string { return strings.ReplaceAll(validPolicy, "replicas: 2", "replicas: "+n) }

// cachedPolicy returns the file in the state directory, after all writes; "" = there is none.
func (s *fixture) cachedPolicy(dir string) string {
	s.diskWork.Wait()
	text, _ := os.ReadFile(filepath.Join(dir, policyCacheName))
	return string(text)
}

// With an invalid policy file, another plugin process of the same agent starts with the saved policy. Any other process
// fails.
func TestPolicyIsSaved(t *testing.T) {
	dir, path := t.TempDir(), policyFile(t, validPolicy)
	block := map[string]any{"policy_file": path, "state_dir": dir}
	first := newAgentProcess(t, block)
	if first.cachedPolicy(dir) != "" {
		t.Error("saved by a process that only validates the configuration")
	}
	first.currentRun()
	for _, text := range []string{validPolicy, replicas("5"), invalidPolicy} {
		write(t, path, text)
		first.Reload(t.Context())
		if saved := first.cachedPolicy(dir); strings.HasSuffix(saved, text) == (text == invalidPolicy) {
			t.Errorf("saved:\n%s", saved)
		}
	}

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
		if _, err := newProcess(t, tc.agent, keys); !errorContains(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}

	next := newAgentProcess(t, block)
	next.currentRun()
	if got := next.Started()[0].Core.Policy.Rules; len(got) != 2 || got[1].Sharing.Replicas != 5 {
		t.Errorf("the next process has %+v", got)
	}
	checkContains(t, next.Log.String(), "policy.yaml:4", "policy.yaml:5")
	write(t, path, "version: v1\n") // repaired
	next.Reload(t.Context())
	if got := next.Source.applied; len(got) != 1 || len(got[0].Policy.Rules) != 0 {
		t.Errorf("the repaired file has no effect: %+v", got)
	}
	next.diskWork.Wait()
}

// The plugin works without a writable state directory.
func TestPolicyIsNotSaved(t *testing.T) {
	dir := filepath.Join(policyFile(t, ""), "state") // in a regular file
	s := newAgentProcess(t, map[string]any{"policy_file": policyFile(t, validPolicy), "state_dir": dir})
	s.Source.Set(nodeInventory(coretest.GPUs(1)))
	s.currentRun()
	s.diskWork.Wait()
	checkContains(t, s.Log.String(), "policy not saved")
	if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
		t.Error(err)
	}
}

// The policy is saved as it was read: an edit between SetConfig and the first run, which saves it, has no effect.
func TestPolicyIsSavedAsRead(t *testing.T) {
	for name, edited := range map[string]string{
		"invalid": invalidPolicy,
		"valid":   replicas("7"),
		"longer":  validPolicy + strings.Repeat("# a comment\n", 1000),
	} {
		dir, path := t.TempDir(), policyFile(t, validPolicy)
		s := newAgentProcess(t, map[string]any{"policy_file": path, "state_dir": dir})
		write(t, path, edited)
		s.currentRun()
		if saved := s.cachedPolicy(dir); !strings.HasSuffix(saved, "\n"+validPolicy) || strings.Count(saved, "\n") != strings.Count(validPolicy, "\n")+1 {
			t.Errorf("%s: saved:\n%s", name, saved)
		}
	}
}

// The latest of several policies is saved, whatever the order of the writes.
func TestLatestPolicyIsSaved(t *testing.T) {
	for range 20 {
		dir, path := t.TempDir(), policyFile(t, validPolicy)
		s := newAgentProcess(t, map[string]any{"policy_file": path, "state_dir": dir})
		s.currentRun()
		for _, n := range []string{"3", "4", "5", "6"} {
			write(t, path, replicas(n))
			s.Reload(t.Context())
		}
		checkContains(t, s.cachedPolicy(dir), "replicas: 6")
	}
}
