package prepared

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// Unread is a file that should be the record of a claim and can't be read, or is none: another user owns it, the disk fails, it is damaged. What
// the claim holds is not known from it.
type Unread struct {
	UID  string // of the claim; "" if Path is the directory
	Path string
	Err  error

	Namespace string // of the claim, as far as a damaged file shows it; "" = not known
	text      string // of a damaged file that is complete, in lower case
}

// damagedError means that a file has this text, which is no record of its claim.
type damagedError struct {
	text []byte
	err  error
}

func (e *damagedError) Error() string { return e.err.Error() }

func (e *damagedError) Unwrap() error { return e.err }

// namespaceIn matches the namespace in the text of a claim, which may be no JSON any more.
var namespaceIn = regexp.MustCompile(`(?m)^  "namespace": "([^"\n]+)",$`)

func newUnread(uid, path string, err error, damaged *damagedError) Unread {
	u := Unread{UID: uid, Path: path, Err: err}
	if damaged == nil {
		return u
	}
	if found := namespaceIn.FindSubmatch(damaged.text); found != nil {
		u.Namespace = string(found[1])
	}
	if isComplete(damaged.text) {
		u.text = strings.ToLower(string(damaged.text))
	}
	return u
}

// isComplete reports whether a text is not cut, and has no part that is not text, but for one character: a disk may
// change a bit. The file of a claim has each device in several places. In a complete one some of them are left.
func isComplete(text []byte) bool {
	others := 0
	for _, r := range string(text) {
		if r != '\n' && !unicode.IsPrint(r) {
			others++
		}
	}
	return bytes.HasSuffix(text, []byte("}\n")) && others <= 1
}

// Names reports whether a damaged file names a device, so that the claim may hold it. A claim whose file names no
// device may hold any.
func (u Unread) Names(id gpu.DeviceID) bool {
	return id != "" && strings.Contains(u.text, strings.ToLower(string(id)))
}

// String is a line for operators, without a remedy.
func (u Unread) String() string {
	reason := u.Err
	if e, ok := errors.AsType[*fs.PathError](u.Err); ok { // else the path is there twice
		reason = e.Err
	}
	return fmt.Sprintf("%s can't be read as a prepared claim: %s", u.Path, strings.Join(strings.Fields(reason.Error()), " "))
}

type unread struct {
	Unread
	left error // why the file could not be set aside, although no pod has the claim
}

// ReadProblems returns the files in a directory that can't be read. It changes nothing.
func ReadProblems(dir, bootID string) []Unread {
	s := newStore(dir, bootID, nil)
	if err := s.Refresh(); err != nil {
		return []Unread{{Path: dir, Err: err}}
	}
	return s.Unread()
}

// Unread returns the files that could not be read when that was tried last, in the order of the UIDs, without those of which SetAside was called. A
// claim of one may hold anything.
func (s *Store) Unread() (all []Unread) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, u := range s.unread {
		if _, held := s.claims[uid]; !held && u.left == nil {
			all = append(all, u.Unread)
		}
	}
	slices.SortFunc(all, func(a, b Unread) int { return cmp.Compare(a.UID, b.UID) })
	return all
}

// setUnread replaces the files that can't be read by those that Refresh has found, and logs the new ones.
func (s *Store) setUnread(failed []Unread) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.unread
	s.unread = map[string]*unread{}
	for _, f := range failed {
		_, held := s.claims[f.UID]
		if _, removed := s.removed[f.UID]; held || removed { // meanwhile
			continue
		}
		one := &unread{Unread: f}
		if was := before[f.UID]; was != nil {
			one.left = was.left
		} else {
			s.log.Warn(one.problem().String())
		}
		s.unread[f.UID] = one
	}
}

// SetAside renames files that can't be read and whose claims no pod has: they hold nothing.
func (s *Store) SetAside(files []Unread) {
	for _, f := range files {
		s.setAside(f.UID, "no pod has the claim")
	}
}

// setAside renames the file of a claim to NAME.broken, if it could not be read, and reports whether it is gone.
func (s *Store) setAside(uid, why string) bool {
	s.mu.Lock()
	one := s.unread[uid]
	s.mu.Unlock()
	if one == nil {
		return false
	}
	name, err := statefile.SetAside(one.Path, "broken")
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		logged := one.left != nil
		if one.left = err; !logged {
			s.log.Warn(one.problem().String())
		}
		return false
	}
	delete(s.unread, uid)
	s.renamed[uid] = fmt.Sprintf("%s; %s, and the file was renamed to %s", one, why, filepath.Base(name))
	s.log.Warn(s.renamed[uid])
	return true
}

// problem is what operators see of it.
func (u *unread) problem() problem.Problem {
	what := "any GPU of DRA"
	if u.text != "" {
		what = "each GPU that the file names"
	}
	p := problem.Problem{
		Code: problem.ClaimUnread, Object: u.Path,
		Text:   u.String() + "; the claim may have " + what + ", and no other work gets it until that is known",
		Remedy: "let the agent read the file, or remove it if no pod has the claim",
	}
	if u.left != nil {
		p.Text, p.Remedy = fmt.Sprintf("%s; no pod has the claim, and the file can't be renamed (%v)", u, u.left), "remove it"
	}
	return p
}

// Problems are those that an operator should know of.
func (s *Store) Problems() (all []problem.Problem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, text := range s.renamed {
		all = append(all, problem.Problem{Code: problem.ClaimUnread, Object: uid, Text: text})
	}
	for _, u := range s.unread {
		all = append(all, u.problem())
	}
	slices.SortFunc(all, func(a, b problem.Problem) int { return strings.Compare(a.Text, b.Text) })
	return all
}
