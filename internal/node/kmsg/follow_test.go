package kmsg_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/node/kmsg"
	"github.com/tandem-gpu/tandem/test/check"
)

const held = 2 * time.Second // how long a line waits

// following is a Follow inside a synctest bubble: time passes only when all goroutines wait.
type following struct {
	t    *testing.T
	stop func() error

	mu  sync.Mutex
	got []kmsg.Line
}

var must = check.NoError

// readFile reads a log that it opens.
func readFile(ctx context.Context, path string, first uint64) (kmsg.Contents, error) {
	log, err := kmsg.Open(path)
	if err != nil {
		return kmsg.Contents{}, err
	}
	defer func() { _ = log.Close() }()
	return log.Read(ctx, first)
}

func openLog(t *testing.T, path string) kmsg.Log {
	t.Helper()
	log, err := kmsg.Open(path)
	must(t, err)
	t.Cleanup(func() { _ = log.Close() })
	return log
}

func follow(t *testing.T, log kmsg.Log, next uint64) *following {
	f := &following{t: t}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	emit := func(l kmsg.Line) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.got = append(f.got, l)
	}
	go func() { done <- log.Follow(ctx, next, emit) }()
	f.stop = func() error { cancel(); return <-done }
	return f
}

// emitted compares the emitted lines, as "XID@sequence", after a time.
func (f *following) emitted(after time.Duration, want ...string) {
	f.t.Helper()
	time.Sleep(after) // inside the bubble: fake time
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	var got []string
	for _, l := range f.got {
		got = append(got, fmt.Sprintf("%d@%d", l.XID, l.Seq))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		f.t.Errorf("after %v: %s", after, diff)
	}
}

func xidRecord(seq uint64, slot, xid int) string {
	return fmt.Sprintf("4,%d,1000,-;NVRM: Xid (PCI:0000:%02x:00): %d, text\n", seq, slot, xid)
}

func file(t *testing.T, content string) (path string, grow func(string)) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "kmsg")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	grow = func(s string) {
		_, err := f.WriteString(s)
		must(t, err)
	}
	grow(content)
	return path, grow
}

func TestPresentLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follow(t, openLog(t, "testdata/xids.kmsg"), 0)
		f.emitted(held - time.Millisecond) // the event of NVML must be first
		f.emitted(time.Millisecond, "79@2002", "154@2004", "149@2010", "119@2012")
		f.emitted(time.Hour, "79@2002", "154@2004", "149@2010", "119@2012")
		if err := f.stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		want := kmsg.Line{PCI: "0000:5a:00.0", XID: 154, Seq: 2004, Next: 2010, Age: health.Age{Least: held, Most: held},
			Text: "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"}
		if diff := cmp.Diff(want, f.got[1]); diff != "" {
			t.Error(diff)
		}
	})
}

func TestGrowth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path, grow := file(t, xidRecord(0, 1, 79))
		f := follow(t, openLog(t, path), 0)
		f.emitted(held, "79@0")
		grow("4,5,1000,-;NVRM: Xid (PCI:0000:02")
		f.emitted(time.Minute, "79@0") // a record whose end is not written yet
		grow(":00): 48, text\n" + xidRecord(5, 2, 95) + xidRecord(4, 3, 95))
		f.emitted(held+200*time.Millisecond, "79@0", "48@5") // 5 was seen, 4 is older
		grow("4,6,1000,-;" + strings.Repeat("x", 100<<10) + ";NVRM: Xid (PCI:0000:02:00): 48, text\n" + xidRecord(7, 1, 79))
		f.emitted(held+200*time.Millisecond, "79@0", "48@5", "79@7") // no record is that long
		_ = f.stop()
	})
}

func TestEndWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path, _ := file(t, xidRecord(1, 1, 79))
		f := follow(t, openLog(t, path), 0)
		f.emitted(held / 2)
		if err := f.stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		f.emitted(time.Minute) // not emitted after the end; a later Follow finds it by its number
	})
}

// A read that waits in the kernel ends with the context: of a pipe everywhere, of the log where it can be read.
func TestEndWhileWaiting(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "kmsg")
	must(t, syscall.Mkfifo(pipe, 0o600))
	writer, err := os.OpenFile(pipe, os.O_RDWR, 0)
	must(t, err)
	defer func() { _ = writer.Close() }()
	for _, path := range []string{pipe, "/dev/kmsg"} {
		t.Run(path, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var cancelled time.Time
			time.AfterFunc(50*time.Millisecond, func() { cancelled = time.Now(); cancel() })
			log, err := kmsg.Open(path)
			if errors.Is(err, kmsg.ErrUnavailable) {
				t.Skip(err)
			}
			must(t, err)
			err = log.Follow(ctx, 0, func(kmsg.Line) {})
			if took := time.Since(cancelled); !errors.Is(err, context.Canceled) || took > 10*time.Second {
				t.Errorf("ended with %v, %v after the context", err, took)
			}
		})
	}
}

// at is an XID of a GPU, so many seconds after boot.
func at(seq uint64, seconds, slot, xid int) string {
	return fmt.Sprintf("4,%d,%d000000,-;NVRM: Xid (PCI:0000:%02x:00): %d, text\n", seq, seconds, slot, xid)
}

