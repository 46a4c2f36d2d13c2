package kmsg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

func TestStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines, count, done := make(chan arrival), 0, make(chan bool)
		go func() { hold(t.Context(), lines, func(arrival) { count++ }); close(done) }()
		for i := range 10_000 { // 10 s
			time.Sleep(time.Millisecond) // inside the bubble: fake time
			lines <- arrival{line: Line{PCI: "0000:01:00.0", XID: 13, Seq: uint64(i)}}
		}
		close(lines)
		<-done
		if count != 5 {
			t.Errorf("emitted %d lines, want one each 2 s", count)
		}
	})
}

// More than can be held is emitted early, all of it and in order.
func TestOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines, emitted := make(chan arrival), make(chan Line, 3*maxHeld)
		go hold(t.Context(), lines, func(a arrival) { emitted <- a.line })
		for i := range uint64(3 * maxHeld) {
			lines <- arrival{line: Line{PCI: gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i%256)), XID: i / 256, Seq: i}}
		}
		synctest.Wait()
		if n := len(emitted); n != 2*maxHeld {
			t.Errorf("emitted %d lines early, want all but %d", n, maxHeld)
		}
		time.Sleep(holdFor)
		synctest.Wait()
		if n := len(emitted); n != 3*maxHeld {
			t.Fatalf("emitted %d lines of %d", n, 3*maxHeld)
		}
		for i := range uint64(3 * maxHeld) {
			if l := <-emitted; l.Seq != i {
				t.Fatalf("line %d is number %d", i, l.Seq)
			}
		}
	})
}

// The answers of the device: overwritten records, no record at present, an error.
func TestRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		answers := []any{
			"4,1,9,-;NVRM: Xid (PCI:0000:01:00): 79, x\n SUBSYSTEM=pci\n",
			syscall.EPIPE,
			"4,900,9,-;NVRM: Xid (PCI:0000:01:00): 48, x\n",
			syscall.EAGAIN,
			io.EOF,
			"4,901,9,-;NVRM: Xid (PCI:0000:01:00): 95, x\n",
			broken,
		}
		log := readerFunc(func(p []byte) (int, error) {
			if len(p) < recordSize {
				return 0, syscall.EINVAL // as the device for a buffer that is too small
			}
			answer := answers[0]
			answers = answers[1:]
			if err, ok := answer.(error); ok {
				return 0, err
			}
			return copy(p, answer.(string)), nil
		})
		lines, failure := make(chan arrival), make(chan error, 1)
		start := time.Now()
		go func() { failure <- read(t.Context(), tail(t.Context(), log, pollEvery), 0, lines); close(lines) }()
		var got []uint64
		for l := range lines {
			got = append(got, l.line.XID)
		}
		if diff := cmp.Diff([]uint64{79, 48, 95}, got); diff != "" {
			t.Error(diff)
		}
		if err := <-failure; !errors.Is(err, broken) {
			t.Errorf("ended with %v", err)
		}
		if took := time.Since(start); took != 2*pollEvery {
			t.Errorf("waited %v for what was not there yet", took)
		}
	})
}

func TestHeldAreEmittedAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines := make(chan arrival, 1)
		lines <- arrival{line: Line{XID: 79}}
		close(lines)
		count := 0
		hold(context.Background(), lines, func(arrival) { count++ })
		if count != 1 {
			t.Errorf("emitted %d lines", count)
		}
	})
}

// A reader that continues at the Next of the latest line gets each line that was not emitted, and no dropped repetition of it.
func TestNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines := make(chan arrival)
		var mu sync.Mutex
		var got []string
		emitted := func() []string { mu.Lock(); defer mu.Unlock(); return slices.Clone(got) }
		go hold(t.Context(), lines, func(a arrival) {
			mu.Lock()
			defer mu.Unlock()
			l := a.line
			got = append(got, fmt.Sprintf("%d@%d>%d", l.XID, l.Seq, l.Next))
		})
		for _, l := range []Line{{XID: 79, Seq: 5}, {XID: 48, Seq: 8}, {XID: 79, Seq: 9}} {
			lines <- arrival{line: l}
			time.Sleep(time.Second / 2)
		}
		time.Sleep(time.Second / 2)
		synctest.Wait()
		if diff := cmp.Diff([]string{"79@5>8"}, emitted()); diff != "" {
			t.Error(diff)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]string{"79@5>8", "48@8>10"}, emitted()); diff != "" {
			t.Error(diff)
		}
	})
}

var errEnd = errors.New("the end")

// FuzzRead checks that the lines of a log are emitted in order and once each, whatever the sizes of its reads.
func FuzzRead(f *testing.F) {
	f.Add([]byte("4,7,1,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n4,7,1,-;NVRM: Xid (PCI:0000:01:00): 79\n4,9,1,-;NVRM: Xid (PCI:0000:01:00): 94\n"), uint64(0))
	f.Add([]byte(strings.Repeat("x", recordSize+1)+"\n4,18446744073709551615,1,-;NVRM: Xid (PCI:0000:01:00): 79\n"), uint64(1)<<63)
	f.Add([]byte("\n\n\x00\n4,1"), uint64(3))
	f.Fuzz(func(t *testing.T, text []byte, from uint64) {
		whole, next := follow(t, bytes.NewReader(text), from), from
		for _, l := range whole {
			if l.Seq < next {
				t.Errorf("record %d, wanted from %d", l.Seq, next)
			}
			next = l.Seq + 1
		}
		cut := follow(t, iotest.OneByteReader(bytes.NewReader(text)), from)
		if len(cut) != len(whole) {
			t.Errorf("%d lines, cut up %d", len(whole), len(cut))
		}
		readAll(t, text, from)
	})
}

// follow reads all lines of a log that fails in the end.
func follow(t *testing.T, log io.Reader, next uint64) []Line {
	t.Helper()
	lines, failed := make(chan arrival), make(chan error, 1)
	go func() {
		defer close(lines)
		failed <- read(t.Context(), tail(t.Context(), io.MultiReader(log, iotest.ErrReader(errEnd)), pollEvery), next, lines)
	}()
	var all []Line
	for l := range lines {
		all = append(all, l.line)
	}
	if err := <-failed; !errors.Is(err, errEnd) {
		t.Errorf("ended with %v", err)
	}
	return all
}

// readAll reads a complete log: a later read from its end returns no line again, and the Next of a line is the number of the line
// after it.
func readAll(t *testing.T, text []byte, from uint64) {
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	present := func(first uint64) (Contents, error) {
		log, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = log.Close() }()
		return log.Read(t.Context(), first)
	}
	c, err := present(from)
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range c.Lines {
		next := c.Next
		if i+1 < len(c.Lines) {
			next = c.Lines[i+1].Seq
		}
		if l.Next != next || l.Seq >= next || l.Seq < from && !c.Older {
			t.Errorf("line %+v, the next is %d", l, next)
		}
	}
	if again, err := present(c.Next); err != nil || len(again.Lines) > 0 || again.Older || again.Next != c.Next {
		t.Errorf("read again: %+v, %v", again, err)
	}
}
