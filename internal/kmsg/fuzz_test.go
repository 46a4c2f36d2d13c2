package kmsg

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
)

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
	lines, failed := make(chan Line), make(chan error, 1)
	go func() {
		defer close(lines)
		failed <- read(t.Context(), io.MultiReader(log, iotest.ErrReader(errEnd)), next, lines)
	}()
	var all []Line
	for l := range lines {
		all = append(all, l)
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
	c, err := Read(t.Context(), path, from)
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
	if again, err := Read(t.Context(), path, c.Next); err != nil || len(again.Lines) > 0 || again.Older || again.Next != c.Next {
		t.Errorf("read again: %+v, %v", again, err)
	}
}
