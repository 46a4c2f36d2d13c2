package cli_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// reset asks the running agent: the dry run prints the steps, and the act refuses with the same reasons and exit code.
func TestReset(t *testing.T) {
	m := simdriver.StartParallel(t, "h100x8")
	state, _ := startAgent(t, m)
	at := "--state-dir=" + state
	for _, program := range programs {
		if code, out, errs := run(t, program, "reset", at); code != 2 || out != "" || !strings.HasPrefix(errs, program+": reset: want a GPU") {
			t.Errorf("%s without a GPU: %d, %s%s", program, code, out, errs)
		}
	}
	if code, out, errs := run(t, "k8s-gpu", "reset", at, "99"); code != 1 || out != "" || !strings.HasPrefix(errs, `k8s-gpu: gpu = "99": no such GPU`) {
		t.Errorf("unknown: %d, %s%s", code, out, errs)
	}
	if code, _, errs := run(t, "k8s-gpu", "reset", "--state-dir=/nowhere", "3"); code != 1 || !strings.Contains(errs, "no agent is running") {
		t.Errorf("no agent: %d, %s", code, errs)
	}
	code, out, reasons := run(t, "k8s-gpu", "reset", at, "3", "--dry-run")
	if code != 1 || !strings.Contains(out, "nvidia-smi --gpu-reset -i "+m.UUID(3)) || !strings.Contains(reasons, "can't begin now") || !strings.Contains(reasons, "CANNOT: ") {
		t.Errorf("dry run: %d, %s%s", code, out, reasons)
	}
	if code, _, errs := run(t, "k8s-gpu", "reset", at, m.UUID(3)[:8]); code != 1 || errs != reasons {
		t.Errorf("%d, %s, want %s", code, errs, reasons)
	}
	t.Log(reasons)
}
