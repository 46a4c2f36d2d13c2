package checkpoint_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/core"
)

func TestUnreadableFilesAreKeptAside(t *testing.T) {
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
		kept int // conditions
	}{
		"empty":          {nil, "unexpected end", 0},
		"truncated":      {whole[:len(whole)/2], "unexpected end", 0},
		"zeroed":         {make([]byte, len(whole)), "invalid character", 0},
		"no JSON":        {[]byte("health = well\n"), "invalid character", 0},
		"null":           {[]byte("null"), "format version 0", 0},
		"newer":          {replaced(`"Version": 1`, `"Version": 2`), "format version 2, this agent knows 1", 0},
		"of another":     {replaced(`"Agent": "k8s-gpu"`, `"Agent": "nomad-gpu"`), `of \"nomad-gpu\"`, 0},
		"too large":      {append(bytes.Clone(whole), make([]byte, 8<<20)...), "larger than", 0},
		"unknown reason": {bytes.Replace(whole, []byte(`"Reason": "XID"`), []byte(`"Reason": "BAD_LUCK"`), 1), `BAD_LUCK`, 1},
		"unknown state":  {bytes.Replace(whole, []byte(`"State": "degraded"`), []byte(`"State": "poorly"`), 1), "poorly", 1},
		"no such verdict": {bytes.Replace(whole, []byte(`"Reason": "XID"`), []byte(`"Reason": "VERDICT"`), 1),
			"no verdict", 1},
		"against nothing": {[]byte(`{"Version":1,"Agent":"k8s-gpu","Record":{"Conditions":[{"Reason":"LOST"}]}}`), "no GPU", 0},
		"no reason":       {[]byte(`{"Version":1,"Agent":"k8s-gpu","Record":{"Conditions":[{"At":{"GPU":"GPU-a"}}]}}`), "no reason", 0},
		"unknown vitals":  {replaced(`"Verdict": "none"`, `"Verdict": "maybe"`), "maybe", 2},
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
				t.Errorf("said %q, want %q", got, c.why)
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
	if err := os.MkdirAll(d.path(), 0o755); err != nil {
		t.Fatal(err)
	}
	f := d.open()
	f.Load()
	d.save(f, full())
	if r, _ := d.open().Load(); diff(full(), r) != "" || f.Problem() != "" || d.said("kept aside") != 1 {
		t.Errorf("kept %+v, problem %q, said %s", r, f.Problem(), d.log.String())
	}
}

// A folder that can't be used is said once, and once more when it can.
func TestFailureIsSaidOnce(t *testing.T) {
	d := newDisk(t)
	inTheWay := filepath.Dir(d.dir)
	if err := os.MkdirAll(filepath.Dir(inTheWay), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(inTheWay, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f := d.open()
	f.Load()
	for range 3 {
		d.fails(f, full(), "not a directory")
	}
	if p := f.Problem(); !strings.Contains(p, "not a directory") || strings.Contains(p, "\n") || d.said("is not kept") != 1 {
		t.Errorf("problem %q, said %s", p, d.log.String())
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		d.save(f, full())
	}
	if p := f.Problem(); p != "" || d.said("is kept again") != 1 {
		t.Errorf("problem %q, said %s", p, d.log.String())
	}
	if r, _ := d.open().Load(); diff(full(), r) != "" {
		t.Errorf("kept %+v", r)
	}
}

// mount puts a file system of 64 KiB at the folder.
func (d *disk) mount(flags uintptr) {
	d.Helper()
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		d.Fatal(err)
	}
	err := syscall.Mount("tmpfs", d.dir, "tmpfs", flags, "size=64k")
	if errors.Is(err, syscall.EPERM) {
		d.Skip("may not mount")
	}
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() {
		if err := syscall.Unmount(d.dir, 0); err != nil {
			d.Error(err)
		}
	})
}

func TestFullDiskKeepsWhatThereWas(t *testing.T) {
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
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
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
	if p := f.Problem(); !strings.Contains(p, "read-only file system") || d.said("is not kept") != 1 {
		t.Errorf("problem %q, said %s", p, d.log.String())
	}
}

