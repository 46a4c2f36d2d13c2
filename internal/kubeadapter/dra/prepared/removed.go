package prepared

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

const (
	// staleAfter is the age of a temporary file that no process writes any more.
	staleAfter = time.Hour

	// rememberRemoved is longer than a query of the kubelet and any call take.
	rememberRemoved = 10 * time.Minute

	// markerSuffix ends the name of the empty file that is left of a claim that was removed: during an update two processes use the directory, and
	// the other one would take the record for lost.
	markerSuffix = ".removed"
)

// marker returns the file that is left of a claim that was removed.
func (s *Store) marker(uid string) string { return filepath.Join(s.dir, "."+uid+markerSuffix) }

// Remove removes a claim from disk, and then from memory. A claim that is not there is no error.
func (s *Store) Remove(uid string) error {
	if f, err := os.OpenFile(s.marker(uid), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|statefile.SharedDir, 0o600); err == nil { // without it: as if the record had been removed by hand
		_ = f.Close()
	}
	now := time.Now()
	s.mu.Lock()
	maps.DeleteFunc(s.removed, func(_ string, at time.Time) bool { return now.Sub(at) > rememberRemoved })
	s.removed[uid] = now
	sweep := now.Sub(s.swept) > rememberRemoved
	if sweep {
		s.swept = now
	}
	s.mu.Unlock()
	if err := os.Remove(s.Path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("prepared claim not removed: %w", err)
	}
	s.Forget(uid)
	if sweep {
		s.sweep()
	}
	return nil
}

// Forget removes a claim from memory, whose file another process has removed.
func (s *Store) Forget(uid string) {
	s.change(func() {
		delete(s.claims, uid)
		delete(s.onDisk, uid)
		delete(s.unread, uid)
	})
}

// restored forgets Remove of a claim that another process has stored since: its Put has removed the marker.
func (s *Store) restored(uid string) {
	if !s.Removed(uid) {
		return
	}
	if _, err := os.Lstat(s.marker(uid)); errors.Is(err, fs.ErrNotExist) {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.removed, uid)
	}
}

// Removed reports whether Remove was called for a claim in the last minutes, and Put was not since. An answer of the kubelet may still
// have it.
func (s *Store) Removed(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, removed := s.removed[uid]
	return removed
}

// RemovedElsewhere reports whether another process has called Remove for a claim, and none has called Put since: for rememberRemoved at least.
func (s *Store) RemovedElsewhere(uid string) bool {
	if _, err := os.Lstat(s.marker(uid)); err != nil {
		return false
	}
	_, err := os.Lstat(s.Path(uid))
	return errors.Is(err, fs.ErrNotExist)
}

// Vanished returns the claims whose file another process has removed: another agent in answer to Unprepare (RemovedElsewhere), or a command by
// mistake.
func (s *Store) Vanished() (gone []Claim) {
	s.mu.Lock()
	stored := slices.Collect(maps.Values(s.onDisk))
	s.mu.Unlock()
	for _, c := range stored {
		if _, err := os.Lstat(s.Path(c.UID)); errors.Is(err, fs.ErrNotExist) {
			gone = append(gone, c)
		}
	}
	return gone
}

// sweep removes what processes left that were killed while they wrote, and old markers.
func (s *Store) sweep() {
	for pattern, age := range map[string]time.Duration{".*" + suffix + "[0-9]*": staleAfter, ".*" + markerSuffix: rememberRemoved} {
		left, _ := filepath.Glob(filepath.Join(s.dir, pattern)) // fails on a bad pattern only
		for _, path := range left {
			if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) > age {
				_ = os.Remove(path) // harmless if it remains
			}
		}
	}
}
