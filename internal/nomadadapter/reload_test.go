package nomadadapter

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// applyingSource is a source that goes on with another offer.
type applyingSource struct {
	*coretest.Source
	applied chan core.Config
}

func (a *applyingSource) ApplyPolicy(ctx context.Context, offer core.Config) error {
	select {
	case a.applied <- offer:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// newApplyingPlugin is a plugin whose sources adopt, and how often one was started.
func newApplyingPlugin(t *testing.T) (p *Plugin, src *applyingSource, log *logBuffer, starts func() int) {
	s := newFixture(t)
	src = &applyingSource{s.Source, make(chan core.Config, 1)}
	begin := s.start
	s.start = func(settings Settings) *run {
		l := begin(settings)
		l.source = src
		return l
	}
	return s.Plugin, src, s.Log, func() int { return len(s.Started()) }
}

func TestReread(t *testing.T) {
	p, src, log, starts := newApplyingPlugin(t)
	path := policyFile(t, "version: v1\n")
	configure := (&fixture{Plugin: p}).configure
	if err := configure(map[string]any{"policy_file": path}); err != nil {
		t.Fatal(err)
	}
	src.Set(nodeInventory(coretest.GPUs(2)))
	next := openFingerprint(t, p)
	next()

	p.Reload(t.Context()) // nothing changed
	write(t, path, invalidPolicy)
	p.Reload(t.Context())
	select {
	case c := <-src.applied:
		t.Fatalf("adopted %+v", c.Policy)
	default:
	}
	var problems []string
	for _, line := range log.Lines() {
		if strings.Contains(line, `"problem"`) {
			problems = append(problems, line)
		}
	}
	if all := strings.Join(problems, "\n"); len(problems) != 2 || !strings.Contains(all, "policy.yaml:4") || !strings.Contains(all, "policy.yaml:5") || !strings.Contains(all, `"@level":"error"`) {
		t.Errorf("logged:\n%s", all)
	}

	write(t, path, validPolicy)
	p.Reload(t.Context())
	c := receive(t, src.applied)
	src.Set(inventoryWith(c, coretest.GPUs(3)))
	if diff := cmp.Diff(map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2}, groupSizes(next())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := starts(); n != 1 {
		t.Errorf("%d sources were started", n)
	}
	if err := configure(map[string]any{"policy_file": path}); err != nil { // as was adopted
		t.Fatal(err)
	}
	p.currentRun()
	if n := starts(); n != 1 {
		t.Errorf("%d sources were started for what is in force", n)
	}
}

// What takes more than another offer takes another source.
func TestRereadOfMore(t *testing.T) {
	p, src, _, starts := newApplyingPlugin(t)
	path := policyFile(t, "version: v1\n")
	if err := (&fixture{Plugin: p}).configure(map[string]any{"policy_file": path}); err != nil {
		t.Fatal(err)
	}
	src.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	openFingerprint(t, p)()
	write(t, path, "version: v1\nflags: {mpsRoot: /srv/mps}\n")
	p.Reload(t.Context())
	r, err := p.Reserve([]string{gpuID(5) + "::0"})
	if err != nil || r.Envs[mpsPipeEnv] != "/srv/mps/nvidia.com/gpu.mps/pipe" || starts() != 2 {
		t.Errorf("%+v, %v, %d starts", r, err, starts())
	}
}

// A source that can't adopt is replaced; without a file, or while disabled, there is nothing to do.
func TestRereadOtherwise(t *testing.T) {
	for name, tc := range map[string]struct {
		keys   map[string]any
		starts int
	}{
		"no adopter": {map[string]any{}, 2},
		"no file":    {map[string]any{"policy_file": ""}, 1},
		"disabled":   {map[string]any{"enabled": false}, 0},
	} {
		s := newFixture(t)
		path := policyFile(t, "version: v1\n")
		keys := map[string]any{"policy_file": path}
		for k, v := range tc.keys {
			keys[k] = v
		}
		s.mustConfigure(t, keys)
		s.currentRun()
		write(t, path, validPolicy)
		s.Reload(t.Context())
		s.currentRun()
		if n := len(s.Started()); n != tc.starts {
			t.Errorf("%s: %d starts, want %d", name, n, tc.starts)
		}
	}
}

// Before anybody has asked about devices a new policy is that of the first source.
func TestRereadBeforeTheFirstQuestion(t *testing.T) {
	s := newFixture(t)
	path := policyFile(t, "version: v1\n")
	s.mustConfigure(t, map[string]any{"policy_file": path})
	write(t, path, validPolicy)
	s.Reload(t.Context())
	s.currentRun()
	if got := s.Started(); len(got) != 1 || len(got[0].Core.Policy.Rules) != 2 {
		t.Errorf("%+v", got)
	}
}

// A source that does not come round to it keeps nobody for longer than the plugin lives.
func TestRereadEndsWithThePlugin(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	src := &applyingSource{coretest.NewSource(), make(chan core.Config)}
	p := New(ctx, "2.0.0", func(context.Context, Settings, *slog.Logger) Source { return src }, discardLog)
	path := policyFile(t, "version: v1\n")
	if err := (&fixture{Plugin: p}).configure(map[string]any{"policy_file": path}); err != nil {
		t.Fatal(err)
	}
	p.currentRun()
	write(t, path, validPolicy)
	done := make(chan struct{})
	go func() {
		p.Reload(context.Background())
		close(done)
	}()
	end()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Error("still there")
	}
}

// What a policy file means otherwise than to NVIDIA's plugin is logged once devices are followed, and again when the file
// has changed; not by the process that only validates the configuration, and not with every HUP.
func TestWarningsAreLoggedOncePerFile(t *testing.T) {
	p, src, log, _ := newApplyingPlugin(t)
	const renamed = "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, rename: small, replicas: 2}]}}\n"
	path := policyFile(t, renamed)
	expect := func(when string, n int) {
		t.Helper()
		if got := strings.Count(log.String(), "sharing.timeSlicing.resources[0].rename: NVIDIA"); got != n {
			t.Errorf("%s: warned %d times, want %d", when, got, n)
		}
	}
	if err := (&fixture{Plugin: p}).configure(map[string]any{"policy_file": path}); err != nil {
		t.Fatal(err)
	}
	expect("configured", 0)
	p.currentRun()
	expect("followed", 1)
	p.Reload(t.Context())
	p.currentRun()
	expect("the same file", 1)
	write(t, path, "# as before\n"+renamed)
	p.Reload(t.Context())
	receive(t, src.applied) // its lines are others
	expect("another file that means the same", 2)
	write(t, path, invalidPolicy)
	p.Reload(t.Context())
	expect("a bad file", 2)
	write(t, path, strings.ReplaceAll(renamed, "small", "tiny"))
	p.Reload(t.Context())
	receive(t, src.applied)
	expect("another policy", 3)
}
