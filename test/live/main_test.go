package live

import (
	"flag"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// What one wants of these tests beside their verdict:
//
//	LIVE_LONG=1     also what takes a minute, with the default settings
//	LIVE_STRICT=1   fail where a promised time is missed, on a machine that is not busy otherwise
const (
	wantLong   = "LIVE_LONG"
	wantStrict = "LIVE_STRICT"

	apartIn = "LIVE_APART" // set in a process of its own
)

// The tests wait more than they compute, so that more of them fit at once than there are processors.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("12") // a number
	}
	os.Exit(m.Run())
}

// takesLong skips a test that takes minutes, unless that is asked for.
func takesLong(t *testing.T) {
	t.Helper()
	if os.Getenv(wantLong) == "" {
		t.Skip("takes a minute: " + wantLong + "=1")
	}
}

// apart runs the calling test in a process of its own, beside others, and there it is true: a process has one
// NVML and with it one machine at a time.
func apart(t *testing.T) bool {
	t.Helper()
	if os.Getenv(apartIn) != "" {
		return true
	}
	t.Parallel()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), apartIn+"=1")
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if said, ok := strings.CutPrefix(line, "    "); ok {
			t.Log(strings.TrimRight(said, "\n"))
		}
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in a process of its own: %v\n%s", err, out)
	}
	return false
}

// promised checks a time that the project promises, with room for a machine that has other things to do.
func promised(t testing.TB, what string, took, limit time.Duration) {
	t.Helper()
	if os.Getenv(wantStrict) == "" {
		limit *= 4
	}
	if took > limit {
		t.Errorf("%s: it took %v, promised are %v", what, took, limit)
	}
}
