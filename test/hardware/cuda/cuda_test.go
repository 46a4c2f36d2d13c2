package cuda

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/cudastub"
)

// The program finds the devices of its environment, and each fault of a driver is reported.
func TestProgram(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("SKIPPED: no C compiler: ", err)
	}
	dir := t.TempDir()
	program, err := Compile(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	library := cudastub.Build(t, dir)
	const first, second = "7fd648e1-a695-5024-8c66-5db903cdf8e3", "8b407413-f818-57fc-bb12-a1c15d88814a"
	for _, c := range []struct {
		library, fault, visible string
		devices                 []string
		kernels                 int
		failure                 string
		holds                   bool
	}{
		{library, "", "GPU-" + first, []string{first}, 1, "", true},
		{library, "", "GPU-" + first + ",GPU-" + second, []string{first, second}, 2, "", true},
		{library, "", "", nil, 0, "", true},
		{library, "init", "GPU-" + first, nil, 0, "-1 cuInit CUDA_ERROR_NO_DEVICE (100)", false},
		{library, "memory", "GPU-" + first, []string{first}, 0, "memory 0 differs", true},
		{library, "kernel", "GPU-" + first, []string{first}, 0, "kernel 0 differs", true},
		{library + ".missing", "", "GPU-" + first, nil, 0, "- dlopen", false},
	} {
		t.Setenv(cudastub.Fault, c.fault)
		p, err := Start(t.Context(), program, c.library, map[string]string{"CUDA_VISIBLE_DEVICES": c.visible})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(p.Devices, c.devices) || p.Kernels != c.kernels || (p.PID() != 0) != c.holds ||
			!strings.HasPrefix(strings.Join(p.Failures, "; "), c.failure) || c.failure == "" && len(p.Failures) > 0 {
			t.Errorf("fault %q, devices %q: %+v", c.fault, c.visible, p)
		}
		if err := p.End(); err != nil {
			t.Error(err)
		}
	}
}
