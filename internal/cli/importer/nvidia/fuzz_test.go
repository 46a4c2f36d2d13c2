package nvidia_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/test/check"
)

// Whatever the text is, Import returns: an error, or files that are imported again without one.
func FuzzImport(f *testing.F) {
	files, err := filepath.Glob("testdata/[ce]*/*")
	check.NoError(f, err)
	for _, path := range files {
		text, err := os.ReadFile(path)
		check.NoError(f, err)
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := nvidia.Import(nvidia.Input{Path: "f", Text: text})
		if err != nil {
			return
		}
		for _, file := range r.Files {
			if _, err := nvidia.Import(nvidia.Input{Path: "again", Text: file.Text, Format: nvidia.FromFile}); err != nil {
				t.Errorf("%v\n%s", err, file.Text)
			}
		}
	})
}
