package nvidia_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// importFile imports a file of a folder.
func importFile(folder, name string) (importer.Result, error) {
	text, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		return importer.Result{}, err
	}
	return nvidia.Import(nvidia.Input{Path: name, Text: text})
}

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
// placeholders. What is imported is valid, or Import would have failed.
func TestExamples(t *testing.T) {
	goldens(t, "testdata/examples")
}

// What users write beside the examples: keys that NVIDIA's plugin ignores, unknown ones, flags and variables together, mistakes.
func TestCases(t *testing.T) {
	goldens(t, "testdata/cases")
}

func goldens(t *testing.T, folder string) {
	t.Helper()
	files, err := os.ReadDir(folder)
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, f := range files {
		r, err := importFile(folder, f.Name())
		fmt.Fprintf(&all, "=== %s: %s\n", f.Name(), render(r, err))
	}
	goldenfile.Compare(t, folder+".golden", all.String())
}

// The import of a result is the result: nothing is left to change.
func TestImportOfAResult(t *testing.T) {
	for _, folder := range []string{"testdata/examples", "testdata/cases"} {
		files, _ := os.ReadDir(folder)
		for _, f := range files {
			r, err := importFile(folder, f.Name())
			if err != nil {
				continue
			}
			for _, file := range r.Files {
				again, err := nvidia.Import(nvidia.Input{Path: "again.yaml", Text: file.Text, Format: nvidia.FromFile})
				if err != nil || len(again.Files) != 1 || settings(again.Files[0].Text) != settings(file.Text) {
					t.Errorf("%s %s: %v\n%s\nis again\n%v", f.Name(), file.Name, err, file.Text, again.Files)
				}
			}
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
