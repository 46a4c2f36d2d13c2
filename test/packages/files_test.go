package packages

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The metadata of each package has Tandem's own license and those of all modules that docs/licenses.md lists for its binary.
func TestLicenseOfPackages(t *testing.T) {
	table, err := os.ReadFile(repository + "/docs/licenses.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, binary := range []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"} {
		licenses := map[string]bool{"Apache-2.0": true}
		for row := range strings.Lines(string(table)) {
			if cells := strings.Split(row, " | "); len(cells) == 3 && strings.Contains(cells[2], binary) {
				licenses[strings.TrimPrefix(cells[0], "| ")] = true
			}
		}
		text, err := os.ReadFile(repository + "/deploy/packages/" + binary + "/nfpm.yaml")
		if err != nil {
			t.Fatal(err)
		}
		got := regexp.MustCompile(`(?m)^license: (.*)$`).FindStringSubmatch(string(text))
		if want := strings.Join(slices.Sorted(maps.Keys(licenses)), " AND "); got == nil || got[1] != want {
			t.Errorf("deploy/packages/%s/nfpm.yaml: license is %q, want %q", binary, got, want)
		}
	}
}
