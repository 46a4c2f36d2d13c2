// Package goldenfile compares what tests produce with files in the repository. "go test PACKAGE -update" writes the files.
package goldenfile

import (
	"errors"
	"flag"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Update is whether the files are to be written.
var Update = flag.Bool("update", false, "write the golden files")

// Compare fails the test if the file at path has another text, line by line. A file that does not exist is empty.
func Compare(t testing.TB, path, got string) {
	t.Helper()
	if *Update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s differs (-file, +now); go test -update writes it:\n%s", path, diff)
	}
}
