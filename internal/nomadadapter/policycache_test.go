package nomadadapter

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// awaitCachedPolicy waits until a text is among what is kept.
func awaitCachedPolicy(t *testing.T, dir, text string) {
	t.Helper()
	await(t, text, func() bool {
		kept, _ := os.ReadFile(filepath.Join(dir, policyCacheName))
		return strings.Contains(string(kept), text)
	})
}

// A file that has become bad keeps no process from following another one of the same agent's. An agent that starts is
// told.
func TestPolicyIsKept(t *testing.T) {
	dir := t.TempDir()
	path := policyFile(t, validPolicy)
	block := map[string]any{"policy_file": path, "state_dir": dir}
	first := newFixture(t)
	first.PersistPolicy("agent 1")
	if err := first.configure(block); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, policyCacheName)); err == nil {
		t.Error("a process that only validates keeps something")
	}
	first.currentRun()
	awaitCachedPolicy(t, dir, "replicas: 2")
	write(t, path, strings.ReplaceAll(validPolicy, "replicas: 2", "replicas: 5"))
	first.Reload(t.Context())
	awaitCachedPolicy(t, dir, "replicas: 5")
	write(t, path, invalidPolicy)
	first.Reload(t.Context())
	first.diskWork.Wait()

	for name, tc := range map[string]struct {
		agent string
		more  map[string]any
		want  string // in the error; "" = it starts
	}{
		"the same agent":     {"agent 1", nil, ""},
		"another agent":      {"agent 2", nil, "quartered"},
		"an unknown agent":   {"", nil, "quartered"},
		"another file":       {"agent 1", map[string]any{"policy_file": policyFile(t, invalidPolicy)}, "quartered"},
		"no state directory": {"agent 1", map[string]any{"state_dir": ""}, "quartered"},
		"a bad block, too":   {"agent 1", map[string]any{"group_by": "rack"}, `group_by = "rack"`},
	} {
		next := newFixture(t)
		next.PersistPolicy(tc.agent)
		keys := map[string]any{"policy_file": path, "state_dir": dir}
		for k, v := range tc.more {
			keys[k] = v
		}
		err := next.configure(keys)
		if (err == nil) != (tc.want == "") || err != nil && !errorContains(err, tc.want) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err != nil {
			continue
		}
		next.currentRun()
		if got := next.Started()[0].Core.Policy.Rules; len(got) != 2 || got[1].Sharing.Replicas != 5 {
			t.Errorf("%s: %+v", name, got)
		}
		if all := next.Log.String(); !strings.Contains(all, "policy.yaml:4") || !strings.Contains(all, "policy.yaml:5") {
			t.Errorf("%s: logged:\n%s", name, all)
		}
		write(t, path, "version: v1\n") // repaired
		next.Reload(t.Context())
		next.currentRun()
		if got := next.Started(); len(got) != 2 || len(got[1].Core.Policy.Rules) != 0 {
			t.Errorf("%s: the repaired file is not in force: %+v", name, got)
		}
		write(t, path, invalidPolicy)
		next.diskWork.Wait()
	}
}

// A state directory that can't be written keeps nobody from anything.
func TestPolicyThatCannotBeKept(t *testing.T) {
	s := newFixture(t)
	s.PersistPolicy("agent 1")
	dir := filepath.Join(policyFile(t, ""), "a file is no folder")
	s.mustConfigure(t, map[string]any{"policy_file": policyFile(t, validPolicy), "state_dir": dir})
	s.Source.Set(nodeInventory(coretest.GPUs(1)))
	s.currentRun()
	await(t, "a line of the log", func() bool { return strings.Contains(s.Log.String(), "policy not saved") })
	if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
		t.Error(err)
	}
}

// What is kept is what was read and compiled. A policy file that is edited between that and the first question about
// devices, when the policy is kept, changes nothing of it.
func TestPolicyEditedAfterItWasReadIsKeptAsRead(t *testing.T) {
	for name, edited := range map[string]string{
		"into a bad one":     invalidPolicy,
		"into another":       strings.ReplaceAll(validPolicy, "replicas: 2", "replicas: 7"),
		"into a longer text": validPolicy + strings.Repeat("# a comment\n", 1000),
	} {
		t.Run(name, func(t *testing.T) {
			dir, path := t.TempDir(), policyFile(t, validPolicy)
			block := map[string]any{"policy_file": path, "state_dir": dir}
			first := newFixture(t)
			first.PersistPolicy("agent 1")
			if err := first.configure(block); err != nil {
				t.Fatal(err)
			}
			write(t, path, edited)
			first.currentRun()
			first.diskWork.Wait()

			write(t, path, invalidPolicy)
			next := newFixture(t)
			next.PersistPolicy("agent 1")
			if err := next.configure(block); err != nil {
				t.Fatalf("the process that follows does not start: %v", err)
			}
			next.currentRun()
			if got := next.Started()[0].Core.Policy.Rules; len(got) != 2 || got[1].Sharing.Replicas != 2 {
				t.Errorf("the process that follows offers %+v", got)
			}
		})
	}
}

// Of two policies that come into force one after the other the later is kept, however the disk orders the writes.
func TestLatestPolicyIsKept(t *testing.T) {
	for range 20 {
		dir, path := t.TempDir(), policyFile(t, validPolicy)
		s := newFixture(t)
		s.PersistPolicy("agent 1")
		s.mustConfigure(t, map[string]any{"policy_file": path, "state_dir": dir})
		s.currentRun()
		for _, replicas := range []string{"3", "4", "5", "6"} {
			write(t, path, strings.ReplaceAll(validPolicy, "replicas: 2", "replicas: "+replicas))
			s.Reload(t.Context())
			s.currentRun()
		}
		s.diskWork.Wait()
		if kept, err := os.ReadFile(filepath.Join(dir, policyCacheName)); err != nil || !strings.Contains(string(kept), "replicas: 6") {
			t.Fatalf("%v, kept:\n%s", err, kept)
		}
	}
}
