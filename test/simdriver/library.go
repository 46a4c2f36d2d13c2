package simdriver

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// The library carries its version behind libraryStamp, in versionSize bytes that end with a zero
// (library_stamp in lib/state.c); empty = machine.conf has it.
const (
	libraryStamp = "simdriver library version:"
	versionSize  = 96
)

// ReplaceLibrary puts a library of another version in the place of the machine's, as a package manager does:
// another file takes the name at once. Processes that have the old one mapped go on with it, and it stays of
// the version that it was; new ones get LIB_RM_VERSION_MISMATCH unless the kernel module is of this version
// (SetModule). A hidden library is back with it.
func (m *Machine) ReplaceLibrary(version string) error {
	if version == "" || len(version) >= versionSize {
		return fmt.Errorf("library version %q: want 1 to %d bytes", version, versionSize-1)
	}
	err := m.changeLibrary(func(library []byte) ([]byte, error) { return stamped(withLimits(library, version), version) })
	if err != nil {
		return err
	}
	return m.edit(func(c *conf) error { return c.set("machine", "library", version) })
}

// changeLibrary puts a changed copy of the machine's library in its place.
func (m *Machine) changeLibrary(change func([]byte) ([]byte, error)) error {
	return m.locked(func() error {
		library, err := os.ReadFile(m.libraryPath())
		if errors.Is(err, fs.ErrNotExist) {
			library, err = os.ReadFile(m.hiddenPath())
		}
		if err != nil {
			return err
		}
		if library, err = change(library); err != nil {
			return fmt.Errorf("%s: %w", m.libraryPath(), err)
		}
		temp := m.libraryPath() + ".new"
		_ = os.Remove(temp)
		if err := os.WriteFile(temp, library, 0o755); err != nil {
			return err
		}
		if err := os.Rename(temp, m.libraryPath()); err != nil {
			return err
		}
		_ = os.Remove(m.hiddenPath()) // there is one library
		return nil
	})
}

// stamped is a library with a version of its own.
func stamped(library []byte, version string) ([]byte, error) {
	at := bytes.Index(library, []byte(libraryStamp))
	if at < 0 || bytes.Count(library, []byte(libraryStamp)) != 1 {
		return nil, errors.New("not a simulated driver's library")
	}
	room := library[at+len(libraryStamp):][:versionSize]
	clear(room)
	copy(room, version)
	return library, nil
}

// Hide takes the library file away, Unhide brings it back. A process that has
// loaded the library keeps it, as with any library.
func (m *Machine) Hide() error { return os.Rename(m.libraryPath(), m.hiddenPath()) }

// Unhide is Hide undone.
func (m *Machine) Unhide() error { return os.Rename(m.hiddenPath(), m.libraryPath()) }

// Without puts a library in the place of the machine's that lacks functions, as an older driver's does; their names are exact, with
// the version: "nvmlEventSetWait_v2". Processes that have the old one loaded keep it. The names are overwritten: dlsym finds the hash
// of a name, and then another name.
func (m *Machine) Without(functions ...string) error {
	return m.changeLibrary(func(library []byte) ([]byte, error) {
		for _, name := range functions {
			if !bytes.Contains(library, symbol(name)) && !bytes.Contains(library, noSymbol(name)) {
				return nil, fmt.Errorf("no function %s", name)
			}
			library = bytes.ReplaceAll(library, symbol(name), noSymbol(name))
		}
		return library, nil
	})
}

// symbol is the name of a function in the library, noSymbol what it is overwritten with.
func symbol(function string) []byte   { return []byte("\x00" + function + "\x00") }
func noSymbol(function string) []byte { return []byte("\x00x" + function[1:] + "\x00") }

// LibraryDir is the folder of libnvidia-ml.so.1 beneath the root of a machine.
func LibraryDir(root string) string { return filepath.Join(root, libraryDir) }

func (m *Machine) libraryPath() string { return m.path(libraryDir, LibraryName) }

func (m *Machine) hiddenPath() string { return m.libraryPath() + ".hidden" }
