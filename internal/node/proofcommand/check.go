package proofcommand

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What is wrong with the program of a command.
var (
	ErrNoCommand     = errors.New("there is no command")
	ErrRelative      = errors.New("not an absolute path")
	ErrMissing       = errors.New("there is no such file")
	ErrNotRegular    = errors.New("not a regular file")
	ErrNotExecutable = errors.New("the agent's user may not execute it")
	ErrOwner         = errors.New("its owner is neither root nor the agent's user")
	ErrWritable      = errors.New("other users can write it")
	ErrUnreadable    = errors.New("its rights can't be read")
)

// ProgramError is why a program is not run: a user who could write it, or replace it, could run anything as the agent.
type ProgramError struct {
	Path   string      // of the program, or of a folder or a symbolic link on the way to it
	Mode   fs.FileMode // 0 = not read
	Owner  uint32      // user ID
	Remedy string
	Err    error // one of those above
}

func (e *ProgramError) Error() string { return fmt.Sprintf("%s: %v: %s", e.About(), e.Err, e.Remedy) }

// About is the file that is not as it is to be, with its rights.
func (e *ProgramError) About() string {
	if e.Mode == 0 {
		return fmt.Sprintf("%q", e.Path)
	}
	return fmt.Sprintf("%s (mode %v, owner %d)", e.Path, e.Mode, e.Owner)
}

// Unwrap returns what is wrong.
func (e *ProgramError) Unwrap() error { return e.Err }

// Check reports why the program of a command is not run, all reasons at once, each as a ProgramError. It has an absolute path and is an executable
// file. Root or the agent's user owns it, each folder above it and each symbolic link on the way, and no other user may write it or these folders.
func Check(command []string) error { return CheckIn("/", command) }

// CheckIn is Check for a program that is started with another root: its path, and symbolic links on the way, are in that root. The folders above the
// root count, too.
func CheckIn(root string, command []string) error {
	if len(command) == 0 || command[0] == "" {
		return &ProgramError{Err: ErrNoCommand, Remedy: "give the program and its arguments as a list"}
	}
	if !filepath.IsAbs(command[0]) {
		return &ProgramError{Path: command[0], Err: ErrRelative, Remedy: "give the program by its absolute path: PATH is not searched"}
	}
	w := newWalk()
	w.look(w.root)
	if folder, _, ok := w.follow(root); ok {
		w.root = folder
		if path, info, ok := w.follow(command[0]); ok {
			w.lookAtProgram(path, info)
		}
	}
	return errors.Join(w.errs...)
}

// CheckLibrary is Check for a library that a program loads, which need not be executable. A folder above it may be one
// with the sticky bit, as /tmp: there nobody replaces what belongs to another user (inode(7)).
func CheckLibrary(path string) error {
	w := newWalk()
	w.sticky = true
	w.look(w.root)
	w.follow(path)
	return errors.Join(w.errs...)
}

// CheckLibraryPath is CheckLibrary for all libraries in the folders of a value of LD_LIBRARY_PATH. A folder that is
// missing has none.
func CheckLibraryPath(folders string) error {
	w := newWalk()
	w.sticky = true
	for _, folder := range filepath.SplitList(folders) {
		_, err := os.Stat(folder)
		if !filepath.IsAbs(folder) || errors.Is(err, fs.ErrNotExist) { // others are beneath the working folder
			continue
		}
		w.look(w.root)
		if at, _, ok := w.follow(folder); ok {
			w.sticky = false // every user could add a library
			w.look(at)
			w.sticky = true
		}
		all, err := os.ReadDir(folder)
		if err != nil {
			w.add(&ProgramError{Path: folder, Err: fmt.Errorf("%w: %w", ErrUnreadable, err), Remedy: "correct LD_LIBRARY_PATH"})
		}
		for _, one := range all {
			path := filepath.Join(folder, one.Name())
			if _, err := os.Stat(path); err == nil && strings.Contains(one.Name(), ".so") { // a link to nothing is no library
				w.follow(path)
			}
		}
	}
	return errors.Join(w.errs...)
}

// walk goes to a file as the kernel does, from a root folder and through symbolic links, and notes what is wrong.
type walk struct {
	root          string
	own, ownGroup uint32
	sticky        bool // others may write a folder with the sticky bit
	errs          []error
}

func newWalk() *walk {
	return &walk{root: "/", own: uint32(os.Geteuid()), ownGroup: uint32(os.Getegid())}
}

const maxLinks = 40 // as in path_resolution(7)

