package proofcommand

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/test/check"
)

func TestCheckAcceptsASystemsProgram(t *testing.T) {
	for _, path := range []string{"/bin/sh", "/usr/bin/../bin/./env", "//bin//sh"} { // /bin is a symbolic link on most systems
		check.NoError(t, Check([]string{path, "-c", "exit"}))
	}
}

func TestCheckRefusesACommandWithoutAProgram(t *testing.T) {
	for _, c := range []struct {
		command []string
		want    error
	}{
		{nil, ErrNoCommand}, {[]string{""}, ErrNoCommand}, {[]string{"sh"}, ErrRelative}, {[]string{"./sh"}, ErrRelative},
		{[]string{"/no/such/program"}, ErrMissing}, {[]string{"/etc/passwd/sh"}, ErrMissing}, {[]string{"/etc/passwd"}, ErrNotExecutable},
		{[]string{"/usr/bin"}, ErrNotRegular}, {[]string{"/dev/null"}, ErrNotRegular},
	} {
		err := Check(c.command)
		if e, ok := errors.AsType[*ProgramError](err); !errors.Is(err, c.want) || !ok || e.Remedy == "" {
			t.Errorf("%q: %v", c.command, err)
		}
	}
}

// trusted has a folder that only this user can write, with the program bin/check, and the errors of the folders above, which other users may
// be able to write.
func trusted(t *testing.T) (dir string, found func() []*ProgramError) {
	t.Helper()
	dir = t.TempDir()
	program := filepath.Join(dir, "bin", "check")
	check.NoError(t, os.Mkdir(filepath.Join(dir, "bin"), 0o755), os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755), os.Chmod(dir, 0o755))
	return dir, func() (below []*ProgramError) {
		w := walk{root: "/", own: uint32(os.Geteuid()), ownGroup: uint32(os.Getegid())}
		if path, info, ok := w.follow(program); ok {
			w.lookAtProgram(path, info)
		}
		for _, err := range w.errs {
			e, ok := errors.AsType[*ProgramError](err)
			if !ok {
				t.Fatal(err)
			}
			if strings.HasPrefix(e.Path, dir) {
				below = append(below, e)
			}
		}
		return below
	}
}

func TestCheckRefusesWhatOthersCanWrite(t *testing.T) {
	root := os.Geteuid() == 0
	for _, c := range []struct {
		name  string
		path  string // the one with the error
		want  error
		do    func(dir string) error
		chown bool // needs root
	}{
		{name: "nothing", do: func(string) error { return nil }},
		{"program", "bin/check", ErrWritable, func(d string) error { return os.Chmod(d+"/bin/check", 0o757) }, false},
		{"folder", "bin", ErrWritable, func(d string) error { return os.Chmod(d+"/bin", 0o757) }, false},
		{"sticky folder", "bin", ErrWritable, func(d string) error { return os.Chmod(d+"/bin", 0o777|os.ModeSticky) }, false},
		{"folder above", "", ErrWritable, func(d string) error { return os.Chmod(d, 0o777) }, false},
		{"not executable", "bin/check", ErrNotExecutable, func(d string) error { return os.Chmod(d+"/bin/check", 0o644) }, false},
		{"owner of the program", "bin/check", ErrOwner, func(d string) error { return os.Chown(d+"/bin/check", 1234, 0) }, true},
		{"owner of a folder", "bin", ErrOwner, func(d string) error { return os.Chown(d+"/bin", 1234, 0) }, true},
		{"group of a folder", "bin", ErrWritable, func(d string) error { return errors.Join(os.Chown(d+"/bin", 0, 1234), os.Chmod(d+"/bin", 0o775)) }, true},
		{"own group", "", nil, func(d string) error { return os.Chmod(d+"/bin", 0o775) }, false},
		{"folder of a link's target", "open", ErrWritable, func(d string) error {
			return errors.Join(os.Mkdir(d+"/open", 0o755), os.Chmod(d+"/open", 0o777), os.Rename(d+"/bin/check", d+"/open/check"), os.Symlink("../open/check", d+"/bin/check"))
		}, false},
		{"owner of a link", "bin/check", ErrOwner, func(d string) error {
			return errors.Join(os.Rename(d+"/bin/check", d+"/file"), os.Symlink(d+"/file", d+"/bin/check"), os.Lchown(d+"/bin/check", 1234, 0))
		}, true},
		{"link to nothing", "none", ErrMissing, func(d string) error {
			return errors.Join(os.Remove(d+"/bin/check"), os.Symlink("../none", d+"/bin/check"))
		}, false},
		{"link to itself", "bin/check", ErrUnreadable, func(d string) error {
			return errors.Join(os.Remove(d+"/bin/check"), os.Symlink("check", d+"/bin/check"))
		}, false},
	} {
		if c.chown && !root {
			continue
		}
		dir, found := trusted(t)
		check.NoError(t, c.do(dir))
		errs := found()
		if c.want == nil {
			if len(errs) > 0 {
				t.Errorf("%s: %v", c.name, errs[0])
			}
			continue
		}
		if len(errs) != 1 || !errors.Is(errs[0], c.want) || errs[0].Path != filepath.Join(dir, c.path) {
			t.Errorf("%s: %v", c.name, errs)
		}
	}
}

