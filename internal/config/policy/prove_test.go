package policy_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/test/check"
)

// Each key of the section "prove" has its meaning for both agents, and its default.
func TestProve(t *testing.T) {
	least := proof.Default()
	least.Command = []string{"/usr/bin/check", "a b"}
	for text, want := range map[string]proof.Policy{
		"version: v1\n": {},
		"prove:\n":      {},
		"prove: {command: [/usr/bin/check, a b]}\n": least,
		`prove:
  command: [/usr/bin/check]
  timeout: 2m
  at: [reset, idle, reset]
  every: 24h
  idleFor: 1h
  maxPerNode: 2
  windows:
    - {days: [sat, sun], from: "22:00", to: "06:30"}
    - {from: "12:00", to: "13:00"}
  onFail: degraded
  unproved: offer
`: {
			Command: []string{"/usr/bin/check"}, Timeout: 2 * time.Minute, At: []proof.Reason{proof.Reset, proof.Idle}, Every: 24 * time.Hour, IdleFor: time.Hour,
			MaxPerNode: 2, OnFail: health.Degraded, Windows: []proof.Window{
				{Days: []time.Weekday{time.Saturday, time.Sunday}, From: 22 * time.Hour, To: 6*time.Hour + 30*time.Minute}, {From: 12 * time.Hour, To: 13 * time.Hour},
			},
		},
		"prove: {command: [/c], at: [boot], unproved: withhold}\n": {
			Command: []string{"/c"}, Timeout: time.Minute, At: []proof.Reason{proof.Boot}, Every: 168 * time.Hour, IdleFor: 10 * time.Minute, MaxPerNode: 1, OnFail: health.Unhealthy, Withhold: true,
		},
	} {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			f, err := read(text, to)
			check.NoError(t, err)
			if diff := cmp.Diff(want, f.Prove); diff != "" {
				t.Errorf("%s%s", text, diff)
			}
			if has := len(f.Summary()) > 0; has != want.On() {
				t.Errorf("%s%q", text, f.Summary())
			}
		}
	}
}

func TestProveSummary(t *testing.T) {
	f, err := read(`prove: {command: [/usr/bin/check, -q], unproved: withhold, windows: [{days: [sat], from: "22:00", to: "06:00"}]}`, policy.Nomad)
	check.NoError(t, err)
	const want = "prove: /usr/bin/check -q, at boot, reset, recovery, idle; ended after 1m; GPUs of a node at a time: 1; a GPU that fails is unhealthy; " +
		"after a boot a GPU takes work when it has passed, or the check could not run; idle: free for 10m, and not proved for 168h, Sat 22:00-06:00"
	if got := strings.Join(f.Summary(), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}
