// Package specfile replaces CDI specifications in the folder that container runtimes read, and lists those of others.
package specfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// maxSize is the largest specification that is read: 1,000 devices have 1 MB.
const maxSize = 16 << 20

// Path is the file of a kind ("vendor/class") in a folder, as NVIDIA's k8s-device-plugin and the CDI library name it.
func Path(folder, kind string) string {
	return filepath.Join(folder, strings.ReplaceAll(kind, "/", "-")+".json")
}

// Marshal returns the text of a specification. It fails if a container runtime would refuse it.
func Marshal(s *specs.Spec) ([]byte, error) {
	text, err := Encode(s)
	if err != nil {
		return nil, err
	}
	return text, Validate(text)
}

// Encode returns the text of a specification.
func Encode(s *specs.Spec) ([]byte, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	return append(text, '\n'), nil
}

// Validate reads the text as a container runtime does. The CDI library reads files only, so this is one in memory.
func Validate(text []byte) error {
	fd, err := unix.MemfdCreate("cdi", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("CDI specification not validated: %w", os.NewSyscallError("memfd_create", err))
	}
	f := os.NewFile(uintptr(fd), "cdi")
	defer func() { _ = f.Close() }() // it is in memory
	if _, err := f.Write(text); err != nil {
		return err
	}
	_, err = cdi.ReadSpec(fmt.Sprintf("/proc/self/fd/%d", fd), 0)
	return err
}

// FolderError is a folder in which no specification can be written.
type FolderError struct{ Folder, Reason string }

// Error names the folder and the reason.
func (e *FolderError) Error() string {
	return "folder of CDI specifications " + e.Folder + ": " + e.Reason
}

// MakeFolder makes the folder if it is missing and its parent exists. It fails with *FolderError if there is no folder to write in.
func MakeFolder(folder string) error {
	if err := os.Mkdir(folder, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return &FolderError{folder, reason(err)}
	}
	return CheckFolder(folder)
}

// CheckMount reports whether there is a folder on another file system than the root of this process, with *FolderError.
func CheckMount(folder string) error {
	if err := CheckFolder(folder); err != nil {
		return err
	}
	var here, root unix.Stat_t
	if unix.Stat(folder, &here) == nil && unix.Stat("/", &root) == nil && here.Dev == root.Dev {
		return &FolderError{folder, "not mounted from the host"}
	}
	return nil
}

// CheckFolder reports whether there is a folder, with *FolderError.
func CheckFolder(folder string) error {
	info, err := os.Stat(folder)
	switch {
	case err != nil:
		return &FolderError{folder, reason(err)}
	case !info.IsDir():
		return &FolderError{folder, "not a folder"}
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink == 0 {
		return &FolderError{folder, "removed on the host, where a new one may be: restart the agent's container, which has the removed one"}
	}
	return nil
}

// reason is the error of a system call without its name and paths: that of a temporary file differs each time.
func reason(err error) string {
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		return no.Error()
	}
	return err.Error()
}

// File is a specification that this process replaces. It is not safe for concurrent use. The zero value with a Path was not written
// by this process.
type File struct {
	Path string

	written    [sha256.Size]byte // content that this process wrote last; zero = none
	generation int               // for which it was written
	seen       identity          // of the file when it had that content
}

// identity differs between two versions of a file.
type identity struct {
	device, inode uint64
	size          int64
	modified      time.Time
}

func identityOf(info fs.FileInfo) identity {
	id := identity{size: info.Size(), modified: info.ModTime()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		id.device, id.inode = uint64(st.Dev), st.Ino //nolint:unconvert // of another type on other architectures
	}
	return id
}

// State is what is at the path of a File.
type State uint8

// The states of a file.
const (
	Missing State = iota
	Ours          // what this process wrote last, or an equal text
	Foreign       // something else
)

// Check returns what is at the path, and its text if that is Foreign and can be read.
func (f *File) Check() (State, []byte) {
	info, err := os.Stat(f.Path)
	if err != nil {
		return Missing, nil
	}
	id := identityOf(info)
	if id == f.seen && f.wrote() {
		return Ours, nil
	}
	text, err := statefile.Read(f.Path, maxSize, syscall.O_NONBLOCK)
	if err != nil {
		return Foreign, nil
	}
	if f.wrote() && sha256.Sum256(text) == f.written {
		f.seen = id
		return Ours, nil
	}
	return Foreign, text
}

func (f *File) wrote() bool { return f.written != [sha256.Size]byte{} }

// Holds reports whether this process has written that text for that generation, and for no other since.
func (f *File) Holds(text []byte, generation int) bool {
	return f.wrote() && f.generation == generation && sha256.Sum256(text) == f.written
}

// Written reports whether this process has written the file for that generation.
func (f *File) Written(generation int) bool { return f.wrote() && f.generation == generation }

// Replace replaces the file: readers find the old or the new one, complete. Its errors are equal if they have the same reason.
func (f *File) Replace(text []byte, generation int) error {
	if err := statefile.Replace(f.Path, text, 0o644); err != nil {
		return fmt.Errorf("not written: %s: %s", reason(err), f.Path)
	}
	f.written, f.generation, f.seen = sha256.Sum256(text), generation, identity{}
	if info, err := os.Stat(f.Path); err == nil && info.Size() == int64(len(text)) {
		f.seen = identityOf(info)
	}
	return nil
}

// Remove removes the file, and reports whether there was one.
func (f *File) Remove() (bool, error) {
	f.written, f.seen = [sha256.Size]byte{}, identity{}
	err := os.Remove(f.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Sweep removes temporary files of the specification that a killed process left.
func (f *File) Sweep() { statefile.RemoveTemporary(f.Path) }

// Names returns the names of the devices in the text of a specification, if it is valid.
func Names(text []byte) []string {
	s, err := cdi.ParseSpec(bytes.TrimSpace(text))
	if err != nil || s == nil {
		return nil
	}
	return deviceNames(s)
}

func deviceNames(s *specs.Spec) []string {
	names := make([]string, len(s.Devices))
	for i := range s.Devices {
		names[i] = s.Devices[i].Name
	}
	return names
}
