package live

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
)

const (
	// LIVE_STRICT=1 fails a test that exceeds a documented time, on a machine without other load.
	strictVariable = "LIVE_STRICT"

	ownProcessVariable = "LIVE_OWN_PROCESS" // set in a process of inOwnProcess
)

func TestMain(m *testing.M) {
	check.Parallel(12)
	os.Exit(m.Run())
}

// inOwnProcess runs the calling test in a process of its own, beside others, and returns true there: a process has one NVML,
// and with it one machine at a time.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownProcessVariable) != "" {
		return true
	}
	t.Parallel()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), ownProcessVariable+"=1")
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if logged, ok := strings.CutPrefix(line, "    "); ok {
			t.Log(strings.TrimRight(logged, "\n"))
		}
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in a process of its own: %v\n%s", err, out)
	}
	return false
}

// checkTime checks a documented time, with a margin for a machine with other load.
func checkTime(t testing.TB, what string, took, limit time.Duration) {
	t.Helper()
	if os.Getenv(strictVariable) == "" {
		limit *= 4
	}
	if took > limit {
		t.Errorf("%s took %v, limit %v", what, took, limit)
	}
}

// without is s without some of its elements.
func without(s []string, removed ...string) []string {
	return slices.DeleteFunc(slices.Clone(s), func(e string) bool { return slices.Contains(removed, e) })
}

var must = check.NoError

func (s *scene) eventually(what string, ok func() bool) {
	s.T.Helper()
	check.Until(s.T, what, ok)
}
