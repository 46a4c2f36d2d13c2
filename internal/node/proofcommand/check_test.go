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
		w := newWalk()
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

// A user whom an access control list lets write a file is another user.
func TestCheckRefusesWhatAnAccessControlListLetsOthersWrite(t *testing.T) {
	dir, found := trusted(t)
	acl := []byte{2, 0, 0, 0} // POSIX_ACL_XATTR_VERSION, then tag, rights and ID of each entry
	for _, entry := range [][4]byte{{1, 7, 255, 255}, {2, 6, 210, 4}, {4, 5, 255, 255}, {16, 7, 255, 255}, {32, 5, 255, 255}} {
		high := byte(255)
		if entry[0] == 2 { // user 1234
			high = 0
		}
		acl = append(acl, entry[0], 0, entry[1], 0, entry[2], entry[3], high, high)
	}
	if err := unix.Setxattr(filepath.Join(dir, "bin/check"), "system.posix_acl_access", acl, 0); err != nil {
		t.Skipf("no access control lists: %v", err)
	}
	if errs := found(); len(errs) != 1 || !errors.Is(errs[0], ErrWritable) {
		t.Errorf("%v", errs)
	}
}

// mountedReadOnly returns what is found while a folder is mounted read-only at another path.
func mountedReadOnly(t *testing.T, from, at string, find func() []error) []error {
	t.Helper()
	result := make(chan []error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, and with it what is mounted
		defer close(result)
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			t.Logf("no mount namespace: %v", err)
			return
		}
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount(from, at, "", unix.MS_BIND, ""),
			unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")); err != nil {
			t.Error(err)
			return
		}
		result <- find()
	}()
	errs, mounted := <-result
	if !mounted {
		t.Skip("not mounted")
	}
	return errs
}

// below are the errors about what is in a folder.
func below(dir string, err error) (all []error) {
	for _, one := range joined(err) {
		if e, ok := errors.AsType[*ProgramError](one); ok && strings.HasPrefix(e.Path, dir) {
			all = append(all, one)
		}
	}
	return all
}

// reset-server has the host's root mounted read-only: what every user of the host can write is not safe because this
// mount can't be written.
func TestCheckRefusesWhatOthersCanWriteOnAReadOnlyMount(t *testing.T) {
	dir, at := t.TempDir(), t.TempDir()
	check.NoError(t, os.Mkdir(dir+"/bin", 0o755), os.WriteFile(dir+"/bin/nvidia-smi", nil, 0o755), os.Chmod(dir+"/bin", 0o777),
		os.Chmod(dir+"/bin/nvidia-smi", 0o777), os.Chmod(dir, 0o755))
	errs := mountedReadOnly(t, dir, at, func() []error { return below(at, CheckIn(at, []string{"/bin/nvidia-smi"})) })
	if len(errs) != 2 || !errors.Is(errs[0], ErrWritable) || !errors.Is(errs[1], ErrWritable) {
		t.Errorf("%v", errs)
	}
}

// The folder of a ConfigMap has mode 0777, and is mounted read-only. Its files have the mode that the pod gives them.
func TestCheckAcceptsAConfigMap(t *testing.T) {
	dir, at := t.TempDir()+"/kubernetes.io~configmap/check", t.TempDir()
	check.NoError(t, os.MkdirAll(dir+"/..2026_11_29", 0o755), os.Symlink("..2026_11_29", dir+"/..data"), os.Symlink("..data/check", dir+"/check"),
		os.WriteFile(dir+"/..2026_11_29/check", nil, 0o755), os.Chmod(dir, 0o777))
	find := func() []error { return below(at, Check([]string{at + "/check"})) }
	if errs := mountedReadOnly(t, dir, at, find); len(errs) > 0 {
		t.Error(errs)
	}
	check.NoError(t, os.Chmod(dir+"/..2026_11_29/check", 0o777))
	if errs := mountedReadOnly(t, dir, at, find); len(errs) != 1 || !errors.Is(errs[0], ErrWritable) {
		t.Errorf("a file with defaultMode 0777: %v", errs)
	}
	// The same folder without a mount, and within another mount, is any folder.
	if errs := below(dir, Check([]string{dir + "/check"})); len(errs) != 2 {
		t.Errorf("not mounted: %v", errs)
	}
}

