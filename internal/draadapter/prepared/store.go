package prepared

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/statefile"
	"github.com/tandem-gpu/tandem/internal/watch"
)

const (
	suffix = ".json"

	// maxSize limits a file in bytes: a claim has at most 32 results, each with a device of at most 32 attributes.
	maxSize = 1 << 20

	// maxUID limits the UID of a claim, which is a UUID.
	maxUID = 63
)

// Store has the prepared claims of a node: in memory, where each query is answered from, and on disk. It is safe for concurrent use, but
// the caller makes one change of a claim at a time. No lock is held while a disk is used, so that a file that hangs delays only its own
// claim.
type Store struct {
	dir    string
	bootID string
	log    *slog.Logger
	latest *watch.Value[[]Claim]

	mu       sync.Mutex
	claims   map[string]Claim     // by UID: what holds devices
	onDisk   map[string]Claim     // by UID: what the files have
	removed  map[string]time.Time // by UID: when Remove was called, of the last minutes
	swept    time.Time            // when files without use were removed
	warnings map[string]string
}

// Open reads the claims in a directory, which may be missing. A file that is not a claim is renamed to NAME.broken, with a warning. It
// fails if the directory can't be read now. A nil log is no log.
func Open(dir, bootID string, log *slog.Logger) (*Store, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Store{
		dir: dir, bootID: bootID, log: log, latest: watch.NewValue([]Claim{}), claims: map[string]Claim{}, onDisk: map[string]Claim{},
		removed: map[string]time.Time{}, swept: time.Now(), warnings: map[string]string{},
	}
	s.sweep()
	return s, s.Refresh()
}

// CheckUID returns an error for a text that can't be the UID of a claim, which is the name of its file.
func CheckUID(uid string) error {
	if uid == "" || len(uid) > maxUID || strings.Trim(strings.ToLower(uid), "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return fmt.Errorf("%q is not the UID of a claim", uid)
	}
	return nil
}

// Refresh reads the claims that another process has stored meanwhile, as the agent before this one in a rolling update.
func (s *Store) Refresh() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("prepared claims: %w", err)
	}
	var read []Claim
	for _, e := range entries {
		uid, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || CheckUID(uid) != nil || s.known(uid) {
			continue
		}
		s.restored(uid)
		switch c, err := s.read(uid); {
		case err == nil:
			read = append(read, c)
		case errors.Is(err, fs.ErrNotExist):
		case isBroken(err):
			s.setAside(uid, err)
		default:
			return fmt.Errorf("prepared claims: %w", err)
		}
	}
	if len(read) == 0 {
		return nil
	}
	s.change(func() {
		for _, c := range read {
			_, held := s.claims[c.UID]
			if _, removed := s.removed[c.UID]; !held && !removed {
				s.claims[c.UID], s.onDisk[c.UID] = c, c
			}
		}
	})
	return nil
}

func (s *Store) known(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, known := s.claims[uid]
	return known
}

// brokenError is the error of a file that is not a claim.
type brokenError struct{ reason string }

func (e *brokenError) Error() string { return e.reason }

func isBroken(err error) bool {
	_, broken := errors.AsType[*brokenError](err)
	return broken || statefile.IsContent(err) || errors.Is(err, syscall.ELOOP)
}

func (s *Store) read(uid string) (Claim, error) {
	text, err := statefile.Read(s.Path(uid), maxSize, statefile.SharedDir)
	if err != nil {
		return Claim{}, err
	}
	var c Claim
	if err := json.Unmarshal(text, &c); err != nil {
		return Claim{}, &brokenError{strings.ReplaceAll(err.Error(), "\n", " ")}
	}
	if c.UID != uid {
		return Claim{}, &brokenError{fmt.Sprintf("it has the claim %q", c.UID)}
	}
	return c, nil
}

// setAside renames a file that is not a claim.
func (s *Store) setAside(uid string, reason error) {
	path := s.Path(uid)
	line := fmt.Sprintf("%s is not a prepared claim (%v): renamed to %s; the kubelet's list of pods shows whether a pod has its devices", path, reason, filepath.Base(path)+".broken")
	if err := os.Rename(path, path+".broken"); err != nil {
		line = fmt.Sprintf("%s is not a prepared claim (%v), and can't be renamed (%v): remove it", path, reason, err)
	}
	s.mu.Lock()
	_, repeated := s.warnings[uid]
	s.warnings[uid] = line
	s.mu.Unlock()
	if !repeated {
		s.log.Warn(line)
	}
}

// Path returns the file of a claim.
func (s *Store) Path(uid string) string { return filepath.Join(s.dir, uid+suffix) }

// All returns the claims in the order of their UIDs, never nil. The result is not to be changed.
func (s *Store) All() []Claim { return s.latest.Load() }

// Watch returns the value that has All.
func (s *Store) Watch() *watch.Value[[]Claim] { return s.latest }

// Get returns the claim with a UID.
func (s *Store) Get(uid string) (Claim, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.claims[uid]
	return c, ok
}

// Warnings are the problems that an operator should know of, one line each.
func (s *Store) Warnings() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Values(s.warnings))
}

// Hold holds the devices of a claim, in memory only.
func (s *Store) Hold(c Claim) { s.change(func() { s.claims[c.UID] = c }) }

// Release ends Hold: the claim is again as it is on disk.
func (s *Store) Release(uid string) {
	s.change(func() {
		if c, stored := s.onDisk[uid]; stored {
			s.claims[uid] = c
		} else {
			delete(s.claims, uid)
		}
	})
}

// Put stores a claim. When it returns nil, the claim is on disk; otherwise the claim is held, as by Hold.
func (s *Store) Put(c Claim) error {
	c.Version = max(c.Version, Version)
	s.Hold(c)
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	if err := statefile.Write(s.Path(c.UID), append(text, '\n')); err != nil {
		return fmt.Errorf("prepared claim not stored: %w", err)
	}
	_ = os.Remove(s.trace(c.UID)) // the record counts in any case
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onDisk[c.UID] = c
	delete(s.removed, c.UID)
	delete(s.warnings, c.UID)
	return nil
}

// change makes a change in memory, and publishes it.
func (s *Store) change(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
	next := slices.AppendSeq([]Claim{}, maps.Values(s.claims)) // not nil: they are read
	slices.SortFunc(next, func(a, b Claim) int { return cmp.Compare(a.UID, b.UID) })
	s.latest.Store(next)
}