func TestWhatACrashLeftIsTidied(t *testing.T) {
	d := newDisk(t)
	d.write(nil)
	for _, name := range []string{".k8s-gpu.json8201", ".nomad-gpu.json8201", ".k8s-gpu.jsonnet"} {
		if err := os.WriteFile(filepath.Join(d.dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d.open().Load()
	if got := strings.Join(d.names(), " "); got != ".k8s-gpu.jsonnet .nomad-gpu.json8201 k8s-gpu.json.broken" {
		t.Errorf("left: %s", got)
	}
}

// Who only looks changes nothing, whatever there is.
func TestPeek(t *testing.T) {
	d := newDisk(t)
	look := func() (core.Checkpoint, string) {
		f := checkpoint.Read(d.dir, agent, d.proc)
		r, boot := f.Load()
		if boot != "b00t" {
			t.Errorf("boot %q", boot)
		}
		d.fails(f, core.Checkpoint{}, "belongs to an agent")
		return r, f.Problem()
	}
	if r, problem := look(); len(r.Devices) > 0 || problem != "" {
		t.Errorf("of nothing: %+v, %s", r, problem)
	}
	if _, err := os.Stat(d.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder was made: %v", err)
	}
	d.save(d.open(), full())
	if r, problem := look(); diff(full(), r) != "" || problem != "" {
		t.Errorf("%s, %s", diff(full(), r), problem)
	}
	d.write([]byte("broken"))
	if _, problem := look(); !strings.Contains(problem, "invalid character") {
		t.Errorf("problem %q", problem)
	}
	if got := d.names(); len(got) != 1 || string(d.read(d.path())) != "broken" {
		t.Errorf("left: %v", got)
	}
}

func TestBoot(t *testing.T) {
	d := newDisk(t)
	d.save(d.open(), core.Checkpoint{BootID: "earlier"})
	if r, boot := d.open().Load(); r.BootID != "earlier" || boot != "b00t" {
		t.Errorf("a reboot is not seen: %q, %q", r.BootID, boot)
	}
	for _, unknown := range []string{"", "\n"} {
		d.boot(unknown)
		f := d.open()
		if r, boot := f.Load(); r.BootID != "earlier" || boot != "earlier" {
			t.Errorf("taken for a reboot: %q, %q", r.BootID, boot)
		}
		d.save(f, full())
		if p := f.Problem(); !strings.Contains(p, "reboot") || !strings.Contains(p, "boot_id") || d.said("is kept again") > 0 {
			t.Errorf("problem %q, said %s", p, d.log.String())
		}
		d.save(f, core.Checkpoint{BootID: "earlier"})
		d.boot("b00t")
	}
	// Kept by an agent that could not tell, read by one that can.
	d.save(d.open(), core.Checkpoint{})
	if r, boot := d.open().Load(); r.BootID != "b00t" || boot != "b00t" {
		t.Errorf("taken for a reboot: %q, %q", r.BootID, boot)
	}
}

// The wall clock is set while no agent runs. Times in the history keep their distance from now, which the uptime shows.
func TestHistoryFollowsTheWallClock(t *testing.T) {
	d := newDisk(t)
	uptime := func(since time.Duration) {
		text := fmt.Sprintf("%.2f 12345.67\n", since.Seconds())
		if err := os.WriteFile(filepath.Join(d.proc, "uptime"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	uptime(2 * time.Hour)
	r, boot := d.open().Load()
	r.BootID, r.Driver = boot, "580"
	lost := time.Now().Add(-100 * time.Minute)
	r.Conditions = []core.Condition{{At: core.WholeGPU("GPU-a"), Reason: core.ReasonLost, State: core.GPULost, Since: lost, Last: lost, Count: 1}}
	d.save(d.open(), r)
	for _, since := range []time.Duration{2 * time.Hour, 26 * time.Hour, time.Hour} { // the clock is right, a day behind, an hour ahead
		uptime(since)
		r, _ := d.open().Load()
		want := lost.Add(2*time.Hour - since)
		if got := r.Conditions[0].Last; got.Sub(want).Abs() > 2*time.Second {
			t.Errorf("up %v: lost at %v, want %v", since, got, want)
		}
	}
	if err := os.Remove(filepath.Join(d.proc, "uptime")); err != nil {
		t.Fatal(err)
	}
	if r, _ := d.open().Load(); !r.Conditions[0].Last.Equal(lost) {
		t.Errorf("without an uptime: lost at %v, was %v", r.Conditions[0].Last, lost)
	}
}

// A denial names SELinux where that is on, as the mode of the folder then tells nothing.
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
					if err := os.Chmod(path, 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}
			f := d.open()
			asNobody(func() { _ = f.Save(full()) })
			if p := f.Problem(); !strings.Contains(p, c.want) || !strings.Contains(p, d.dir) || d.said("is not kept") != 1 {
				t.Errorf("problem %q, said %s", p, d.log.String())
			}
		})
	}
}

// asNobody does something with the rights of an ordinary user on files.
func asNobody(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocks it: the thread ends with the goroutine
		_ = syscall.Setfsuid(65534)
		do()
	}()
	<-done
}
