package simdriver_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestSMI(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("nvidia-smi changes GPUs for root only")
	}
	m := simdriver.StartParallel(t, "l40s")
	pci, err := m.Get(1, "pci")
	ok(t, err)
	name := "GPU 0000" + strings.ToUpper(pci)
	for _, c := range []struct {
		args   string
		status int
		prints string
	}{
		{"--query-gpu=persistence_mode --format=csv,noheader -i 1", 0, "Enabled\n"},
		{"--gpu-reset -i 1", 255, "The following GPUs could not be reset:\n  " + name + ": In use by another client\n"},
		{"-pm 0 -i " + m.UUID(1), 0, "Disabled persistence mode for " + name + ".\nAll done.\n"},
		{"-i " + pci + " -pm 0", 0, "Persistence mode is already Disabled for " + name + ".\nAll done.\n"},
		{"-r -i 0000" + strings.ToUpper(pci), 0, name + " was successfully reset.\nAll done.\n"},
		{"--query-gpu=persistence_mode --format=csv,noheader", 0, "Enabled\nDisabled\nEnabled\nEnabled\nEnabled\nEnabled\nEnabled\nEnabled\n"},
		{"-r -i 8", 6, "No devices were found\n"},
		{"-r -i", 2, "Invalid combination of input arguments."},
		{"--dance", 2, "Invalid combination of input arguments."},
	} {
		var out strings.Builder
		if status := m.SMI(t.Context(), strings.Fields(c.args), &out); status != c.status || !strings.HasPrefix(out.String(), c.prints) {
			t.Errorf("nvidia-smi %s: status %d, %s", c.args, status, &out)
		}
	}
}

// The program finds its machine by its own place, and stays when the machine changes.
func TestSMIProgram(t *testing.T) {
	m := simdriver.StartParallel(t, "l40s")
	ok(t, m.InstallSMI(t.Context(), ""))
	ok(t, m.Set(1, "persistence", "no"))
	cmd := exec.CommandContext(t.Context(), m.Root+"/usr/bin/nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader", "-i", m.UUID(1))
	cmd.Env = []string{"LC_ALL=C"}
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "Disabled\n" {
		t.Errorf("%q, %v", out, err)
	}
	cmd = exec.CommandContext(t.Context(), cmd.Path, "-r", "-i", "8")
	cmd.Env = []string{"LC_ALL=C"}
	if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 6 {
		t.Errorf("%v", err)
	}
}