// follow returns what is at a path, where the symbolic links end. It reports false if there is nothing. The root itself was looked at before.
func (w *walk) follow(path string) (at string, info fs.FileInfo, ok bool) {
	at, links := w.root, 0
	rest := parts(path)
	info, err := os.Lstat(at)
	for ok = err == nil; ok && len(rest) > 0; {
		if rest[0] == ".." {
			if rest = rest[1:]; at != w.root { // the root is the folder above itself
				at = filepath.Dir(at)
			}
			continue
		}
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		if info, ok = w.look(next); !ok {
			return next, nil, false
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		target, err := os.Readlink(next)
		if links++; err != nil || links > maxLinks {
			w.add(&ProgramError{Path: next, Err: ErrUnreadable, Remedy: "give the path of the file itself"})
			return next, nil, false
		}
		if filepath.IsAbs(target) {
			at = w.root
		}
		rest = append(parts(target), rest...)
	}
	return at, info, ok
}

func parts(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(p string) bool { return p == "" || p == "." })
}

// look checks who owns and who may write a file, a folder or a link. It reports false if there is none.
func (w *walk) look(path string) (fs.FileInfo, bool) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		w.add(&ProgramError{Path: path, Err: ErrMissing, Remedy: "install it, or correct the path"})
		return nil, false
	case err != nil:
		w.add(&ProgramError{Path: path, Err: fmt.Errorf("%w: %w", ErrUnreadable, err), Remedy: "let the agent's user search the folder above it"})
		return nil, false
	}
	e, group := about(path, info)
	if e.Owner != 0 && e.Owner != w.own {
		owner := e
		owner.Err, owner.Remedy = ErrOwner, "chown it to root"
		w.add(&owner)
	}
	byGroup := e.Mode&0o020 != 0 && (group != 0 && group != w.ownGroup || hasACL(path))
	sticky := w.sticky && e.Mode&fs.ModeSticky != 0 && e.Mode.IsDir()
	if e.Mode&fs.ModeSymlink == 0 && (byGroup || e.Mode&0o002 != 0) && !sticky && !isConfigMap(path) {
		e.Err, e.Remedy = ErrWritable, "chmod go-w it, or install the program elsewhere"
		w.add(&e)
	}
	return info, true
}

// about is an error without what is wrong, and the group of the file.
func about(path string, info fs.FileInfo) (e ProgramError, group uint32) {
	e = ProgramError{Path: path, Mode: info.Mode()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, group = stat.Uid, stat.Gid
	}
	return e, group
}

// hasACL reports whether a file has an access control list with users or groups of its own. Then the mode of its group
// is what these may do at most (acl(5)).
func hasACL(path string) bool {
	size, err := unix.Lgetxattr(path, "system.posix_acl_access", nil)
	return err == nil && size > 0
}

// isConfigMap reports whether a folder is the mount of a ConfigMap in a container: the kubelet gives it mode 0777
// (defaultPerm in its emptydir), and mounts it read-only. What others can write elsewhere they can also write through a
// read-only mount of it.
func isConfigMap(path string) bool {
	text, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return false
	}
	return isConfigMapIn(string(text), path)
}

// isConfigMapIn is isConfigMap by proc_pid_mountinfo(5). Of several mounts at one path the last one is seen.
func isConfigMapIn(mounts, path string) (is bool) {
	for line := range strings.Lines(mounts) {
		fields := strings.Fields(line)
		if len(fields) < 6 || escaped.Replace(fields[4]) != path {
			continue
		}
		readOnly := slices.Contains(strings.Split(fields[5], ","), "ro")
		is = readOnly && filepath.Base(filepath.Dir(fields[3])) == "kubernetes.io~configmap"
	}
	return is
}

// escaped has the characters that a line of mountinfo has as octal numbers.
var escaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func (w *walk) lookAtProgram(path string, info fs.FileInfo) {
	e, _ := about(path, info)
	switch {
	case !info.Mode().IsRegular():
		e.Err, e.Remedy = ErrNotRegular, "give the path of a program"
	case unix.Access(path, unix.X_OK) != nil:
		e.Err, e.Remedy = ErrNotExecutable, "chmod a+x it; its file system must not be mounted noexec"
	default:
		return
	}
	w.add(&e)
}

// add notes an error once: a folder is on the way to several files.
func (w *walk) add(e *ProgramError) {
	noted := func(err error) bool {
		other, ok := errors.AsType[*ProgramError](err)
		return ok && other.Path == e.Path && errors.Is(other.Err, e.Err)
	}
	if !slices.ContainsFunc(w.errs, noted) {
		w.errs = append(w.errs, e)
	}
}
