package nvidia_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// render is a result as text.
func render(r importer.Result, err error) string {
	if err != nil {
		return fmt.Sprintf("error:\n%v\n", err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s, default %q\n", r.Kind, r.Default)
	for _, n := range r.Notes {
		fmt.Fprintln(&b, n)
	}
	for _, f := range r.Files {
		fmt.Fprintf(&b, "--- %s\n%s", f.Name, f.Text)
	}
	return b.String()
}

// Every example configuration of NVIDIA's documents is imported, but for those of the golden file with an error: a template with
// placeholders; and so is what users write beside the examples: keys that NVIDIA's plugin ignores, unknown ones, flags and variables together,
// mistakes. What is imported is valid, or Import would have failed. The import of a result is the result: nothing is left to change.
func TestImport(t *testing.T) {
	for _, folder := range []string{"testdata/examples", "testdata/cases", "testdata/public"} {
		files, err := os.ReadDir(folder)
		check.NoError(t, err)
		var all strings.Builder
		for _, f := range files {
			text, err := os.ReadFile(filepath.Join(folder, f.Name()))
			check.NoError(t, err)
			r, err := nvidia.Import(nvidia.Input{Path: f.Name(), Text: text})
			fmt.Fprintf(&all, "=== %s: %s\n", f.Name(), render(r, err))
			for _, file := range r.Files {
				again, err := nvidia.Import(nvidia.Input{Path: "again.yaml", Text: file.Text, Format: nvidia.FromFile})
				if err != nil || len(again.Files) != 1 || settings(again.Files[0].Text) != settings(file.Text) {
					t.Errorf("%s %s: %v\n%s\nis again\n%v", f.Name(), file.Name, err, file.Text, again.Files)
				}
			}
		}
		goldenfile.Compare(t, folder+".golden", all.String())
	}
}

// Containers that get their devices by CDI lose their memory limits where the node's nvidia-container-toolkit is older than 1.20.1: the note about it is at the
// strategy, in whatever form the input has it, and nowhere else.
func TestMemoryLimitsAreNoted(t *testing.T) {
	for text, where := range map[string]string{
		"version: v1\nflags: {plugin: {deviceListStrategy: cdi-cri}}":                               "in.yaml:2: flags.plugin.deviceListStrategy",
		"version: v1\nflags: {plugin: {deviceListStrategy: [envvar, cdi-annotations]}}":             "in.yaml:2: flags.plugin.deviceListStrategy",
		"deviceListStrategy: cdi-annotations,cdi-cri":                                               "in.yaml:1: deviceListStrategy",
		"devicePlugin: {containers: {main: {env: [{name: DEVICE_LIST_STRATEGY, value: cdi-cri}]}}}": "in.yaml:1: env DEVICE_LIST_STRATEGY",
		"version: v1\nflags: {plugin: {deviceListStrategy: [envvar, volume-mounts]}}":               "",
		"version: v1": "",
		"deviceListStrategy: envvar\nmigStrategy: none": "",
	} {
		format := nvidia.FromValues
		if strings.HasPrefix(text, "version") {
			format = nvidia.FromFile
		}
		r, err := nvidia.Import(nvidia.Input{Path: "in.yaml", Text: []byte(text), Format: format})
		check.NoError(t, err)
		got := ""
		for _, n := range r.Notes {
			if strings.Contains(n.Text, "NVIDIA_GPU_MEMORY_LIMIT") && n.Effect == importer.Needed && strings.Contains(n.Text, "1.20.1") && strings.Contains(n.Remedy, "doctor") {
				got = n.Where
			}
		}
		if got != where {
			t.Errorf("%s\nthe note is at %q, want %q\n%s", text, got, where, render(r, err))
		}
	}
}

// settings is a file without comments.
func settings(text []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line != "" {
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}
