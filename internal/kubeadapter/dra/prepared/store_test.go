package prepared

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, "boot", nil)
	check.NoError(t, err)
	return s
}

func claim(uid string) Claim {
	return Claim{
		Version: Version, BootID: "boot", Namespace: "ns", Name: "n-" + uid, UID: uid, State: Complete, Since: time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC),
		Results: []Result{{
			Request: "gpu", Pool: "node1", Device: "gpu-1", Unit: "GPU-1::0", At: gpu.WholeGPU("GPU-1"), ShareID: "s", Sharing: "mps", Shares: 2,
			MPS: &MPS{Pool: "gpu.mps", Env: []string{"A=b"}}, CDI: []string{"k=GPU-1"}, Published: json.RawMessage(`{"name":"gpu-1"}`),
		}},
	}
}

// The file of a claim, whose names never change: an agent of another version reads it. One of an earlier version has no
// checksum.
const file = `{
  "version": 1,
  "bootID": "boot",
  "namespace": "ns",
  "name": "n-a",
  "uid": "a",
  "state": "complete",
  "since": "2026-11-20T10:00:00Z",
  "results": [
    {
      "request": "gpu",
      "pool": "node1",
      "device": "gpu-1",
      "shareID": "s",
      "unit": "GPU-1::0",
      "at": {
        "GPU": "GPU-1",
        "GI": 4294967295,
        "CI": 4294967295
      },
      "sharing": "mps",
      "shares": 2,
      "mps": {
        "pool": "gpu.mps",
        "env": [
          "A=b"
        ]
      },
      "cdi": [
        "k=GPU-1"
      ],
      "published": {
        "name": "gpu-1"
      }
    }
  ]
}
`

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dra", "claims")
	s := open(t, dir)
	check.NoError(t, s.Put(claim("b")))
	check.NoError(t, s.Put(claim("a")))
	s.Reserve(claim("c"))
	uids := func(s *Store) (text string) {
		for _, c := range s.All() {
			text += c.UID
		}
		return text
	}
	if got := uids(s); got != "abc" {
		t.Errorf("%q", got)
	}
	text, err := os.ReadFile(s.Path("a"))
	check.NoError(t, err)
	if diff := cmp.Diff(strings.TrimSuffix(file, "\n}\n")+",\n  \"checksum\": \"crc32c:b8d73d5d\"\n}\n", string(text)); diff != "" {
		t.Error(diff)
	}
	s.Unreserve("c")
	changed := claim("b")
	changed.State = Started
	s.Reserve(changed)
	s.Unreserve("b") // as on disk
	later := open(t, dir)
	for _, one := range []*Store{s, later} {
		compact := cmp.Transformer("compact", func(r json.RawMessage) string { return strings.Join(strings.Fields(string(r)), "") })
		if diff := cmp.Diff(claim("b"), mustGet(t, one, "b"), compact); diff != "" || uids(one) != "ab" {
			t.Error(diff, uids(one))
		}
	}
	check.NoError(t, later.Remove("b"))
	check.NoError(t, later.Remove("b"))
	if gone := s.Vanished(); len(gone) != 1 || gone[0].UID != "b" || !later.Removed("b") || s.Removed("b") {
		t.Errorf("%v", gone)
	}
	check.NoError(t, later.Put(claim("d")))
	check.NoError(t, s.Refresh())
	if got := uids(s); got != "abd" || uids(later) != "ad" {
		t.Errorf("%q, %q", got, uids(later))
	}
	check.NoError(t, s.Remove("d"))
	check.NoError(t, later.Put(claim("d"))) // again, by the other process
	check.NoError(t, s.Refresh())
	if got := uids(s); got != "abd" {
		t.Errorf("%q", got)
	}
	check.NoError(t, s.Remove("d"))
	check.NoError(t, s.Remove("a"))
	check.NoError(t, s.Remove("b"))
	if all := s.All(); all == nil || len(all) > 0 {
		t.Errorf("without claims: %#v", all)
	}
}

