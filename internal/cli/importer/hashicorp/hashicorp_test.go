package hashicorp_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/importer/hashicorp"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// Every example configuration of the documents of nomad-device-nvidia is imported, but for one that no parser of HCL accepts; and so are
// configurations of agents in HCL and JSON.
func TestImport(t *testing.T) {
	for _, folder := range []string{"testdata/examples", "testdata/cases", "testdata/public"} {
		files, err := os.ReadDir(folder)
		check.NoError(t, err)
		var all strings.Builder
		for _, f := range files {
			text, err := os.ReadFile(filepath.Join(folder, f.Name()))
			check.NoError(t, err)
			r, err := hashicorp.Import(hashicorp.Input{Path: f.Name(), Text: text, Plugin: "nomad-gpu"})
			fmt.Fprintf(&all, "=== %s\n", f.Name())
			if err != nil {
				fmt.Fprintf(&all, "error:\n%v\n", err)
			}
			for _, file := range r.Files {
				fmt.Fprintf(&all, "%s\n", file.Text)
				again, err := hashicorp.Import(hashicorp.Input{Path: f.Name(), Text: file.Text, Plugin: "nomad-gpu"})
				if err != nil || block(again.Files[0].Text) != block(file.Text) {
					t.Errorf("%s: %v\n%s\nis again\n%s", f.Name(), err, file.Text, again.Files)
				}
			}
		}
		goldenfile.Compare(t, folder+".golden", all.String())
	}
}

// block is a text without comments.
func block(text []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		b.WriteString(strings.TrimSpace(line) + "\n")
	}
	return strings.TrimSpace(b.String())
}

// The keys of an imported block are those that the running plugin would have.
func TestKeys(t *testing.T) {
	keys, err := hashicorp.Keys(hashicorp.Input{Path: "c.hcl", Text: []byte(`plugin "nvidia" { config { ignored_gpu_ids = ["GPU-7", "x"] } }`), Plugin: "nomad-gpu"})
	check.NoError(t, err)
	s, _, err := config.NewBlock(keys).Read()
	if err != nil || len(s.Core.Exclude) != 1 || s.Core.Exclude[0] != "GPU-7" {
		t.Errorf("%v, %v", s.Core.Exclude, err)
	}
}
