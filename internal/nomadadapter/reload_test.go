package nomadadapter

import (
	"context"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// applyingSource is a PolicyApplier.
type applyingSource struct {
	*coretest.Source
	applied chan core.Config
}

func (a *applyingSource) ApplyPolicy(ctx context.Context, c core.Config) error {
	select {
	case a.applied <- c:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// newApplyingFixture returns a plugin with this policy file, whose runs all have one applyingSource.
func newApplyingFixture(t *testing.T, text string) (s *fixture, src *applyingSource, path string) {
	t.Helper()
	s = newFixture(t)
	src = &applyingSource{s.Source, make(chan core.Config, 1)}
	start := s.start
	s.start = func(settings Settings) *run {
		r := start(settings)
		r.source = src
		return r
	}
	path = policyFile(t, text)
	s.mustConfigure(t, map[string]any{"policy_file": path})
	return s, src, path
}

func TestReload(t *testing.T) {
	s, src, path := newApplyingFixture(t, "version: v1\n")
	src.Set(nodeInventory(coretest.GPUs(2)))
	next := openFingerprint(t, s)
	next()

	s.Reload(t.Context()) // nothing changed
	write(t, path, invalidPolicy)
	s.Reload(t.Context())
	select {
	case c := <-src.applied:
		t.Fatalf("applied %+v", c.Policy)
	default:
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
	c := receive(t, src.applied)
	src.Set(inventoryWith(c, coretest.GPUs(3)))
	if diff := cmp.Diff(map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2}, groupSizes(next())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	s.mustConfigure(t, map[string]any{"policy_file": path}) // the applied policy
	s.currentRun()
	if n := len(s.Started()); n != 1 {
		t.Errorf("%d sources were started", n)
	}
}

// A change of more than the policy starts another source.
func TestReloadOfOtherSettings(t *testing.T) {
	s, src, path := newApplyingFixture(t, "version: v1\n")
	src.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	openFingerprint(t, s)()
	write(t, path, "version: v1\nflags: {mpsRoot: /srv/mps}\n")
	s.Reload(t.Context())
	r, err := s.Reserve([]string{shareID(5, 0)})
	if err != nil || r.Envs[mpsPipeEnv] != "/srv/mps/nvidia.com/gpu.mps/pipe" || len(s.Started()) != 2 {
		t.Errorf("%+v, %v, %d starts", r, err, len(s.Started()))
	}
}

// A source that is no PolicyApplier is replaced. Without a file, or while disabled, nothing happens. Before the first run
// the new policy is that of the first source.
func TestReloadWithoutPolicyApplier(t *testing.T) {
	for name, tc := range map[string]struct {
		keys    map[string]any
		running bool
		starts  int
	}{
		"running":  {nil, true, 2},
		"no file":  {map[string]any{"policy_file": ""}, true, 1},
		"disabled": {map[string]any{"enabled": false}, true, 0},
		"no run":   {nil, false, 1},
	} {
		s := newFixture(t)
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
		got := s.Started()
		if len(got) != tc.starts {
			t.Errorf("%s: %d starts, want %d", name, len(got), tc.starts)
		}
		if len(tc.keys) == 0 && len(got[len(got)-1].Core.Policy.Rules) != 2 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// Reload ends with the context of New, even if the source never applies the policy.
func TestReloadEndsWithThePlugin(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	src := &applyingSource{coretest.NewSource(), make(chan core.Config)}
	path := policyFile(t, "version: v1\n")
	s := &fixture{Plugin: New(ctx, "2.0.0", func(context.Context, Settings, *slog.Logger) Source { return src }, discardLog)}
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
	s, src, path := newApplyingFixture(t, renamed)
	expect := func(when string, n int) {
		t.Helper()
		if got := strings.Count(s.Log.String(), "sharing.timeSlicing.resources[0].rename: NVIDIA"); got != n {
			t.Errorf("%s: %d warnings, want %d", when, got, n)
		}
	}
	expect("configured", 0)
	s.currentRun()
	expect("first run", 1)
	s.Reload(t.Context())
	s.currentRun()
	expect("the same file", 1)
	write(t, path, "# as before\n"+renamed)
	s.Reload(t.Context())
	receive(t, src.applied) // its line numbers are others
	expect("another file with the same policy", 2)
	write(t, path, invalidPolicy)
	s.Reload(t.Context())
	expect("an invalid file", 2)
	write(t, path, strings.ReplaceAll(renamed, "small", "tiny"))
	s.Reload(t.Context())
	receive(t, src.applied)
	expect("another policy", 3)
}
