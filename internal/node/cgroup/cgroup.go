// Package cgroup reads control groups of version 2 (Documentation/admin-guide/cgroup-v2.rst in Linux), and enables controllers in them.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultMount is where the control groups are, for NVIDIA's driver library and hooks, too.
const DefaultMount = "/sys/fs/cgroup"

// FS are the control groups below a mount point. Paths of groups begin with "/" and are below it, as in /proc/PID/cgroup; "/" is the root group.
type FS struct {
	Mount string

	// AnyFilesystem accepts a folder of ordinary files, for tests.
	AnyFilesystem bool
}

// ID identifies a control group: another group can have the path of one that has ended, but not its inode at the same time.
type ID struct {
	Path  string
	Inode uint64
}

// Group is a reading of a control group.
type Group struct {
	ID
	Controllers []string // that are enabled in the group: cgroup.controllers
}

// Has reports whether a controller is enabled in the group.
func (g Group) Has(controller string) bool { return slices.Contains(g.Controllers, controller) }

// ErrNotUnified means that the node has no control groups of version 2 at the mount point, or that these are not all: a hybrid.
var ErrNotUnified = errors.New("no control groups of version 2")

// ErrOwnOnly means that the mount point has only the control group of the container of this process, and those below it.
var ErrOwnOnly = errors.New("only the control group of this container")

// Check returns nil if the mount point has control groups of version 2, as NVIDIA's hook checks it: an error that wraps ErrNotUnified if not. One that wraps
// ErrOwnOnly means that they are not those of the node.
func (f FS) Check() error {
	var s unix.Statfs_t
	if err := unix.Statfs(f.Mount, &s); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrNotUnified, f.Mount, err)
	}
	if s.Type != unix.CGROUP2_SUPER_MAGIC && !f.AnyFilesystem {
		return fmt.Errorf("%w at %s", ErrNotUnified, f.Mount)
	}
	if f.ownOnly() {
		return fmt.Errorf("%w at %s", ErrOwnOnly, f.Mount)
	}
	return nil
}

// ownOnly reports whether the group at the mount point is that of this process and not the root of the node's, which has no cgroup.events. That it is not the root
// alone means nothing: so it is in a node that is a container.
func (f FS) ownOnly() bool {
	if _, err := os.Lstat(filepath.Join(f.Mount, "cgroup.events")); err != nil {
		return false
	}
	pids, err := f.Processes("/")
	return err == nil && slices.Contains(pids, os.Getpid())
}

// Path returns the path of a group as the driver's library opens it.
func (f FS) Path(group string) string { return filepath.Join(f.Mount, group) }

// ErrPath means that a path can't be that of a group. One of a process outside of this process's cgroup namespace begins with "/..".
var ErrPath = errors.New("not the path of a control group")

// Read reads a group. The error is fs.ErrNotExist if it has ended, and ErrPath for a path with a symbolic link or ".." in it.
func (f FS) Read(group string) (Group, error) {
	if group != filepath.Clean("/"+group) {
		return Group{}, fmt.Errorf("%q: %w", group, ErrPath)
	}
	var s unix.Stat_t
	path := f.Path(group)
	if real, err := filepath.EvalSymlinks(path); err != nil {
		return Group{}, err
	} else if root, err := filepath.EvalSymlinks(f.Mount); err != nil || real != filepath.Join(root, group) {
		return Group{}, fmt.Errorf("%s: %w: a symbolic link", path, ErrPath)
	}
	if err := unix.Stat(path, &s); err != nil {
		return Group{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	controllers, err := f.words(group, "cgroup.controllers")
	if err != nil {
		return Group{}, err
	}
	return Group{ID: ID{group, s.Ino}, Controllers: controllers}, nil
}

// ID returns the identity of a group, and reads nothing else of it. The error is fs.ErrNotExist if it has ended.
func (f FS) ID(group string) (ID, error) {
	var s unix.Stat_t
	if err := unix.Lstat(f.Path(group), &s); err != nil {
		return ID{}, &fs.PathError{Op: "lstat", Path: f.Path(group), Err: err}
	}
	return ID{group, s.Ino}, nil
}

// Children returns the names of the groups directly below a group, sorted.
func (f FS) Children(group string) ([]string, error) {
	entries, err := os.ReadDir(f.Path(group))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Processes returns the processes of a group without those of groups below it: cgroup.procs. One that this process's PID namespace does not have is 0. A threaded group
// has none: they are those of its domain (Documentation/admin-guide/cgroup-v2.rst, Threads). The error is fs.ErrNotExist if the group has ended.
func (f FS) Processes(group string) (pids []int, err error) {
	words, err := f.words(group, "cgroup.procs")
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	for _, w := range words {
		pid, err := strconv.Atoi(w)
		if err != nil {
			return nil, fmt.Errorf("%s/cgroup.procs: %w", f.Path(group), err)
		}
		pids = append(pids, pid)
	}
	return pids, err
}

// Enable enables a controller in the groups directly below a group: cgroup.subtree_control. It must be enabled in the group itself.
func (f FS) Enable(group, controller string) error {
	path := filepath.Join(f.Path(group), "cgroup.subtree_control")
	if on, err := f.Enables(group, controller); err != nil || on {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString("+" + controller)
	return errors.Join(err, file.Close())
}

func (f FS) words(group, name string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(f.Path(group), name))
	if errors.Is(err, unix.ENODEV) { // of a file that was open when the group ended
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	return strings.Fields(string(text)), err
}

// ProcessesBelow returns the processes of a group and of all groups below it, as Processes does. Groups and processes may end meanwhile. The error is fs.ErrNotExist
// if the group itself has ended.
func (f FS) ProcessesBelow(group string) (pids []int, err error) {
	if pids, err = f.Processes(group); err != nil {
		return nil, err
	}
	names, err := f.Children(group)
	for _, name := range names {
		below, err := f.ProcessesBelow(filepath.Join(group, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		pids = append(pids, below...)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return pids, err
}

// Enables reports whether a controller is enabled in the groups directly below a group: cgroup.subtree_control.
func (f FS) Enables(group, controller string) (bool, error) {
	on, err := f.words(group, "cgroup.subtree_control")
	return slices.Contains(on, controller), err
}

// Remove removes an empty group.
func (f FS) Remove(group string) error {
	if f.AnyFilesystem { // whose files the kernel would remove
		return os.RemoveAll(f.Path(group))
	}
	return os.Remove(f.Path(group))
}
