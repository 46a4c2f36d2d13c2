package kmsg

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

var errEnd = errors.New("the end")

// FuzzRead: however a log is cut up, its lines come in its order and each once, until it fails.
func FuzzRead(f *testing.F) {
	f.Add([]byte("4,7,1,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n4,7,1,-;NVRM: Xid (PCI:0000:01:00): 79\n4,9,1,-;NVRM: Xid (PCI:0000:01:00): 94\n"), uint64(0))
	f.Add([]byte(strings.Repeat("x", recordSize+1)+"\n4,18446744073709551615,1,-;NVRM: Xid (PCI:0000:01:00): 79\n"), uint64(1)<<63)
	f.Add([]byte("\n\n\x00\n4,1"), uint64(3))
	f.Fuzz(func(t *testing.T, text []byte, after uint64) {
		whole := follow(t, bytes.NewReader(text), after)
		last, first := after, after == 0
		for _, l := range whole {
			if !first && l.Seq <= last {
				t.Errorf("record %d after %d", l.Seq, last)
			}
			last, first = l.Seq, false
		}
		cut := follow(t, iotest.OneByteReader(bytes.NewReader(text)), after)
		if len(cut) != len(whole) {
			t.Errorf("%d lines, cut up %d", len(whole), len(cut))
		}
	})
}

// follow reads all lines of a log that fails in the end.
func follow(t *testing.T, log io.Reader, after uint64) []Line {
	t.Helper()
	lines, failed := make(chan Line), make(chan error, 1)
	go func() {
		defer close(lines)
		failed <- read(t.Context(), io.MultiReader(log, iotest.ErrReader(errEnd)), after, lines)
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
