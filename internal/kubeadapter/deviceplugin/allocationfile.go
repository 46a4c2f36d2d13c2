package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

const (
	allocationFileVersion = 2       // of the format
	allocationFileMaxSize = 4 << 20 // in bytes; the plugins store up to 4,096 IDs of about 300 bytes each
)

// allocationFile is the file <dir>/<agent>.allocated.json, which stores on disk which device IDs an agent has allocated, so that a restart does not
// remove them from the kubelet's list while pods hold them. An agent that can't write it logs that and continues. It is not safe for
// concurrent use.
type allocationFile struct {
	path   string
	log    *slog.Logger
	failed bool // the latest Save
	onDisk bool // the file was read or written
}

// allocationFileContent is the content of the file.
type allocationFileContent struct {
	Version   int                `json:"version"`
	Allocated []StoredAllocation `json:"allocated"`
}

// OpenAllocations returns the allocations of an agent in a folder. The first Save creates the file. Without a folder there are none.
func OpenAllocations(dir, agent string, log *slog.Logger) AllocationStore {
	if dir == "" {
		return nil // not a nil *allocationFile: in an interface that is not nil
	}
	return &allocationFile{path: filepath.Join(dir, agent+".allocated.json"), log: log}
}

// Load implements AllocationStore. It returns nothing if there is no file, or none that can be read, which is logged.
func (f *allocationFile) Load() []StoredAllocation {
	statefile.RemoveTemporary(f.path)
	c, err := f.read()
	f.onDisk = err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Warn("stored allocations not loaded", "file", f.path, "error", err)
	}
	return c.Allocated
}

func (f *allocationFile) read() (allocationFileContent, error) {
	text, err := statefile.Read(f.path, allocationFileMaxSize, 0)
	if err == nil {
		text, err = statefile.Unseal(text)
	}
	if err != nil {
		return allocationFileContent{}, err
	}
	var c allocationFileContent
	if err := json.Unmarshal(text, &c); err != nil {
		return allocationFileContent{}, err
	}
	if c.Version != allocationFileVersion {
		return allocationFileContent{}, fmt.Errorf("format version %d, want %d", c.Version, allocationFileVersion)
	}
	return c, nil
}

// Save implements AllocationStore: it replaces the file. The first failure and the next success are logged.
func (f *allocationFile) Save(allocations []StoredAllocation) {
	err := f.write(allocations)
	switch {
	case err != nil && !f.failed:
		f.log.Warn("allocations not saved, a restart of the agent loses them", "file", f.path, "error", err)
	case err == nil && f.failed:
		f.log.Info("allocations saved again", "file", f.path)
	}
	f.failed = err != nil
	f.onDisk = f.onDisk || err == nil
}

// Missing implements AllocationStore.
func (f *allocationFile) Missing() bool { return f.onDisk && statefile.IsMissing(f.path) }

func (f *allocationFile) write(allocations []StoredAllocation) error {
	text, err := json.MarshalIndent(allocationFileContent{allocationFileVersion, allocations}, "", "\t")
	if err != nil {
		return err
	}
	return statefile.Write(f.path, statefile.Seal(text))
}