func TestConfigMapsByMountinfo(t *testing.T) {
	const volume = "/var/lib/kubelet/pods/6f/volumes/kubernetes.io~configmap/check"
	for line, want := range map[string]bool{
		"900 880 254:0 " + volume + " /check ro,relatime - ext4 /dev/vda rw\n":                                        true,
		"900 880 254:0 " + volume + " /check ro - ext4 /dev/vda rw\n901 900 0:5 / /check ro - tmpfs tmpfs rw\n":       false,
		"900 880 254:0 " + volume + " /check rw,relatime - ext4 /dev/vda rw\n":                                        false,
		"900 880 254:0 " + volume + "/sub /check ro - ext4 /dev/vda rw\n":                                             false,
		"900 880 254:0 /var/lib/kubelet/pods/6f/volumes/kubernetes.io~empty-dir/check /check ro - ext4 /dev/vda rw\n": false,
		"900 880 254:0 / /check ro,relatime - ext4 /dev/vda rw\n":                                                     false,
		"900 880 254:0 " + volume + " /check/x ro - ext4 /dev/vda rw\n":                                               false,
		"900 880\n": false,
		"":          false,
	} {
		if got := isConfigMapIn(line, "/check"); got != want {
			t.Errorf("%q: %t", line, got)
		}
	}
	if !isConfigMapIn("900 880 254:0 "+volume+` /a\040check ro - ext4 /dev/vda rw`, "/a check") {
		t.Error("a path with a space")
	}
}

// LD_LIBRARY_PATH has a program of root load what is in these folders.
func TestCheckRefusesALibraryThatOthersCanWrite(t *testing.T) {
	dir := t.TempDir()
	check.NoError(t, os.Chmod(dir, 0o755), os.Mkdir(dir+"/lib", 0o755), os.WriteFile(dir+"/lib/libcuda.so.580.1", nil, 0o644),
		os.Symlink("libcuda.so.580.1", dir+"/lib/libcuda.so.1"), os.Symlink("none", dir+"/lib/libnone.so"), os.WriteFile(dir+"/lib/readme", nil, 0o644),
		os.Chmod(dir+"/lib/readme", 0o666))
	find := func() []error { return below(dir, CheckLibraryPath("/no/such/folder::"+dir+"/lib")) }
	if errs := find(); len(errs) > 0 {
		t.Error(errs)
	}
	check.NoError(t, os.Chmod(dir+"/lib/libcuda.so.580.1", 0o666))
	if errs := find(); len(errs) != 1 || !errors.Is(errs[0], ErrWritable) {
		t.Errorf("a library: %v", errs)
	}
	if errs := below(dir, CheckLibrary(dir+"/lib/libcuda.so.1")); len(errs) != 1 || !errors.Is(errs[0], ErrWritable) {
		t.Errorf("one library: %v", errs)
	}
	check.NoError(t, os.Chmod(dir+"/lib/libcuda.so.580.1", 0o644), os.Chmod(dir+"/lib", 0o777))
	if errs := find(); len(errs) != 1 || !errors.Is(errs[0], ErrWritable) {
		t.Errorf("a folder: %v", errs)
	}
	check.NoError(t, os.Chmod(dir+"/lib", 0o777|os.ModeSticky))
	if errs := find(); len(errs) != 1 || !errors.Is(errs[0], ErrWritable) {
		t.Errorf("a folder to which every user can add a library: %v", errs)
	}
	if errs := below(dir, CheckLibrary(dir+"/lib/libcuda.so.1")); len(errs) > 0 {
		t.Errorf("one library that no other user can replace: %v", errs)
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
	if _, one := err.(*ProgramError); one { //nolint:errorlint // not in a joined one
		return []error{err}
	}
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		return all.Unwrap()
	}
	return nil
}
