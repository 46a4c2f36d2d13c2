package health

import (
	"os/exec"
	"strings"
	"testing"
)

// Whatever a person or a broken machine writes, nothing panics. The fuzz targets live with what they fuzz
// (make fuzz runs them); here the seeds of each run once, so that a target that is gone is missed.
func TestCase34Fuzz(t *testing.T) {
	for target, pkg := range map[string]string{
		"FuzzParse": "internal/kmsg",
		"FuzzLoad":  "internal/statefile",
	} {
		t.Run(target, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), "go", "test", "-v", "-run", "^"+target+"$", "../../"+pkg).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "--- PASS: "+target) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
