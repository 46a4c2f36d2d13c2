package recordfile_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/recordfile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

type content struct {
	Text string `json:"text"`
}

func file(path string, problems *problemset.Set) *recordfile.File[string] {
	return recordfile.New(recordfile.Options[string]{
		Path: path, MaxBytes: 100, Problems: problems, Code: problem.ProofState,
		Parse: func(text []byte) (string, error) {
			var is content
			if json.Unmarshal(text, &is) != nil {
				return "", errors.New("it is damaged")
			}
			return is.Text, nil
		},
		Encode: func(s string) ([]byte, error) { return json.Marshal(content{s}) },
		Name:   "the record of proofs", Without: "no GPU is proved", Damaged: "no GPU counts as proved",
	})
}

// A record is read once, and written when it changes.
func TestFile(t *testing.T) {
	var problems problemset.Set
	path := filepath.Join(t.TempDir(), "record")
	f := file(path, &problems)
	record := "first"
	check.NoError(t, f.Load(&record))
	if err := f.Store(record); err != nil || exists(path) {
		t.Errorf("a record that has not changed is written: %v", err)
	}
	check.NoError(t, f.Store("second"))
	if err := f.Load(&record); err != nil || record != "first" {
		t.Errorf("loaded again: %s, %v", record, err)
	}
	want := "{\"text\":\"second\",\n  \"checksum\": \"crc32c:f3850807\"\n}\n"
	text, err := os.ReadFile(path)
	if err != nil || string(text) != want {
		t.Errorf("on disk: %q, %v", text, err)
	}
	before := statefile.IdentityOf(path)
	if err := f.Store("second"); err != nil || statefile.IdentityOf(path) != before {
		t.Errorf("the same is written again: %v", err)
	}
	check.NoError(t, os.WriteFile(path, []byte(`{"text":"third"}`), 0o600)) // by an earlier version
	if err := file(path, &problems).Load(&record); err != nil || record != "third" || len(problems.List()) != 0 {
		t.Errorf("%s, %v, %v", record, err, problems.List())
	}
}

// A file that someone has removed, also with its folder, is written again with the next pass.
func TestRemovedFileIsWrittenAgain(t *testing.T) {
	var problems problemset.Set
	path := filepath.Join(t.TempDir(), "state", "record")
	f := file(path, &problems)
	check.NoError(t, f.Load(new(string)))
	check.NoError(t, f.Store("a"))
	later := file(path, &problems)
	check.NoError(t, later.Load(new(string)))
	for _, one := range []*recordfile.File[string]{f, later} {
		check.NoError(t, os.RemoveAll(filepath.Dir(path)))
		if err := one.Store("a"); err != nil || !exists(path) {
			t.Errorf("the file is not written again: %v", err)
		}
	}
}

// A record whose checksum is of other content can't be read.
func TestDamagedRecordIsNotRead(t *testing.T) {
	var problems problemset.Set
	path := filepath.Join(t.TempDir(), "record")
	f := file(path, &problems)
	check.NoError(t, f.Load(new(string)))
	check.NoError(t, f.Store("GPU-1"))
	text, err := os.ReadFile(path)
	check.NoError(t, err)
	check.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(text), "GPU-1", "GPU-0", 1)), 0o600))
	record := "as before"
	later := file(path, &problems)
	if err := later.Load(&record); !errors.Is(err, statefile.ErrChecksum) || later.Loaded() || record != "as before" {
		t.Errorf("%v, %s", err, record)
	}
	if all := problems.List(); len(all) != 1 || !strings.Contains(all[0].Text, path) {
		t.Errorf("%v", all)
	}
}

// What can't be read is not known, which is a problem until it is read.
func TestUnread(t *testing.T) {
	var problems problemset.Set
	path := filepath.Join(t.TempDir(), "record")
	check.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
	f, record := file(path, &problems), "as before"
	if err := f.Load(&record); err == nil || f.Loaded() || record != "as before" {
		t.Errorf("damaged: %v, %s", err, record)
	}
	want := "no GPU is proved: the record of proofs " + path + " can't be read: it is damaged"
	if all := problems.List(); len(all) != 1 || all[0].Text != want || all[0].Object != path || !strings.Contains(all[0].Remedy, "then no GPU counts as proved") {
		t.Errorf("%v", all)
	}
	check.NoError(t, os.Remove(path))
	if err := f.Load(&record); err != nil || !f.Loaded() || len(problems.List()) != 0 {
		t.Errorf("removed: %v, %v", err, problems.List())
	}
	check.NoError(t, os.Mkdir(path, 0o700))
	if err := f.Store("next"); err == nil || len(problems.List()) != 1 {
		t.Errorf("a folder: %v, %v", err, problems.List())
	}
	check.NoError(t, os.Remove(path))
	if err := f.Store(record); err != nil || len(problems.List()) != 0 {
		t.Errorf("written again: %v, %v", err, problems.List())
	}
}

// Without a path nothing is written.
func TestForgotten(t *testing.T) {
	f, record := file("", nil), "as before"
	if err := errors.Join(f.Load(&record), f.Store("next")); err != nil || !f.Loaded() || record != "as before" {
		t.Errorf("%v, %s", err, record)
	}
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }
