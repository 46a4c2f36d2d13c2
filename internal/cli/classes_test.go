package cli_test

import (
	"path/filepath"
	"strings"
	"testing"
)

// classes prints DeviceClasses for the agent's own configuration, or for those of several groups of nodes; problems of all of them are
// reported at once, and then nothing is printed.
func TestClasses(t *testing.T) {
	dir := t.TempDir()
	training, mixed, broken := filepath.Join(dir, "training.yaml"), filepath.Join(dir, "mixed.yaml"), filepath.Join(dir, "broken.yaml")
	write(t, training, "version: v1\npolicy:\n  rules:\n  - {select: {index: 0}, name: training}\n")
	write(t, mixed, "version: v1\nflags: {migStrategy: mixed}\n")
	write(t, broken, "version: v1\npolicy:\n  rules:\n  - {select: {indx: 0}, name: x}\n")

	names := func(stdout string) string {
		var all []string
		for line := range strings.Lines(stdout) {
			if name, ok := strings.CutPrefix(line, "  name: "); ok {
				all = append(all, strings.TrimSpace(name))
			}
		}
		return strings.Join(all, " ")
	}
	for about, tc := range map[string]struct {
		args  []string
		names string
		has   string
	}{
		"no configuration":   {nil, "gpu.nvidia.com mig.nvidia.com", "extendedResourceName: nvidia.com/gpu\n"},
		"by flag":            {[]string{"--config-file", training}, "gpu.nvidia.com mig.nvidia.com training.nvidia.com", "extendedResourceName: nvidia.com/training\n"},
		"files":              {[]string{training, mixed, "--mig-profiles", "1g.10gb, 3g.40gb"}, "gpu.nvidia.com mig.nvidia.com mig-1g-10gb.nvidia.com mig-3g-40gb.nvidia.com training.nvidia.com", ""},
		"without extensions": {[]string{"--extended-resources=false", training}, "gpu.nvidia.com mig.nvidia.com training.nvidia.com", ""},
	} {
		code, stdout, stderr := run(t, "k8s-gpu", append([]string{"classes"}, tc.args...)...)
		if code != 0 || stderr != "" || names(stdout) != tc.names || !strings.Contains(stdout, tc.has) {
			t.Errorf("%s: %d, %s%s", about, code, stdout, stderr)
		}
		if strings.Contains(stdout, "extendedResourceName") == (about == "without extensions") {
			t.Errorf("%s: %s", about, stdout)
		}
	}

	code, stdout, stderr := run(t, "k8s-gpu", "classes", "--admission-policy", "--service-account", "gpu.agent", "--namespace", "gpus", training)
	const condition = "matches('^system:serviceaccount:gpus:gpu[.]agent$')"
	if code != 0 || names(stdout) != "gpu.nvidia.com mig.nvidia.com training.nvidia.com gpu.agent gpu.agent" ||
		!strings.Contains(stdout, condition) || !strings.Contains(stdout, "policyName: gpu.agent\n") || strings.Count(stdout, "tandem-k8s-gpu") != 2 { // labels
		t.Errorf("with the admission policy: %d, %s%s", code, stdout, stderr)
	}
	for args, want := range map[string]string{
		"--admission-policy --service-account Agent --mig-profiles big": `--service-account = "Agent": want the name`,
		"--admission-policy --namespace a:b":                            `--namespace = "a:b": want the namespace`,
		"--namespace gpus":                                              "those of --admission-policy",
	} {
		if code, stdout, stderr := run(t, "k8s-gpu", append([]string{"classes"}, strings.Fields(args)...)...); code == 0 || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%s: %d, %s%s", args, code, stdout, stderr)
		}
	}
	code, stdout, stderr = run(t, "k8s-gpu", "classes", broken, filepath.Join(dir, "none.yaml"), "--mig-profiles", "big")
	if code != 1 || stdout != "" || !strings.Contains(stderr, "did you mean index?") || !strings.Contains(stderr, "none.yaml: no such file") ||
		!strings.Contains(stderr, `k8s-gpu: --mig-profiles = "big": want MIG profiles such as 1g.10gb`) {
		t.Errorf("%d, %s%s", code, stdout, stderr)
	}
	if code, _, stderr := run(t, "nomad-gpu", "classes"); code != 2 || !strings.Contains(stderr, "unknown command classes") {
		t.Errorf("nomad-gpu: %d, %s", code, stderr)
	}
}