// The folder of a ConfigMap in a container has mode 0777, and is mounted read-only.
func TestCheckAcceptsWhatIsMountedReadOnly(t *testing.T) {
	dir, found := trusted(t)
	check.NoError(t, os.Chmod(dir, 0o777), os.Chmod(filepath.Join(dir, "bin"), 0o777))
	result := make(chan []*ProgramError)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, and with it what is mounted
		defer close(result)
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			t.Logf("no mount namespace: %v", err)
			return
		}
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount(dir, dir, "", unix.MS_BIND, ""),
			unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")); err != nil {
			t.Error(err)
			return
		}
		result <- found()
	}()
	errs, mounted := <-result
	switch {
	case !mounted:
		t.Skip("not mounted")
	case len(errs) > 0:
		t.Error(errs[0])
	}
	if errs := found(); len(errs) != 2 {
		t.Errorf("mounted so that it can be written: %v", errs)
	}
}

func TestCheckTellsEverythingAtOnce(t *testing.T) {
	dir, found := trusted(t)
	check.NoError(t, os.Chmod(dir, 0o777), os.Chmod(filepath.Join(dir, "bin"), 0o777), os.Chmod(filepath.Join(dir, "bin", "check"), 0o666))
	if errs := found(); len(errs) != 4 {
		t.Errorf("%v", errs)
	}
	text := (&ProgramError{Path: "/opt/check", Mode: 0o757, Owner: 1000, Err: ErrWritable, Remedy: "chmod go-w it"}).Error()
	if want := "/opt/check (mode -rwxr-xrwx, owner 1000): other users can write it: chmod go-w it"; text != want {
		t.Errorf("%q, want %q", text, want)
	}
}

// A driver container has its own root, in which symbolic links are, too.
func TestCheckInARoot(t *testing.T) {
	root := t.TempDir()
	check.NoError(t, os.Chmod(root, 0o755), os.MkdirAll(root+"/usr/bin", 0o755), os.MkdirAll(root+"/etc/alternatives", 0o755),
		os.WriteFile(root+"/usr/bin/smi.real", nil, 0o755), os.Symlink("/usr/bin/smi.real", root+"/etc/alternatives/smi"),
		os.Symlink("/etc/alternatives/smi", root+"/usr/bin/smi"), os.Symlink("/../../../usr/bin/smi.real", root+"/up"))
	above := len(joined(Check([]string{root}))) - 1 // other users can write a folder above; and it is no program
	for _, path := range []string{"/usr/bin/smi", "/up"} {
		if errs := joined(CheckIn(root, []string{path})); len(errs) != above {
			t.Errorf("%s: %v", path, errs)
		}
	}
	check.NoError(t, os.Chmod(root, 0o777))
	if errs := joined(CheckIn(root, []string{"/usr/bin/smi"})); len(errs) != above+1 {
		t.Errorf("a root that others can write: %v", errs)
	}
	if err := CheckIn(root, []string{"/usr/bin/env"}); !errors.Is(err, ErrMissing) {
		t.Errorf("a program of the other root: %v", err)
	}
}

func joined(err error) []error {
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		return all.Unwrap()
	}
	return nil
}
