package kmsg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// buffer is a ring buffer of the kernel: readAll returns as many whole lines of its end as fit.
type buffer struct {
	mu    sync.Mutex // of what changes while it is followed
	text  string
	reads []int // the sizes that were asked for
}

func (b *buffer) readAll(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reads = append(b.reads, len(p))
	text := b.text
	for len(text) > len(p) {
		_, text, _ = strings.Cut(text, "\n")
	}
	return copy(p, text), nil
}

// set replaces the text, and returns how much was asked for at most since the text before.
func (b *buffer) set(text string) (most int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	most = slices.Max(append(b.reads, 0))
	b.text, b.reads = text, nil
	return most
}

func (b *buffer) log() Log { return Log{ring: &ring{readAll: b.readAll}} }

// ringLine is a line of the kernel, or of a process if facility is not 0, microseconds after boot.
func ringLine(facility, micros int, text string) string {
	return fmt.Sprintf("<%d>[%5d.%06d] %s\n", facility<<3|4, micros/1e6, micros%1e6, text)
}

func ringXID(micros, slot, xid int) string {
	return ringLine(0, micros, fmt.Sprintf("NVRM: Xid (PCI:0000:%02x:00): %d, text", slot, xid))
}

func xidsOf(lines []Line) (codes []uint64) {
	for _, l := range lines {
		codes = append(codes, l.XID)
	}
	return codes
}

func TestRingLines(t *testing.T) {
	for _, c := range []struct {
		line             string
		priority, micros uint64
		message          string
		ok               bool
	}{
		{"<6>[12296.609702] e2e0: port 2\n", 6, 12296609702, "e2e0: port 2", true},
		{"<4>[    0.000000] Linux version\n", 4, 0, "Linux version", true},
		{"<12>[    1.500000] of a process\n", 12, 1500000, "of a process", true},
		{"<4>[    1.500000][ T1234] with its caller\n", 4, 1500000, "with its caller", true},
		{"<4>[    1.500000][    C3] [drm] with its caller\n", 4, 1500000, "[drm] with its caller", true},
		{"<6>[    1.500000] [drm] of a module\n", 6, 1500000, "[drm] of a module", true},
		{"<6>[    1.500000] \n", 6, 1500000, "", true},
		{"<6>no time\n", 0, 0, "", false},
		{"<6>[drm] no time\n", 0, 0, "", false},
		{"<x>[    1.500000] no priority\n", 0, 0, "", false},
		{"<6>[99999999999999.500000] later than a number can be\n", 0, 0, "", false},
		{"", 0, 0, "", false},
	} {
		if p, at, m, ok := parseRingLine(c.line); p != c.priority || at != c.micros || m != c.message || ok != c.ok {
			t.Errorf("%q: %d, %d, %q, %t", c.line, p, at, m, ok)
		}
	}
}

// Another process gives each line the number that the first one gave it, also of lines at the same time or in the other order,
// and after the oldest lines were overwritten.
func TestRingNumbersStay(t *testing.T) {
	b := &buffer{text: ringLine(0, 10, "a") + ringXID(20, 1, 79) + ringXID(20, 2, 79) + ringXID(19, 3, 119) + ringXID(21, 4, 31)}
	first, err := b.log().Read(t.Context(), 0)
	if err != nil || !slices.Equal(xidsOf(first.Lines), []uint64{79, 79, 119, 31}) {
		t.Fatalf("%+v, %v", first, err)
	}
	for i, l := range first.Lines {
		b := &buffer{text: b.text[strings.Index(b.text, "\n")+1:]} // without the oldest line
		again, err := b.log().Read(t.Context(), l.Next)
		if want := xidsOf(first.Lines[i+1:]); err != nil || !slices.Equal(xidsOf(again.Lines), want) || again.Older {
			t.Errorf("from the line after %d: %v, older %t, %v; want %v", l.XID, xidsOf(again.Lines), again.Older, err, want)
		}
	}
}