// A store shows which claims another process has removed: not those that one has stored since, and not those whose file was removed by hand. What
// shows it is removed after some minutes.
func TestRemovedElsewhere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	s, other := open(t, dir), open(t, dir)
	check.NoError(t, other.Remove("never-stored")) // there is no directory
	for _, uid := range []string{"a", "b", "c"} {
		check.NoError(t, s.Put(claim(uid)))
	}
	check.NoError(t, other.Remove("a"))
	check.NoError(t, other.Remove("b"))
	check.NoError(t, other.Put(claim("b")))
	check.NoError(t, os.Remove(s.Path("c")))
	check.NoError(t, os.Remove(s.Path("b")))
	for uid, want := range map[string]bool{"a": true, "b": false, "c": false, "never-stored": false} {
		if s.RemovedElsewhere(uid) != want {
			t.Errorf("%s: %t", uid, !want)
		}
	}
	if gone := s.Vanished(); len(gone) != 3 {
		t.Errorf("%v", gone)
	}
	s.Forget("a")
	if _, known := s.Get("a"); known || len(s.Vanished()) != 2 {
		t.Errorf("%v", s.All())
	}
	open(t, dir)
	if !s.RemovedElsewhere("a") {
		t.Error("a claim of now is not known any more")
	}
	check.NoError(t, os.Chtimes(s.marker("a"), time.Time{}, time.Now().Add(-2*rememberRemoved)))
	s.swept = time.Now().Add(-2 * rememberRemoved)
	check.NoError(t, s.Remove("c"))
	if s.RemovedElsewhere("a") {
		t.Error("a file is left of a claim of long ago")
	}
}

// A claim that this process has removed and another one has stored since is held by both: the other one may end first.
func TestStoredElsewhereAfterRemove(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	s, other := open(t, dir), open(t, dir)
	check.NoError(t, s.Put(claim("a")))
	check.NoError(t, s.Remove("a"))
	check.NoError(t, s.Refresh())
	if _, known := s.Get("a"); known || !s.Removed("a") {
		t.Error("a removed claim is known")
	}
	check.NoError(t, other.Put(claim("a")))
	check.NoError(t, s.Refresh())
	if _, known := s.Get("a"); !known || s.Removed("a") || len(s.All()) != 1 {
		t.Errorf("the claim of another process is not known: %v", s.All())
	}
}

func mustGet(t *testing.T, s *Store, uid string) Claim {
	t.Helper()
	c, ok := s.Get(uid)
	if !ok {
		t.Fatalf("no claim %s", uid)
	}
	return c
}

// A file that can't be read, or is no record of a claim, concerns no other: it is named, and holds whatever it may until Settle, which sets it
// aside. Fields of a later version stay in a file that is written again; what killed processes left is removed.
func TestFilesOfOthers(t *testing.T) {
	dir := t.TempDir()
	later := strings.Replace(file, `"version": 1,`, `"version": 7, "priority": {"of": "a later version"},`, 1)
	_, results, _ := strings.Cut(file, `"results":`)
	empty := func(uid, results string) string {
		return `{"uid":"` + uid + `","bootID":"boot","results":` + results + `}`
	}
	for name, text := range map[string]string{
		"a.json": later, "b.json": "", "c.json": `{"uid":"other"}`, "d.json": `{"results":3}`, "e.json": "[]",
		"k.json": empty("k", "[]"), "l.json": empty("l", "null"), "m.json": strings.Replace(empty("m", results), `"GPU-1"`, `""`, 2), "n.json": `{"uid":"n","bootID":"earlier"}`,
		".f.json123": "half", "note.txt": "", "G H.json": "", ".g.json9": "written now",
	} {
		check.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	check.NoError(t, os.Chtimes(filepath.Join(dir, ".f.json123"), time.Time{}, time.Now().Add(-2*time.Hour)))
	check.NoError(t, syscall.Mkfifo(filepath.Join(dir, "h.json"), 0o600))
	check.NoError(t, os.Symlink("/etc/passwd", filepath.Join(dir, "i.json")))
	check.NoError(t, os.Mkdir(filepath.Join(dir, "j.json"), 0o700))
	s := open(t, dir)
	if all := s.All(); len(all) != 2 || all[0].Version != 7 || all[1].UID != "n" {
		t.Fatalf("%v", all)
	}
	const bad = "bcdehijklm"
	if got := uidsOf(s.Unread()); got != bad || uidsOf(ReadProblems(dir, "boot")) != bad || len(problem.Lines(s.Problems())) != len(bad) {
		t.Errorf("%s, %q", got, problem.Lines(s.Problems()))
	}
	if _, err := os.Lstat(filepath.Join(dir, "b.json")); err != nil {
		t.Error(err)
	}
	check.NoError(t, os.Remove(filepath.Join(dir, "c.json")))                                                                         // by an operator
	check.NoError(t, os.WriteFile(filepath.Join(dir, "d.json"), []byte(strings.ReplaceAll(file, `"uid": "a"`, `"uid": "d"`)), 0o600)) // readable now
	check.NoError(t, s.Refresh())
	if got := uidsOf(s.Unread()); got != "behijklm" || mustGet(t, s, "d").Name != "n-a" {
		t.Errorf("%s, %v", got, s.All())
	}
	check.NoError(t, s.Put(claim("j"))) // the directory is in its way
	s.SetAside(s.Unread())
	if got := s.Unread(); got != nil || len(problem.Lines(s.Problems())) != 7 {
		t.Errorf("%v, %q", got, problem.Lines(s.Problems()))
	}
	for _, name := range []string{"b", "e", "h", "i", "j", "k"} {
		if _, err := os.Lstat(filepath.Join(dir, name+".json.broken")); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, ".f.json123")); err == nil {
		t.Error("a temporary file is left")
	}
	if _, err := os.Lstat(filepath.Join(dir, ".g.json9")); err != nil {
		t.Error("a temporary file that may be in use was removed")
	}
	c := mustGet(t, s, "a")
	c.State = Started
	check.NoError(t, s.Put(c))
	text, err := os.ReadFile(s.Path("a"))
	check.NoError(t, err)
	var fields map[string]any
	check.NoError(t, json.Unmarshal(text, &fields))
	if fields["state"] != "started" || fields["version"] != 7.0 || fields["priority"] == nil || fields["checksum"] == nil {
		t.Errorf("%s", text)
	}
	check.NoError(t, s.Put(claim("b")))
	if n := len(problem.Lines(s.Problems())); n != 6 {
		t.Errorf("%d warnings after the claim was stored again", n)
	}
}

