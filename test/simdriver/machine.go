// Package simdriver lays out and scripts simulated machines with NVIDIA GPUs.
//
// A machine is a directory. Its machine.conf describes the GPUs; a small libnvidia-ml.so.1, compiled from lib/, answers NVML
// calls from that file; the sysfs, procfs and /dev trees of the same machine are beside it. Every process that has loaded
// the library reads the file again when it changes, so that a test or the command simctl can lose a GPU or raise an XID
// while agents run.
//
// README.md describes the format, the faults and what is not simulated.
package simdriver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Machine is a directory that holds a simulated machine: machine.conf, the
// library, and the sysfs, procfs and /dev trees. Its methods write whole files
// by rename and return when the change is in place, so nothing has to wait. They may be
// called at once from several goroutines and processes.
type Machine struct {
	// Root is the directory; agents take it as --driver-root.
	Root string
	// Library is what a process should load. For Install it is the copy under
	// Root; for Start it is the copy that all tests of a process share.
	Library string

	memacct control
}

const libraryDir = "usr/lib/x86_64-linux-gnu"

// Names of the machines that come with the package, sorted.
func Names() []string {
	entries, err := fs.ReadDir(machines, "machines")
	if err != nil {
		panic(err) // embedded
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".conf"))
	}
	return names
}

// Text is the machine.conf of a machine that comes with the package, or of a file.
func Text(nameOrFile string) (string, error) {
	if slices.Contains(Names(), nameOrFile) {
		text, err := machines.ReadFile("machines/" + nameOrFile + ".conf")
		return string(text), err
	}
	text, err := os.ReadFile(nameOrFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("no machine %q: want a file or one of %s", nameOrFile, strings.Join(Names(), ", "))
	}
	return string(text), err
}

// Install lays out a machine under root: a name of Names or a machine.conf file.
func Install(ctx context.Context, root, nameOrFile string) (*Machine, error) {
	text, err := Text(nameOrFile)
	if err != nil {
		return nil, fmt.Errorf("install machine: %w", err)
	}
	return InstallText(ctx, root, text)
}

// InstallText lays out the machine that text describes. Its library has the functions that one of its version has.
func InstallText(ctx context.Context, root, text string) (*Machine, error) {
	m, err := installAny(ctx, root, text)
	if err != nil {
		return nil, err
	}
	if version, ok := parseConf(text).get("machine", "driver"); ok && !hasLimits(version) {
		err = m.changeLibrary(func(library []byte) ([]byte, error) { return withLimits(library, version), nil })
	}
	if err != nil {
		return nil, fmt.Errorf("install machine: %w", err)
	}
	return m, nil
}

// installAny lays out a machine whose library has all functions.
func installAny(ctx context.Context, root, text string) (*Machine, error) {
	m, err := newMachine(root)
	if err != nil {
		return nil, fmt.Errorf("install machine: %w", err)
	}
	if _, err := Build(ctx, m.path(libraryDir)); err != nil {
		return nil, err
	}
	cached, err := buildCached(ctx)
	if err != nil {
		return nil, err
	}
	// Agents of any user write these, whatever the umask is.
	err = errors.Join(linkOrCopy(filepath.Join(filepath.Dir(cached), controlName), m.path(controlFile)), os.MkdirAll(m.path("calls"), 0o777), os.Chmod(m.path("calls"), 0o777))
	for _, name := range []string{"faults", "events", "violations"} {
		err = errors.Join(err, os.WriteFile(m.path(name), nil, 0o666), os.Chmod(m.path(name), 0o666))
	}
	if err == nil {
		err = m.edit(func(c *conf) error { *c = *parseConf(text); return nil })
	}
	if err != nil {
		return nil, fmt.Errorf("install machine: %w", err)
	}
	return m, nil
}

// Open opens a machine that was installed before.
func Open(root string) (*Machine, error) {
	m, err := newMachine(root)
	if err == nil {
		_, err = os.Stat(m.path("machine.conf"))
	}
	if err != nil {
		return nil, fmt.Errorf("open machine: %w", err)
	}
	return m, nil
}

func newMachine(root string) (*Machine, error) {
	root, err := filepath.Abs(root)
	return &Machine{Root: root, Library: filepath.Join(root, libraryDir, LibraryName)}, err
}

func (m *Machine) path(parts ...string) string {
	return filepath.Join(append([]string{m.Root}, parts...)...)
}

// locked runs change with the machine to itself among control functions.
func (m *Machine) locked(change func() error) error {
	lock, err := os.OpenFile(m.path(".control"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // and with it the lock
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	return change()
}

// edit changes machine.conf and then the trees that follow from it.
//
// The trees are written before the library has a new GPU, and cleared after it has an old one no more, as on a real
// machine: an agent that finds a GPU finds its files. Only the kernel module's list of GPUs, a change of which makes an agent read, has
// a new GPU after the library: the reading must find it.
func (m *Machine) edit(change func(*conf) error) error {
	return m.locked(func() error {
		text, err := os.ReadFile(m.path("machine.conf"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		c := parseConf(string(text))
		if err := change(c); err != nil {
			return err
		}
		t := treeOf(c)
		if err := t.write(m.Root); err != nil {
			return err
		}
		if err := m.prepareMemacct(c); err != nil {
			return err
		}
		if err := replace(m.path("machine.conf"), c.String()); err != nil {
			return err
		}
		if err := t.writeFiles(m.Root, isListed); err != nil {
			return err
		}
		return t.prune(m.Root)
	})
}

// read gives the machine's text to look.
func (m *Machine) read(look func(*conf)) error {
	text, err := os.ReadFile(m.path("machine.conf"))
	if err != nil {
		return err
	}
	look(parseConf(string(text)))
	return nil
}

// Sync lays the trees out anew after machine.conf was edited by hand.
func (m *Machine) Sync() error { return m.edit(func(*conf) error { return nil }) }

// replace writes a file whole: a reader sees the old text or the new one.
func replace(path, text string) error {
	temp := path + ".new"
	if err := os.WriteFile(temp, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(temp, path)
}
