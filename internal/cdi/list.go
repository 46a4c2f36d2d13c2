package cdi

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// File is a specification in the folder.
type File struct {
	Path    string   `json:"path"`
	Kind    string   `json:"kind,omitempty"` // vendor and class; "" if it is not valid
	Devices []string `json:"devices,omitempty"`
	Own     bool     `json:"own"`               // written by an agent with these options, by its name
	Problem string   `json:"problem,omitempty"` // why container runtimes ignore it; "" = they don't
}

// folders are the folders in which specifications are looked for: that of the options first.
func (o Options) folders() []string {
	if o.Folder == adminFolder {
		return []string{adminFolder}
	}
	return []string{o.Folder, adminFolder}
}

// List returns the specifications in the folder of the options, by name, and then those in that of administrators.
func List(o Options) []File {
	o = o.withDefaults()
	var files []File
	for _, e := range new(specfile.Scanner).Scan(o.folders()...) {
		files = append(files, File{e.Path, e.Kind, e.Devices, slices.Contains(o.files(), e.Path), e.Problem})
	}
	return files
}

// Remove removes the specifications of an agent with these options and no other files, and returns their paths. Containers that ask
// for their devices no longer start.
func Remove(o Options) (removed []string, err error) {
	o = o.withDefaults()
	for _, path := range o.files() {
		(&specfile.File{Path: path}).Sweep()
		if e := os.Remove(path); e == nil {
			removed = append(removed, path)
		} else if !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return removed, err
}

// ReadOnce returns what an agent with these options would have written for a state. It writes nothing, and returns in time even if a
// disk hangs. It returns nil without a vendor.
func ReadOnce(o Options, s core.State) *inventory.CDI {
	if o.Vendor == "" {
		return nil
	}
	w := New(o)
	w.dry = true
	if s.Snapshot.Driver.State != gpu.DriverReady {
		return w.notReady(s)
	}
	result := make(chan outcome, 1)
	go func() { result <- w.pass(context.Background(), s) }()
	select {
	case r := <-result:
		return r.cdi
	case <-time.After(firstAtMost):
		return w.opts.undefined(s, slow)
	}
}

// canWrite reports why the folder, or the one in which it would be made, can't be written.
func (o Options) canWrite() error {
	folder := o.Folder
	if o.FolderIsMount {
		return specfile.CheckMount(folder)
	}
	err := specfile.CheckFolder(folder)
	if err == nil {
		if unix.Access(folder, unix.W_OK) != nil {
			return &specfile.FolderError{Folder: folder, Reason: "not writable"}
		}
		return nil
	}
	if _, statErr := os.Stat(folder); errors.Is(statErr, fs.ErrNotExist) && unix.Access(filepath.Dir(folder), unix.W_OK) == nil {
		return nil // it is made by the first write
	}
	return err
}