func uidsOf(files []Unread) (text string) {
	for _, u := range files {
		text += u.UID
	}
	return text
}

// A record that can't be read now, by its permissions or because the disk fails, is tried again with each Refresh. Remove needs not to read it.
// One that holds nothing and can't be renamed stays, and is named.
func TestRecordThatCanNotBeRead(t *testing.T) {
	dir := t.TempDir()
	before := open(t, dir)
	for _, uid := range []string{"a", "b", "c"} {
		check.NoError(t, before.Put(claim(uid)))
	}
	fails := map[string]error{"a": syscall.EACCES, "b": syscall.EIO}
	s := newStore(dir, "boot", nil)
	read := s.readFile
	s.readFile = func(path string) ([]byte, error) {
		if err := fails[strings.TrimSuffix(filepath.Base(path), suffix)]; err != nil {
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		}
		return read(path)
	}
	check.NoError(t, s.Refresh())
	if all := s.All(); len(all) != 1 || all[0].UID != "c" || uidsOf(s.Unread()) != "ab" {
		t.Fatalf("%v, %v", all, s.Unread())
	}
	if lines := problem.Lines(s.Problems()); !strings.HasPrefix(lines[0], s.Path("a")+" can't be read as a prepared claim: permission denied; ") || !strings.Contains(lines[1], "input/output error") {
		t.Errorf("%q", lines)
	}
	check.NoError(t, s.Remove("b"))
	check.NoError(t, s.Refresh())
	if got := uidsOf(s.Unread()); got != "a" {
		t.Errorf("%s", got)
	}
	for _, taken := range []string{".broken", ".broken.1", ".broken.2", ".broken.3", ".broken.4"} { // so that the rename fails
		check.NoError(t, os.MkdirAll(s.Path("a")+taken+"/full", 0o700))
	}
	s.SetAside(s.Unread())
	check.NoError(t, s.Refresh())
	if lines := problem.Lines(s.Problems()); s.Unread() != nil || len(lines) != 1 || !strings.Contains(lines[0], "no pod has the claim, and the file can't be renamed") {
		t.Errorf("%v, %q", s.Unread(), lines)
	}
	delete(fails, "a")
	check.NoError(t, s.Refresh())
	if all := s.All(); len(all) != 2 || len(problem.Lines(s.Problems())) != 0 {
		t.Errorf("%v, %q", all, problem.Lines(s.Problems()))
	}
}

func TestCheckUID(t *testing.T) {
	for uid, ok := range map[string]bool{
		"8f1d0c9e-6f5a-4b63-9d3b-0f0a3a3f0001": true, "A-1": true, "": false, "..": false, "a/b": false, "a.json": false, strings.Repeat("a", 64): false,
	} {
		if err := CheckUID(uid); (err == nil) != ok {
			t.Errorf("%q: %v", uid, err)
		}
	}
}
