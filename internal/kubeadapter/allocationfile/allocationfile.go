// Package allocationfile stores on disk which device IDs an agent has allocated, so that a restart does not remove them from the
// kubelet's list while pods hold them. An agent that can't write the file logs that and continues.
package allocationfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

const (
	version = 1       // of the format
	maxSize = 4 << 20 // of the file, in bytes; the adapter stores up to 4,096 IDs of about 200 bytes each
)

var _ kubeadapter.AllocationStore = (*File)(nil)

// File is the file <dir>/<agent>.handed-out.json. Make one with Open. It is not safe for concurrent use.
type File struct {
	path   string
	log    *slog.Logger
	failed bool // the latest Save
}

// content is the content of the file.
type content struct {
	Version   int                            `json:"version"`
	HandedOut []kubeadapter.StoredAllocation `json:"handedOut"`
}

// Open returns the file of an agent. The first Save creates it.
func Open(dir, agent string, log *slog.Logger) *File {
	return &File{path: filepath.Join(dir, agent+".handed-out.json"), log: log}
}

// Load implements kubeadapter.AllocationStore. It returns nothing if there is no file, or none that can be read, which is logged.
func (f *File) Load() []kubeadapter.StoredAllocation {
	temporary := filepath.Join(filepath.Dir(f.path), "."+filepath.Base(f.path)+"[0-9]*")
	left, _ := filepath.Glob(temporary) // the only error is a bad pattern
	for _, path := range left {         // of a write during a crash
		_ = os.Remove(path)
	}
	c, err := f.read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Warn("stored allocations not loaded", "file", f.path, "error", err)
	}
	return c.HandedOut
}

func (f *File) read() (content, error) {
	file, err := os.Open(f.path)
	if err != nil {
		return content{}, err
	}
	defer func() { _ = file.Close() }() // nothing was written
	text, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err != nil {
		return content{}, err
	}
	if len(text) > maxSize {
		return content{}, fmt.Errorf("larger than %d bytes", maxSize)
	}
	var c content
	if err := json.Unmarshal(text, &c); err != nil {
		return content{}, err
	}
	if c.Version != version {
		return content{}, fmt.Errorf("format version %d, want %d", c.Version, version)
	}
	return c, nil
}

// Save implements kubeadapter.AllocationStore: it replaces the file. The first failure and the next success are logged.
func (f *File) Save(allocations []kubeadapter.StoredAllocation) {
	err := f.write(allocations)
	switch {
	case err != nil && !f.failed:
		f.log.Warn("allocations not saved, a restart of the agent loses them", "file", f.path, "error", err)
	case err == nil && f.failed:
		f.log.Info("allocations saved again", "file", f.path)
	}
	f.failed = err != nil
}

func (f *File) write(allocations []kubeadapter.StoredAllocation) error {
	text, err := json.MarshalIndent(content{version, allocations}, "", "\t")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return err
	}
	return renameio.WriteFile(f.path, append(text, '\n'), 0o600)
}
