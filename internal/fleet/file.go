package fleet

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// maxLedger is the most bytes of a ledger that is indented.
const maxLedger = 4 * rescue.LedgerBytes

// FileStore has the ledger in a file of this node, for a gpu-fleet without others: a systemd unit. Commands of the same node may write it, too.
type FileStore struct{ path string }

// NewFileStore returns the store of a file, which it does not create.
func NewFileStore(path string) *FileStore { return &FileStore{path} }

// String names the file.
func (s *FileStore) String() string { return "file " + s.path }

// Read reads the file. Its version is its content.
func (s *FileStore) Read(context.Context) (rescue.Ledger, Version, error) {
	text, err := statefile.Read(s.path, maxLedger, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return rescue.Ledger{}, "", ErrNoLedger
	case statefile.IsContent(err):
		return rescue.Ledger{}, "", &DamagedError{err}
	case err != nil:
		return rescue.Ledger{}, "", err
	}
	l, err := rescue.ParseLedger(text)
	if err != nil {
		return rescue.Ledger{}, "", &DamagedError{err}
	}
	sum := sha256.Sum256(text)
	return l, Version(hex.EncodeToString(sum[:])), nil
}

// Write replaces the file, on disk before it returns.
func (s *FileStore) Write(ctx context.Context, l rescue.Ledger, was Version) (version Version, err error) {
	err = s.locked(ctx, func() error {
		if _, now, err := s.Read(ctx); err != nil {
			return err
		} else if now != was {
			return ErrConflict
		}
		version, err = s.replace(l)
		return err
	})
	return version, err
}

// Create writes an empty ledger, if there is no file.
func (s *FileStore) Create(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(s.path), 0o755); err != nil {
		return err
	}
	return s.locked(ctx, func() error {
		_, err := os.Lstat(s.path)
		switch {
		case err == nil:
			return ErrExists
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		_, err = s.replace(rescue.NewLedger())
		return err
	})
}

func (s *FileStore) replace(l rescue.Ledger) (Version, error) {
	text, err := json.MarshalIndent(l, "", "  ")
	if err != nil {
		return "", err
	}
	if len(text) > maxLedger {
		return "", fmt.Errorf("the ledger has %d bytes, and %d are allowed", len(text), maxLedger)
	}
	sum := sha256.Sum256(text)
	return Version(hex.EncodeToString(sum[:])), statefile.Write(s.path, text)
}

// locked calls f while no other process writes the file.
func (s *FileStore) locked(ctx context.Context, f func() error) error {
	lock, err := filelock.Take(s.path + ".lock")
	if errors.Is(err, filelock.ErrHeld) {
		lock, err = filelock.Wait(ctx, s.path+".lock")
	}
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := f(); err != nil {
		return err
	}
	return s.keepOwner()
}

// keepOwner gives what root has written to the owner of the folder: the service is another user, and must read and write it.
func (s *FileStore) keepOwner() error {
	if os.Geteuid() != 0 {
		return nil
	}
	folder, err := os.Stat(filepath.Dir(s.path))
	if err != nil {
		return err
	}
	owner, ok := folder.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	return errors.Join(os.Lchown(s.path, int(owner.Uid), int(owner.Gid)), os.Lchown(s.path+".lock", int(owner.Uid), int(owner.Gid)))
}

// SingleLeader is the leader of a team of one process. It has a lock on a file, so that there is no second one on its node.
type SingleLeader struct {
	identity string
	lock     *os.File
}

// NewSingleLeader takes the lock of a ledger's file. It fails if another process has it.
func NewSingleLeader(ledger, identity string) (*SingleLeader, error) {
	path := ledger + ".leader"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	lock, err := filelock.Take(path)
	if errors.Is(err, filelock.ErrHeld) {
		return nil, fmt.Errorf("another process of gpu-fleet uses the ledger %s: %w", ledger, err)
	}
	if err != nil {
		return nil, fmt.Errorf("the ledger %s can't be locked: %w", ledger, err)
	}
	return &SingleLeader{identity, lock}, nil
}

// Lead has this process lead until ctx ends, or f returns.
func (l *SingleLeader) Lead(ctx context.Context, f func(context.Context)) error {
	f(ctx)
	return ctx.Err()
}

// Holder is this process.
func (l *SingleLeader) Holder() string { return l.identity }

// Close gives up the lock. The process does not lead any more before.
func (l *SingleLeader) Close() error { return l.lock.Close() }
