package health

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A process keeps the library that it has loaded first, and a call that hangs. So a test that needs another
// library, or leaves a call behind, runs a part of itself in another process: this binary, the same test.
const childRoot = "TANDEM_TEST_HEALTH_ROOT"

// inChild is the machine of the parent; false in the parent.
func inChild(t *testing.T) (*simdriver.Machine, bool) {
	t.Helper()
	root := os.Getenv(childRoot)
	if root == "" {
		return nil, false
	}
	m, err := simdriver.Open(root)
	must(t, err)
	return m, true
}

// child runs this test in another process.
func child(t *testing.T, root string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	pattern := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self, "-test.run", pattern, "-test.v")
	cmd.Env = append(os.Environ(), childRoot+"="+root, "SIMDRIVER_MACHINE="+root)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in another process: %v\n%s", err, out)
	}
}
