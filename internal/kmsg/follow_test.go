package kmsg_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/kmsg"
)

const held = 2 * time.Second // how long a line waits

// following is a Follow inside a synctest bubble: time passes only when all goroutines wait.
type following struct {
	t    *testing.T
	stop func() error

	mu  sync.Mutex
	got []kmsg.Line
}

func follow(t *testing.T, path string, next uint64) *following {
	f := &following{t: t}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	emit := func(l kmsg.Line) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.got = append(f.got, l)
	}
	go func() { done <- kmsg.Follow(ctx, path, next, emit) }()
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	grow = func(s string) {
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	grow(content)
	return path, grow
}

func TestPresentLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follow(t, "testdata/xids.kmsg", 0)
		f.emitted(held - time.Millisecond) // the event of NVML must be first
		f.emitted(time.Millisecond, "79@2002", "154@2004", "149@2010", "119@2012")
		f.emitted(time.Hour, "79@2002", "154@2004", "149@2010", "119@2012")
		if err := f.stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		want := kmsg.Line{PCI: "0000:5a:00.0", XID: 154, Seq: 2004, Next: 2010, Text: "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"}
		if diff := cmp.Diff(want, f.got[1]); diff != "" {
			t.Error(diff)
		}
	})
}

func TestLinesFromANumberOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follow(t, "testdata/xids.kmsg", 2005)
		f.emitted(held, "149@2010", "119@2012")
		_ = f.stop()
	})
}

func TestGrowth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path, grow := file(t, xidRecord(0, 1, 79))
		f := follow(t, path, 0)
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
		f := follow(t, path, 0)
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
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	for _, path := range []string{pipe, "/dev/kmsg"} {
		t.Run(path, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var cancelled time.Time
			time.AfterFunc(50*time.Millisecond, func() { cancelled = time.Now(); cancel() })
			err := kmsg.Follow(ctx, path, 0, func(kmsg.Line) {})
			if errors.Is(err, kmsg.ErrUnavailable) {
				t.Skip(err)
			}
			if took := time.Since(cancelled); !errors.Is(err, context.Canceled) || took > 100*time.Millisecond {
				t.Errorf("ended with %v, %v after the context", err, took)
			}
		})
	}
}
