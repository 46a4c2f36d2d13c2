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
	"time"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
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

	readFile func(path string) ([]byte, error)

	mu      sync.Mutex
	claims  map[string]Claim     // by UID: what holds devices
	onDisk  map[string]Claim     // by UID: what the files have
	removed map[string]time.Time // by UID: when Remove was called, of the last minutes
	swept   time.Time            // when files without use were removed
	unread  map[string]*unread   // by UID
	renamed map[string]string    // by UID: that a file was set aside, for operators
}

// Open reads the claims in a directory, which may be missing. It fails if the directory can't be read now. A nil log is no log.
func Open(dir, bootID string, log *slog.Logger) (*Store, error) {
	s := newStore(dir, bootID, log)
	s.sweep()
	return s, s.Refresh()
}

func newStore(dir, bootID string, log *slog.Logger) *Store {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Store{
		dir: dir, bootID: bootID, log: log, latest: watch.NewValue([]Claim{}), claims: map[string]Claim{}, onDisk: map[string]Claim{},
		removed: map[string]time.Time{}, swept: time.Now(), unread: map[string]*unread{}, renamed: map[string]string{},
		readFile: func(path string) ([]byte, error) { return statefile.Read(path, maxSize, statefile.SharedDir) },
	}
}

// CheckUID returns an error for a text that can't be the UID of a claim, which is the name of its file.
func CheckUID(uid string) error {
	if uid == "" || len(uid) > maxUID || strings.Trim(strings.ToLower(uid), "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return fmt.Errorf("%q is not the UID of a claim", uid)
	}
	return nil
}

// Refresh reads the claims that another process has stored meanwhile, as the agent before this one in a rolling update, and tries again
// what could not be read so far: see Unread. It fails if the directory can't be read.
func (s *Store) Refresh() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("prepared claims: %w", err)
	}
	var read []Claim
	var failed []Unread
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
		default:
			damaged, _ := errors.AsType[*damagedError](err)
			failed = append(failed, newUnread(uid, s.Path(uid), err, damaged))
		}
	}
	s.setUnread(failed)
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

// read reads a claim. It fails with *damagedError if the content of the file is no record of the claim.
func (s *Store) read(uid string) (Claim, error) {
	text, err := s.readFile(s.Path(uid))
	if err != nil {
		return Claim{}, err
	}
	c, err := decode(text, uid, s.bootID)
	if err != nil {
		return Claim{}, &damagedError{text, err}
	}
	return c, nil
}

// decode returns the claim of a file. A file that holds nothing although it is of this boot is not the record of a
// claim.
func decode(text []byte, uid, bootID string) (c Claim, err error) {
	content, err := statefile.Unseal(text)
	if err != nil {
		return Claim{}, err
	}
	if err := json.Unmarshal(content, &c); err != nil {
		return Claim{}, err
	}
	if c.UID != uid {
		return Claim{}, fmt.Errorf("it has the claim %q", c.UID)
	}
	noDevice := func(r Result) bool { return r.Device == "" || r.At.GPU == "" }
	if c.Holds(bootID) && (len(c.Results) == 0 || slices.ContainsFunc(c.Results, noDevice)) {
		return Claim{}, errors.New("it has no devices, or one without a GPU")
	}
	return c, c.check()
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

// Reserve makes a claim hold its devices, in memory only.
func (s *Store) Reserve(c Claim) { s.change(func() { s.claims[c.UID] = c }) }

// Unreserve ends Reserve: the claim is again as it is on disk.
func (s *Store) Unreserve(uid string) {
	s.change(func() {
		if c, stored := s.onDisk[uid]; stored {
			s.claims[uid] = c
		} else {
			delete(s.claims, uid)
		}
	})
}

// Put stores a claim. When it returns nil, the claim is on disk; otherwise the claim is reserved.
func (s *Store) Put(c Claim) error {
	c.Version = max(c.Version, Version)
	s.Reserve(c)
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	text = statefile.Seal(text)
	err = statefile.Write(s.Path(c.UID), text)
	if err != nil && s.setAside(c.UID, "the record is made again") { // a directory
		err = statefile.Write(s.Path(c.UID), text)
	}
	if err != nil {
		return fmt.Errorf("prepared claim not stored: %w", err)
	}
	_ = os.Remove(s.marker(c.UID)) // the record counts in any case
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onDisk[c.UID] = c
	delete(s.removed, c.UID)
	delete(s.unread, c.UID)
	delete(s.renamed, c.UID)
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
