package prepared

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/check"
)

// A record of an earlier version, without a checksum, is read. One that names different devices for one result is not:
// each line has one change of the file.
func TestRecordsWithoutChecksumAreCompared(t *testing.T) {
	read := func(text string) *Store {
		dir := t.TempDir()
		check.NoError(t, os.WriteFile(filepath.Join(dir, "a.json"), []byte(text), 0o600))
		return open(t, dir)
	}
	full := strings.Replace(file, `"name": "gpu-1"`, `"name": "gpu-1", "attributes": {"uuid": {"string": "GPU-1"}, "parentUUID": {"string": ""}}`, 1)
	for _, text := range []string{file, full} {
		if s := read(text); len(s.All()) != 1 || s.Unread() != nil {
			t.Errorf("%v", s.Unread())
		}
	}
	for was, is := range map[string]string{
		`"GPU": "GPU-1"`: `"GPU": "GPU-0"`, `"GI": 4294967295`: `"GI": 4294967294`, `"device": "gpu-1"`: `"device": "gpu-0"`,
		`"unit": "GPU-1::0"`: `"unit": "GPU-0::0"`, `"k=GPU-1"`: `"k=GPU-0"`, `"string": "GPU-1"`: `"string": "GPU-0"`,
		`"parentUUID": {"string": ""}`: `"parentUUID": {"string": "GPU-0"}`,
	} {
		text := strings.Replace(full, was, is, 1)
		if text == full {
			t.Fatalf("%s is not in the file", was)
		}
		if s := read(text); len(s.Unread()) != 1 || len(s.All()) != 0 {
			t.Errorf("%s: %v", is, s.All())
		}
	}
}

// Whichever bit of a record is changed: it is read as it was, or as one that is damaged. What is damaged still names
// the GPU. Only at its end a change is as if the file was cut, and the claim may hold any GPU.
func TestEachBitOfARecord(t *testing.T) {
	dir := t.TempDir()
	check.NoError(t, open(t, dir).Put(claim("a")))
	path := filepath.Join(dir, "a.json")
	text, err := os.ReadFile(path)
	check.NoError(t, err)
	for i := range text {
		for bit := range 8 {
			s := newStore(dir, "boot", nil)
			damaged := append([]byte{}, text...)
			damaged[i] ^= 1 << bit
			s.readFile = func(string) ([]byte, error) { return damaged, nil }
			check.NoError(t, s.Refresh())
			all, unread := s.All(), s.Unread()
			switch {
			case len(all)+len(unread) != 1:
				t.Fatalf("byte %d, bit %d: %v, %v", i, bit, all, unread)
			case len(all) == 1:
				r := all[0].Results[0]
				if r.At != gpu.WholeGPU("GPU-1") || r.Unit != "GPU-1::0" || r.CDI[0] != "k=GPU-1" || r.Device != "gpu-1" || all[0].BootID != "boot" {
					t.Errorf("byte %d, bit %d: %+v", i, bit, all[0])
				}
			case unread[0].Names("GPU-1") != (i < len(text)-len("}\n")):
				t.Errorf("byte %d, bit %d: the record names the GPU: %t", i, bit, unread[0].Names("GPU-1"))
			}
		}
	}
}
