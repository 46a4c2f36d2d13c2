package asynclog_test

import (
	"bufio"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/asynclog"
)

func missing(n int64) []byte { return fmt.Appendf(nil, "missing %d\n", n) }

// Lines are complete and in order; where some were dropped, their number is written instead. How many are depends on when the
// writing goroutine begins: there may be several gaps.
func TestLinesComeOrAreCounted(t *testing.T) {
	out, in := io.Pipe()
	defer func() { _ = in.Close() }()
	w := asynclog.New(in, missing)
	const all = 5000
	for i := range all {
		if n, err := fmt.Fprintf(w, "line %d\n", i); n == 0 || err != nil {
			t.Fatal(n, err)
		}
	}
	w.Flush(100 * time.Millisecond) // returns, although the pipe is not read
	lines := bufio.NewScanner(out)
	came, lost := 0, 0
	for came+lost < all && lines.Scan() {
		var n int
		if _, err := fmt.Sscanf(lines.Text(), "missing %d", &n); err == nil {
			lost += n
		} else if _, err := fmt.Sscanf(lines.Text(), "line %d", &n); err == nil && n == came+lost {
			came++
		} else {
			t.Fatalf("after %d lines: %q", came, lines.Text())
		}
	}
	if came+lost != all || came < 1000 || lost == 0 {
		t.Errorf("%d lines came and %d are missing, of %d", came, lost, all)
	}
	_ = out.Close()
	_, _ = io.WriteString(w, "after the end\n")
	w.Flush(time.Minute)
}

// The queue is full, lines are dropped, and a reader makes room: their number follows the last line before the gap, not the line
// that is written first.
func TestNumberOfLostLinesComesInTheirPlace(t *testing.T) {
	out, in := io.Pipe()
	defer func() { _ = out.Close() }()
	w := asynclog.New(in, missing)
	lines := bufio.NewScanner(out)
	next := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("got %q, want %q", lines.Text(), want)
		}
	}
	write := func(text string) { _, _ = io.WriteString(w, text+"\n") }
	write("first") // the writing goroutine has taken it by the time that it can be read
	next("first")
	const room = 1024
	write("line 0") // and it hangs in the write of this one, once it has taken it
	for written := 1; written < room+20; written++ {
		write(fmt.Sprintf("line %d", written))
		if written == 1 {
			time.Sleep(50 * time.Millisecond) // if it has not taken line 0 by then, one line more is lost
		}
	}
	last := 0
	for lines.Scan() {
		var n int
		if _, err := fmt.Sscanf(lines.Text(), "missing %d", &n); err == nil {
			if n != room+19-last || last < room-1 {
				t.Errorf("%d lines are reported missing after line %d, of %d", n, last, room+20)
			}
			break
		}
		if _, err := fmt.Sscanf(lines.Text(), "line %d", &n); err != nil || n > last+1 {
			t.Fatalf("%q after line %d", lines.Text(), last)
		}
		last = n
	}
	write("after")
	next("after")
}

func TestAllOfAQuietLogIsWritten(t *testing.T) {
	var mu sync.Mutex
	var got []byte
	w := asynclog.New(writer(func(p []byte) { mu.Lock(); defer mu.Unlock(); got = append(got, p...) }), missing)
	_, _ = io.WriteString(w, "a\n")
	_, _ = io.WriteString(w, "b\n")
	w.Flush(time.Minute)
	mu.Lock()
	defer mu.Unlock()
	if string(got) != "a\nb\n" {
		t.Errorf("%q", got)
	}
}

type writer func([]byte)

func (f writer) Write(p []byte) (int, error) { f(p); return len(p), nil }
