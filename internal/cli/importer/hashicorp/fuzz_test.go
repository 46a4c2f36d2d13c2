package hashicorp_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/importer/hashicorp"
	"github.com/tandem-gpu/tandem/test/check"
)

// Whatever the text is, Import returns: an error, or blocks that are imported again without one.
func FuzzImport(f *testing.F) {
	files, err := filepath.Glob("testdata/[ce]*/*")
	check.NoError(f, err)
	for _, path := range files {
		text, err := os.ReadFile(path)
		check.NoError(f, err)
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := hashicorp.Import(hashicorp.Input{Path: "f", Text: text, Plugin: "nomad-gpu"})
		if err != nil {
			return
		}
		for _, file := range r.Files {
			if _, err := hashicorp.Import(hashicorp.Input{Path: "again", Text: file.Text, Plugin: "nomad-gpu"}); err != nil {
				t.Errorf("%v\n%s", err, file.Text)
			}
		}
	})
}
