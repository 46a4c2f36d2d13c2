package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What an archive contains depends on names, content and the owner's execute bit alone.
func TestPackIsReproducible(t *testing.T) {
	for _, suffix := range []string{".tar.gz", ".zip"} {
		var archives [][]byte
		for i, mode := range []os.FileMode{0o755, 0o700} {
			root := tree(t, map[string]string{"x/b": "two", "a": "one", "x/program": "\x7fELF"})
			if err := os.Chmod(root+"/x/program", mode); err != nil {
				t.Fatal(err)
			}
			at := time.Unix(1e9+int64(i), 0)
			if err := os.Chtimes(root+"/a", at, at); err != nil {
				t.Fatal(err)
			}
			output := filepath.Join(t.TempDir(), "x"+suffix)
			if err := packCommand(t.Context(), []string{root, output, "1700000000"}); err != nil {
				t.Fatal(err)
			}
			content, err := os.ReadFile(output)
			if err != nil {
				t.Fatal(err)
			}
			archives = append(archives, content)
		}
		if !bytes.Equal(archives[0], archives[1]) {
			t.Errorf("%s: two archives of the same files differ", suffix)
		}
		if got, want := list(t, suffix, archives[0]), "a -rw-r--r-- 2023-11-14; x/b -rw-r--r-- 2023-11-14; x/program -rwxr-xr-x 2023-11-14"; got != want {
			t.Errorf("%s: %s, want %s", suffix, got, want)
		}
	}
}

func list(t *testing.T, suffix string, content []byte) string {
	t.Helper()
	var lines []string
	add := func(name string, mode os.FileMode, at time.Time) {
		lines = append(lines, name+" "+mode.String()+" "+at.UTC().Format(time.DateOnly))
	}
	if suffix == ".zip" {
		archive, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range archive.File {
			add(f.Name, f.Mode(), f.Modified)
		}
		return strings.Join(lines, "; ")
	}
	plain, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewReader(plain)
	for header, err := archive.Next(); err == nil; header, err = archive.Next() {
		add(header.Name, header.FileInfo().Mode(), header.ModTime)
		if header.Uid != 0 || header.Gid != 0 || header.Uname != "" {
			t.Errorf("%s belongs to %d %q", header.Name, header.Uid, header.Uname)
		}
	}
	return strings.Join(lines, "; ")
}

func TestPackRefuses(t *testing.T) {
	link := t.TempDir()
	if err := os.Symlink("/etc/passwd", link+"/x"); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"a link": {link, "OUT", "1"}, "no files": {t.TempDir(), "OUT", "1"}, "no folder": {link + "/none", "OUT", "1"}, "no time": {link, "OUT", "now"},
	} {
		output := filepath.Join(t.TempDir(), "x.zip")
		args[1] = output
		if err := packCommand(t.Context(), args); err == nil {
			t.Errorf("%s: no error", name)
		}
		if _, err := os.Stat(output); err == nil {
			t.Errorf("%s: a file is left", name)
		}
	}
}
