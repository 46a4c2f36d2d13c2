// Package grantfile keeps on disk which device IDs an agent has handed out, so that a restart does not take them off the
// kubelet's list while pods hold them. An agent whose file can't be kept works on, and says so.
package grantfile

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
	maxSize = 4 << 20 // bounds what is read, in bytes; the adapter remembers 4,096 IDs, of some 200 bytes each
)

var _ kubeadapter.GrantStore = (*File)(nil)

// File is <dir>/<agent>.handed-out.json. Make one with Open. Its methods are called from one goroutine.
type File struct {
	path    string
	log     *slog.Logger
	failing bool // the latest Save failed
}

// content is what the file holds.
type content struct {
	Version   int                 `json:"version"`
	HandedOut []kubeadapter.Grant `json:"handedOut"`
}

// Open names the file; it is made when there is something to keep.
func Open(dir, agent string, log *slog.Logger) *File {
	return &File{path: filepath.Join(dir, agent+".handed-out.json"), log: log}
}

// Load returns what was kept: nothing if there is no file, or none that can be read.
func (f *File) Load() []kubeadapter.Grant {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(f.path), "."+filepath.Base(f.path)+"[0-9]*")) // its only error is a bad pattern
	for _, path := range left {                                                                       // of a write that a crash cut short
		_ = os.Remove(path)
	}
	c, err := f.read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Warn("which device IDs were handed out before can't be read", "file", f.path, "error", err)
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
		return content{}, fmt.Errorf("format version %d, this agent knows %d", c.Version, version)
	}
	return c, nil
}

// Save replaces the file. A failure is logged once, until it works again.
func (f *File) Save(grants []kubeadapter.Grant) {
	err := f.write(grants)
	switch {
	case err != nil && !f.failing:
		f.log.Warn("which device IDs were handed out is not kept, a restart of the agent forgets it", "error", err)
	case err == nil && f.failing:
		f.log.Info("which device IDs were handed out is kept again", "file", f.path)
	}
	f.failing = err != nil
}

func (f *File) write(grants []kubeadapter.Grant) error {
	text, err := json.MarshalIndent(content{version, grants}, "", "\t")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return err
	}
	return renameio.WriteFile(f.path, append(text, '\n'), 0o600)
}
