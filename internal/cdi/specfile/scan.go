package specfile

import (
	"os"
	"path/filepath"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// Entry is a file in a folder of CDI specifications, as container runtimes read it.
type Entry struct {
	Path    string
	Kind    string   // vendor and class; "" if the file is not valid
	Devices []string // in the order of the file
	Problem string   // why runtimes ignore the file; "" = they do not
}

// Scanner lists folders of specifications. It reads a file again when that has changed. The zero value is ready for use; it is not
// safe for concurrent use.
type Scanner struct {
	Skip  string             // path of a file that is not listed; "" = none
	files map[string]scanned // by path
}

type scanned struct {
	identity
	Entry
}

// Scan returns the specifications in the folders, in the order of the folders and by name. A folder that can't be read has none.
func (s *Scanner) Scan(folders ...string) []Entry {
	next := map[string]scanned{}
	var entries []Entry
	for _, folder := range folders {
		files, _ := os.ReadDir(folder) // sorted; nil if it is missing
		for _, f := range files {
			if !IsSpec(f.Name()) {
				continue
			}
			path := filepath.Join(folder, f.Name())
			if path == s.Skip {
				continue
			}
			info, err := os.Stat(path)
			if err != nil || info.IsDir() {
				continue
			}
			file, known := s.files[path]
			if id := identityOf(info); !known || file.identity != id {
				file = scanned{id, read(path, info)}
			}
			next[path] = file
			entries = append(entries, file.Entry)
		}
	}
	s.files = next
	return entries
}

// IsSpec reports whether runtimes take a file of that name for a specification.
func IsSpec(name string) bool {
	return strings.HasSuffix(name, ".json") || strings.HasSuffix(name, ".yaml")
}

// read reads a specification with the library of the runtimes.
func read(path string, info os.FileInfo) Entry {
	e := Entry{Path: path}
	switch {
	case !info.Mode().IsRegular():
		e.Problem = "not a regular file"
		return e
	case info.Size() > maxSize:
		e.Problem = "too large"
		return e
	}
	s, err := cdi.ReadSpec(path, 0)
	if err != nil {
		e.Problem = strings.ReplaceAll(err.Error(), "\n", "; ")
		return e
	}
	e.Kind, e.Devices = s.Kind, deviceNames(s.Spec)
	return e
}
