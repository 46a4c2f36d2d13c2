package lossy_test

import (
	"bufio"
	"fmt"
	"io"
	"sync"
	"testing"

	"github.com/tandem-gpu/tandem/internal/lossy"
)

func missing(n int64) []byte { return fmt.Appendf(nil, "missing %d\n", n) }

// Lines come in order and whole; of those that found no room, the number comes.
func TestLinesComeOrAreCounted(t *testing.T) {
	out, in := io.Pipe()
	defer func() { _ = in.Close() }()
	w := lossy.New(in, missing)
	const all = 5000
	for i := range all {
		if n, err := fmt.Fprintf(w, "line %d\n", i); n == 0 || err != nil {
			t.Fatal(n, err)
		}
	}
	w.Flush() // comes back, although nobody reads
	lines := bufio.NewScanner(out)
	came, lost := 0, 0
	for came+lost < all && lines.Scan() {
		var n int
		if _, err := fmt.Sscanf(lines.Text(), "missing %d", &n); err == nil {
			lost += n
		} else if _, err := fmt.Sscanf(lines.Text(), "line %d", &n); err == nil && n == came {
			came++
		} else {
			t.Fatalf("after %d lines: %q", came, lines.Text())
		}
	}
	if came+lost != all || came < 1000 || lost == 0 {
		t.Errorf("%d lines came and %d are missing, of %d", came, lost, all)
	}
	_ = out.Close()
	_, _ = io.WriteString(w, "nobody hears it\n")
	w.Flush()
}

func TestAllOfAQuietLogIsWritten(t *testing.T) {
	var mu sync.Mutex
	var got []byte
	w := lossy.New(writer(func(p []byte) { mu.Lock(); defer mu.Unlock(); got = append(got, p...) }), missing)
	_, _ = io.WriteString(w, "a\n")
	_, _ = io.WriteString(w, "b\n")
	w.Flush()
	mu.Lock()
	defer mu.Unlock()
	if string(got) != "a\nb\n" {
		t.Errorf("%q", got)
	}
}

type writer func([]byte)

func (f writer) Write(p []byte) (int, error) { f(p); return len(p), nil }
