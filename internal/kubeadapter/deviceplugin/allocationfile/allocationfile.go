// Package allocationfile stores on disk which device IDs an agent has allocated, so that a restart does not remove them from the
// kubelet's list while pods hold them. An agent that can't write the file logs that and continues.
package allocationfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

const (
	version = 2       // of the format
	maxSize = 4 << 20 // of the file, in bytes; the adapter stores up to 4,096 IDs of about 200 bytes each
)

var _ deviceplugin.AllocationStore = (*File)(nil)

// File is the file <dir>/<agent>.allocated.json. Make one with Open. It is not safe for concurrent use.
type File struct {
	path   string
	log    *slog.Logger
	failed bool // the latest Save
}

// content is the content of the file.
type content struct {
	Version   int                             `json:"version"`
	Allocated []deviceplugin.StoredAllocation `json:"allocated"`
}

// Open returns the file of an agent. The first Save creates it.
func Open(dir, agent string, log *slog.Logger) *File {
	return &File{path: filepath.Join(dir, agent+".allocated.json"), log: log}
}

// Load implements deviceplugin.AllocationStore. It returns nothing if there is no file, or none that can be read, which is logged.
func (f *File) Load() []deviceplugin.StoredAllocation {
	statefile.RemoveTemporary(f.path)
	c, err := f.read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Warn("stored allocations not loaded", "file", f.path, "error", err)
	}
	return c.Allocated
}

func (f *File) read() (content, error) {
	text, err := statefile.Read(f.path, maxSize, 0)
	if err != nil {
		return content{}, err
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

// Save implements deviceplugin.AllocationStore: it replaces the file. The first failure and the next success are logged.
func (f *File) Save(allocations []deviceplugin.StoredAllocation) {
	err := f.write(allocations)
	switch {
	case err != nil && !f.failed:
		f.log.Warn("allocations not saved, a restart of the agent loses them", "file", f.path, "error", err)
	case err == nil && f.failed:
		f.log.Info("allocations saved again", "file", f.path)
	}
	f.failed = err != nil
}

func (f *File) write(allocations []deviceplugin.StoredAllocation) error {
	text, err := json.MarshalIndent(content{version, allocations}, "", "\t")
	if err != nil {
		return err
	}
	return statefile.Write(f.path, append(text, '\n'))
}