func TestReadTable(t *testing.T) {
	log := "6,7,1000000,-;a record that is no XID\n" + at(8, 10, 1, 79) + at(9, 20, 2, 119) + " SUBSYSTEM=pci\n" + at(12, 30, 1, 48) +
		"14,20,31000000,-;text of a process\n"
	for _, c := range []struct {
		name  string
		log   string
		first uint64
		want  string
		next  uint64
		older bool
	}{
		{"all of it", log, 0, "[79@8>9 119@9>12 48@12>21]", 21, false},
		{"from a record on", log, 9, "[119@9>12 48@12>21]", 21, false},
		{"between two", log, 10, "[48@12>21]", 21, false},
		{"the kernel has overwritten the requested record", log, 3, "[79@8>9 119@9>12 48@12>21]", 21, false},
		{"nothing since", log, 21, "[]", 21, false},
		{"another log: the number is of another boot", log, 22, "[79@8>9 119@9>12 48@12>21]", 21, true},
		{"an empty log", "", 0, "[]", 0, false},
		{"an empty log in the place of another", "", 5, "[]", 0, true},
		{"a repeated fault", at(1, 10, 1, 31) + at(2, 10, 1, 31) + at(3, 11, 2, 31) + at(4, 11, 1, 31) + at(5, 12, 1, 31), 0,
			"[31@1>3 31@3>5 31@5>6]", 6, false},
		{"a repeated fault, the first line known", at(1, 10, 1, 31) + at(2, 10, 1, 31), 2, "[31@2>3]", 3, false},
		{"a log without times", xidRecord(1, 1, 31) + "4,2,,-;NVRM: Xid (PCI:0000:01:00): 31, x\n" + "4,3,,-;NVRM: Xid (PCI:0000:01:00): 31, x\n", 0,
			"[31@1>2 31@2>3 31@3>4]", 4, false},
		{"lower numbers", at(5, 10, 1, 31) + at(4, 20, 1, 48), 0, "[31@5>6]", 6, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path, _ := file(t, c.log)
			got, err := readFile(t.Context(), path, c.first)
			must(t, err)
			lines := []string{}
			for _, l := range got.Lines {
				lines = append(lines, fmt.Sprintf("%d@%d>%d", l.XID, l.Seq, l.Next))
			}
			if fmt.Sprint(lines) != c.want || got.Next != c.next || got.Older != c.older {
				t.Errorf("%v, next %d, older %t; want %s, %d, %t", lines, got.Next, got.Older, c.want, c.next, c.older)
			}
		})
	}
}

// A read of the kernel's own log ends like that of a file, and the next one continues there.
func TestReadTheDevice(t *testing.T) {
	first, err := readFile(t.Context(), "/dev/kmsg", 0)
	if errors.Is(err, kmsg.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil || first.Next == 0 || first.Older {
		t.Fatalf("%+v, %v", first, err)
	}
	again, err := readFile(t.Context(), "/dev/kmsg", first.Next)
	if err != nil || again.Next < first.Next || again.Older {
		t.Errorf("read again: %+v after %d, %v", again, first.Next, err)
	}
}

// What Read has read is not followed again, what was added since is.
func TestFollowAfterRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path, add := file(t, xidRecord(1, 1, 79)+xidRecord(2, 2, 31))
		log := openLog(t, path)
		present, err := log.Read(t.Context(), 0)
		if err != nil || len(present.Lines) != 2 || present.Next != 3 {
			t.Fatalf("%+v, %v", present, err)
		}
		add(xidRecord(3, 1, 48) + xidRecord(4, 1, 79))
		f := follow(t, log, present.Next)
		f.emitted(held, "48@3", "79@4")
		_ = f.stop()
	})
}

func TestErrors(t *testing.T) {
	missing, folder := filepath.Join(t.TempDir(), "kmsg"), t.TempDir()
	_, err := kmsg.Open(missing)
	want := "kernel log is not readable: open " + missing + ": no such file or directory: give the agent the capability SYSLOG (CAP_SYSLOG), or name a log that it can read"
	if !errors.Is(err, kmsg.ErrUnavailable) || !errors.Is(err, fs.ErrNotExist) || err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	_, readErr := readFile(t.Context(), folder, 0)
	followErr := openLog(t, folder).Follow(t.Context(), 0, func(l kmsg.Line) { t.Errorf("emitted %v", l) })
	for _, err := range []error{readErr, followErr} {
		if !errors.Is(err, syscall.EISDIR) || errors.Is(err, kmsg.ErrUnavailable) {
			t.Errorf("%v, want EISDIR of the read", err)
		}
	}
}

// The number of lines is bounded: the latest are returned.
func TestReadIsBounded(t *testing.T) {
	var text strings.Builder
	for i := range 5000 {
		text.WriteString(at(uint64(i), 10*i, 1, 31))
	}
	path, _ := file(t, text.String())
	got, err := readFile(t.Context(), path, 0)
	if err != nil || len(got.Lines) > 4096 || got.Next != 5000 || !slices.ContainsFunc(got.Lines, func(l kmsg.Line) bool { return l.Seq == 4999 }) {
		t.Errorf("%d lines, next %d, %v", len(got.Lines), got.Next, err)
	}
}