// New lines are found at the end of the buffer without reading all of it; after more than a window of them, or when the kernel
// has overwritten what was read before, all of it is read.
func TestRingIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var filler strings.Builder
		for i := range 10_000 {
			filler.WriteString(ringLine(0, 1000+i, "a line of another module"))
		}
		b := &buffer{text: filler.String() + ringXID(1e6, 1, 79)}
		log := b.log()
		present, err := log.Read(t.Context(), 0)
		if err != nil || !slices.Equal(xidsOf(present.Lines), []uint64{79}) {
			t.Fatalf("%+v, %v", present, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var got []uint64
		done := make(chan error)
		go func() { done <- log.Follow(ctx, present.Next, func(l Line) { got = append(got, l.XID) }) }()
		emitted := func(why string, want ...uint64) {
			t.Helper()
			time.Sleep(pollRingEvery + holdFor)
			synctest.Wait()
			if !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", why, got, want)
			}
		}
		synctest.Wait()
		text := b.text
		b.set(text)
		emitted("nothing new")
		text += ringXID(2e6, 1, 48) + ringLine(1, 2e6, "<4>[    1.000000] NVRM: Xid (PCI:0000:03:00): 31, by a process") + ringXID(2e6, 2, 48)
		if most := b.set(text); most > ringWindow {
			t.Errorf("read %d bytes where nothing is new", most)
		}
		emitted("two faults at one time, and a line of a process", 48, 48)
		text += ringXID(3e6, 1, 119) + strings.ReplaceAll(filler.String(), "<4>[    0.", "<4>[    3.")
		b.set(text)
		emitted("a fault and 10,000 lines", 48, 48, 119)
		b.set(ringXID(9e6, 2, 120))
		emitted("all was overwritten", 48, 48, 119, 120)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// A process can't write an XID: text of it with a newline can be in a record of the kernel, of which each line has the same head.
func TestRingRecordsOfSeveralLines(t *testing.T) {
	forged := ringLine(0, 10, "tmpfs: Unknown parameter 'x") + ringXID(10, 1, 79) + ringXID(10, 2, 79)
	b := &buffer{text: forged + ringXID(11, 3, 31) + ringXID(11, 4, 31) + ringLine(0, 11, "x") + ringXID(12, 5, 48) + forged}
	log := b.log()
	present, err := log.Read(t.Context(), 0)
	if err != nil || !slices.Equal(xidsOf(present.Lines), []uint64{31, 31, 48}) {
		t.Errorf("%+v, %v", present, err)
	}
	b.text += ringXID(13, 6, 120) // the lines before it have been read
	if added, err := log.Read(t.Context(), present.Next); err != nil || !slices.Equal(xidsOf(added.Lines), []uint64{120}) {
		t.Errorf("%+v, %v", added, err)
	}
}

func TestRingErrors(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		err  error
		want error
	}{
		"no times":       {text: "<4>NVRM: Xid (PCI:0000:03:00): 79, x\n", want: errNoTimes},
		"not permitted":  {err: unix.EPERM, want: unix.EPERM},
		"an empty one":   {},
		"some have none": {text: "<4>x\n" + ringXID(1, 1, 79)},
	} {
		r := &ring{readAll: func(p []byte) (int, error) { return copy(p, c.text), c.err }}
		if _, err := (Log{ring: r}).Read(t.Context(), 0); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The numbers of the device and of syslog(2) are never compared.
func TestNumbersOfTheOtherSource(t *testing.T) {
	ring, device := Log{ring: newRing()}, Log{}
	if !device.Counts(0) || !ring.Counts(0) || !device.Counts(firstOfRing-1) || device.Counts(firstOfRing) || ring.Counts(1) || !ring.Counts(firstOfRing) {
		t.Error("the ranges overlap")
	}
}

// The real buffer has the XIDs that the device has. Without the capability SYSLOG the error names it.
func TestRealRing(t *testing.T) {
	log := Log{ring: newRing()}
	got, err := log.Read(t.Context(), 0)
	if errors.Is(err, unix.EPERM) || errors.Is(err, errNoTimes) || errors.Is(err, unix.ENOSYS) {
		t.Skip(err)
	}
	again, err2 := (Log{ring: newRing()}).Read(t.Context(), got.Next)
	if err != nil || err2 != nil || got.Older || again.Older || again.Next < got.Next {
		t.Errorf("%v, %v; next %d then %d", err, err2, got.Next, again.Next)
	}
}
