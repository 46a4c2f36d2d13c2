package history_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestInvalidFilesAreSetAside(t *testing.T) {
	d := newDisk(t)
	d.save(d.open(), full())
	whole := d.read(d.path())
	replaced := func(old, with string) []byte {
		if !bytes.Contains(whole, []byte(old)) {
			t.Fatalf("no %q in the file", old)
		}
		return bytes.ReplaceAll(whole, []byte(old), []byte(with))
	}
	for name, c := range map[string]struct {
		text []byte
		why  string
		kept int // conditions, with those of unknown faults
	}{
		"empty":          {nil, "unexpected end", 0},
		"truncated":      {whole[:len(whole)/2], "unexpected end", 0},
		"zeroed":         {make([]byte, len(whole)), "invalid character", 0},
		"no JSON":        {[]byte("health = ok\n"), "invalid character", 0},
		"null":           {[]byte("null"), "format version 0", 0},
		"newer":          {replaced(`"Version": 2`, `"Version": 3`), "format version 3, this agent knows 2 and reads", 2},
		"of another":     {replaced(`"Agent": "k8s-gpu"`, `"Agent": "nomad-gpu"`), `of \"nomad-gpu\"`, 0},
		"too large":      {append(bytes.Clone(whole), make([]byte, 8<<20)...), "larger than", 0},
		"unknown reason": {bytes.Replace(whole, []byte(`"Reason": "XID"`), []byte(`"Reason": "BAD_LUCK"`), 1), `BAD_LUCK`, 2},
		"unknown state":  {bytes.Replace(whole, []byte(`"State": "degraded"`), []byte(`"State": "poorly"`), 1), "poorly", 2},
		"unknown action": {bytes.Replace(whole, []byte(`"Reason": "XID"`), []byte(`"Reason": "RECOVERY_ACTION"`), 1),
			"no recovery action", 2},
		"against nothing": {[]byte(`{"Version":2,"Agent":"k8s-gpu","Record":{"Conditions":[{"Reason":"LOST"}]}}`), "no GPU", 0},
		"no reason":       {[]byte(`{"Version":2,"Agent":"k8s-gpu","Record":{"Conditions":[{"At":{"GPU":"GPU-a"}}]}}`), "no reason", 1},
		"unknown answer":  {replaced(`"RecoveryAction": "none"`, `"RecoveryAction": "maybe"`), "maybe", 2},
		"nameless device": {replaced(`"ID": "GPU-a"`, `"ID": ""`), "no UUID", 2},
		"device twice":    {replaced(`"ID": "GPU-a"`, `"ID": "GPU-b"`), "twice", 2},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t)
			d.write(c.text)
			f := d.open()
			r, _ := f.Load()
			if len(r.Conditions) != c.kept {
				t.Errorf("%d conditions, want %d", len(r.Conditions), c.kept)
			}
			if got := d.log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, c.why) {
				t.Errorf("log %q, want %q", got, c.why)
			}
			if aside := d.read(d.path() + ".broken"); !bytes.Equal(aside, c.text) {
				t.Errorf("%d bytes are kept aside of %d", len(aside), len(c.text))
			}
			d.save(f, r)
			next, _ := d.open().Load()
			if diff := diff(r, next); diff != "" || strings.Count(d.log.String(), "\n") != 1 || f.Problem() != "" {
				t.Errorf("afterwards: %s\n%s %s", diff, d.log.String(), f.Problem())
			}
		})
	}
}

func TestFolderInPlaceOfTheFile(t *testing.T) {
	d := newDisk(t)
	check.NoError(t, os.MkdirAll(d.path(), 0o755))
	f := d.open()
	f.Load()
	d.save(f, full())
	if r, _ := d.open().Load(); diff(full(), r) != "" || f.Problem() != "" || d.logged("kept aside") != 1 {
		t.Errorf("kept %+v, problem %q, log %s", r, f.Problem(), d.log.String())
	}
}

// A folder that can't be used is logged once, and once more when it can.
func TestFailureIsLoggedOnce(t *testing.T) {
	d := newDisk(t)
	obstacle := filepath.Dir(d.dir)
	check.NoError(t, os.MkdirAll(filepath.Dir(obstacle), 0o755))
	check.NoError(t, os.WriteFile(obstacle, nil, 0o600))
	f := d.open()
	f.Load()
	for range 3 {
		d.fails(f, full(), "not a directory")
	}
	if p := f.Problem(); !strings.Contains(p, "not a directory") || strings.Contains(p, "\n") || d.logged("not saved") != 1 {
		t.Errorf("problem %q, log %s", p, d.log.String())
	}
	check.NoError(t, os.Remove(obstacle))
	for range 3 {
		d.save(f, full())
	}
	if p := f.Problem(); p != "" || d.logged("saved again") != 1 {
		t.Errorf("problem %q, log %s", p, d.log.String())
	}
	if r, _ := d.open().Load(); diff(full(), r) != "" {
		t.Errorf("kept %+v", r)
	}
}

