package policy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// FuzzPolicy: a file is refused, with every problem in one line that names the file, or gives the units of a node, each once
// and under a name that the orchestrators accept; for both orchestrators, and with the same result each time.
func FuzzPolicy(f *testing.F) {
	for _, tc := range offers {
		f.Add([]byte(tc.file))
	}
	for _, table := range []map[string]struct{ file, want string }{problems, conflicts} {
		for _, tc := range table {
			f.Add([]byte(tc.file))
		}
	}
	f.Add([]byte(withLimits))
	examples, err := os.ReadFile("testdata/nvidia.golden")
	check.NoError(f, err)
	for example := range strings.SplitSeq(string(examples), "\n# ") {
		_, rest, _ := strings.Cut(example, "\n")
		file, _, _ := strings.Cut(rest, "=> ")
		f.Add([]byte(file))
	}
	f.Add([]byte("policy: &p {rules: [*p]}\n"))
	f.Add([]byte("policy: {rules: &a [&b {select: &c {index: [0,0]}, use: reserved}, *b, *b]}\n"))
	f.Add([]byte("sharing: {<<: [{timeSlicing: ~}, {mps: {}}]}\nresources: {? [x] : y}\n"))
	machine := coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb", "1g.10gb+me", "3g.40gb")
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			r, err := config.ParseFile("/etc/c.yaml", text, to)
			for _, line := range problemLines(err) {
				if !strings.HasPrefix(line, "/etc/c.yaml:") {
					t.Errorf("problem %q", line)
				}
			}
			if err != nil {
				continue
			}
			sound(t, r, machine)
			if again, err := config.ParseFile("/etc/c.yaml", text, to); err != nil || !core.Build(machine, health.Ledger{}, under(again.Policy)).Equal(core.Build(machine, health.Ledger{}, under(r.Policy))) {
				t.Errorf("read again: %+v, %v", again, err)
			}
		}
	})
}

func problemLines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

func under(p inventory.Policy) core.Config {
	c := core.DefaultConfig()
	c.MIG, c.Policy = inventory.MIGMixed, p
	return c
}

var resourceName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

// sound checks that the orchestrators accept the units of a policy.
func sound(t *testing.T, r config.File, machine gpu.Snapshot) {
	shared := false
	for _, p := range []inventory.Policy{r.Policy, r.Normalized} {
		units := map[inventory.UnitID]bool{}
		limits := map[gpu.DeviceID]uint64{} // sums
		for u := range core.Build(machine, health.Ledger{}, under(p)).Units() {
			if units[u.ID] || len(u.ID) > 63 {
				t.Errorf("unit %s", u.ID)
			}
			units[u.ID] = true
			if !resourceName.MatchString(u.Pool) || filepath.Base(u.Pool) != u.Pool || len("nvidia.com/"+u.Pool) > 63 {
				t.Errorf("pool %q", u.Pool)
			}
			s := u.Sharing
			switch s.Mode {
			case inventory.Exclusive:
				if s != (inventory.Sharing{}) {
					t.Errorf("%s is %+v", u.ID, s)
				}
			case inventory.MPS:
				shared = true
				if !s.OnePerRequest || u.Device.Profile != "" || s.Threads > 100 || s.Replicas > 48 {
					t.Errorf("%s is %+v", u.ID, s)
				}
				fallthrough
			case inventory.TimeSlicing:
				limits[u.Device.ID] += u.Memory
				if u.Memory > 0 && (s.Limit == inventory.LimitNone || !p.Limits.On || u.Device.Profile != "" || u.Memory%(1<<20) != 0) ||
					!p.Limits.Overcommit && limits[u.Device.ID] > u.Device.Memory-min(p.Limits.Reserve, u.Device.Memory) {
					t.Errorf("%s is limited to %d of %d with %+v", u.ID, limits[u.Device.ID], u.Device.Memory, p.Limits)
				}
				if s.Replicas < 2 || s.Replicas > 1000 {
					t.Errorf("%s is %+v", u.ID, s)
				}
			}
		}
	}
	if shared && r.MPS == "" {
		t.Error("MPS is used, and its place is missing")
	}
}