// mount puts a file system of 64 KiB at the folder.
func (d *disk) mount(flags uintptr) {
	d.Helper()
	check.NoError(d, os.MkdirAll(d.dir, 0o755))
	err := syscall.Mount("tmpfs", d.dir, "tmpfs", flags, "size=64k")
	if errors.Is(err, syscall.EPERM) {
		d.Skip("mount is not permitted")
	}
	check.NoError(d, err)
	d.Cleanup(func() {
		if err := syscall.Unmount(d.dir, 0); err != nil {
			d.Error(err)
		}
	})
}

func TestFullDiskKeepsTheFile(t *testing.T) {
	d := newDisk(t)
	d.mount(0)
	f := d.open()
	d.save(f, full())
	ballast := filepath.Join(d.dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 128<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	d.fails(f, core.Checkpoint{BootID: "other"}, "no space left")
	if p := f.Problem(); !strings.Contains(p, "no space left") {
		t.Errorf("problem %q", p)
	}
	if r, _ := d.open().Load(); diff(full(), r) != "" {
		t.Errorf("kept %+v", r)
	}
	if got := d.names(); len(got) != 2 {
		t.Errorf("left: %v", got)
	}
	check.NoError(t, os.Remove(ballast))
	d.save(f, core.Checkpoint{BootID: "other"})
	if r, _ := d.open().Load(); r.BootID != "other" || f.Problem() != "" {
		t.Errorf("kept %+v, problem %q", r, f.Problem())
	}
}

func TestReadOnlyDisk(t *testing.T) {
	d := newDisk(t)
	d.mount(syscall.MS_RDONLY)
	f := d.open()
	f.Load()
	d.fails(f, full(), "read-only file system")
	if p := f.Problem(); !strings.Contains(p, "read-only file system") || d.logged("not saved") != 1 {
		t.Errorf("problem %q, log %s", p, d.log.String())
	}
}

func TestTemporaryFilesOfACrashAreRemoved(t *testing.T) {
	d := newDisk(t)
	d.write(nil)
	for _, name := range []string{".k8s-gpu.json8201", ".nomad-gpu.json8201", ".k8s-gpu.jsonnet"} {
		check.NoError(t, os.WriteFile(filepath.Join(d.dir, name), nil, 0o600))
	}
	d.open().Load()
	if got := strings.Join(d.names(), " "); got != ".k8s-gpu.jsonnet .nomad-gpu.json8201 k8s-gpu.json.broken" {
		t.Errorf("left: %s", got)
	}
}

// A read-only file is never changed, created or renamed, whatever its content.
func TestReadOnlyFile(t *testing.T) {
	d := newDisk(t)
	load := func() (core.Checkpoint, string) {
		f := history.OpenReadOnly(d.dir, agent, d.proc)
		r, boot := f.Load()
		if boot != "b00t" {
			t.Errorf("boot %q", boot)
		}
		f.SetAside(errors.New("another node"))
		d.fails(f, core.Checkpoint{}, "belongs to an agent")
		return r, strings.Join(problem.Lines(f.Problems()), "\n")
	}
	if r, problem := load(); len(r.Devices) > 0 || problem != "" {
		t.Errorf("without a file: %+v, %s", r, problem)
	}
	if _, err := os.Stat(d.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder was created: %v", err)
	}
	d.save(d.open(), full())
	if r, problem := load(); diff(full(), r) != "" || problem != "" {
		t.Errorf("%s, %s", diff(full(), r), problem)
	}
	d.write([]byte("broken"))
	if _, problem := load(); !strings.Contains(problem, "invalid character") {
		t.Errorf("problem %q", problem)
	}
	if got := d.names(); len(got) != 1 || string(d.read(d.path())) != "broken" {
		t.Errorf("left: %v", got)
	}
}

// A denial names SELinux where that is on, as the mode of the folder is not the cause then.
func TestDenialNamesWhatToChange(t *testing.T) {
	for name, c := range map[string]struct{ label, want string }{
		"SELinux":  {"system_u:system_r:container_t:s0:c1,c2\x00", "permission denied; SELinux has this process as container_t: "},
		"AppArmor": {"cri-containerd.apparmor.d (enforce)\n", "permission denied; this process is user "},
		"none":     {"", "permission denied; this process is user "},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t)
			label := filepath.Join(d.proc, "self/attr/current")
			if err := errors.Join(os.MkdirAll(filepath.Dir(label), 0o755), os.WriteFile(label, []byte(c.label), 0o644),
				os.MkdirAll(d.dir, 0o755), os.Chmod(d.dir, 0o555)); err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{filepath.Dir(d.dir), d.proc} { // so that it is d.dir which denies
				for ; filepath.Clean(path) != filepath.Clean(os.TempDir()); path = filepath.Dir(path) {
					check.NoError(t, os.Chmod(path, 0o755))
				}
			}
			f := d.open()
			asUser(func() { _ = f.Save(full()) })
			if p := f.Problem(); !strings.Contains(p, c.want) || !strings.Contains(p, d.dir) || d.logged("not saved") != 1 {
				t.Errorf("problem %q, log %s", p, d.log.String())
			}
		})
	}
}

// asUser runs do with the file permissions of an ordinary user.
func asUser(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocks it: the thread ends with the goroutine
		_ = syscall.Setfsuid(65534)
		do()
	}()
	<-done
}
