package kmsg

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A line of the same XID that says something else is no repetition: the severity of a fault of NVLink 5, its link, and
// the recovery action. What else differs between lines is not compared.
func TestLineThatSaysSomethingElseIsNoRepetition(t *testing.T) {
	const (
		nonfatal = "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001)"
		later    = "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000002)"
		other    = "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 05 (0x00086226 0x00000001)"
		fatal    = "149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x004505c6 0x00000000)"
		reset    = "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
		none     = "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
		page     = "31, pid=7, name=a, MMU Fault: ENGINE GRAPHICS faulted @ 0x7f00_%d"
	)
	for _, c := range []struct{ texts, want []string }{
		{[]string{nonfatal, fatal}, []string{nonfatal, fatal}},
		{[]string{nonfatal, other, later, nonfatal}, []string{nonfatal, other}},
		{[]string{reset, none}, []string{reset, none}},
		{[]string{reset, reset}, []string{reset}},
		{[]string{fmt.Sprintf(page, 1), fmt.Sprintf(page, 2)}, []string{fmt.Sprintf(page, 1)}},
	} {
		var log strings.Builder
		for i, text := range c.texts {
			fmt.Fprintf(&log, "3,%d,%d,-;NVRM: Xid (PCI:0000:01:00): %s\n", i+1, 1_000_000+i, text)
		}
		contents, err := present(t.Context(), strings.NewReader(log.String()), 0, nil)
		if got := textsOf(contents.Lines); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("read %q, %v; want %q", got, err, c.want)
		}
		synctest.Test(t, func(t *testing.T) {
			lines, done := make(chan arrival), make(chan bool)
			var followed []Line
			go func() {
				hold(context.Background(), lines, func(a arrival) { followed = append(followed, a.line) })
				close(done)
			}()
			for record := range strings.Lines(log.String()) {
				head, message, _ := parseRecord(record)
				line, _ := parseLine(head, message)
				lines <- arrivesAt(line, head.at, time.Time{})
			}
			close(lines)
			<-done
			if got := textsOf(followed); !slices.Equal(got, c.want) {
				t.Errorf("followed %q, want %q", got, c.want)
			}
			n := 0
			for _, l := range followed {
				n += 1 + l.Repeats
			}
			if n != len(c.texts) {
				t.Errorf("%d lines of %d", n, len(c.texts))
			}
		})
	}
}

func textsOf(lines []Line) (texts []string) {
	for _, l := range lines {
		texts = append(texts, fmt.Sprintf("%d, %s", l.XID, l.Text))
	}
	return texts
}

// More lines of a program that fails than are read do not hide the fault of a GPU before them.
func TestManyLinesHideNoFault(t *testing.T) {
	var log strings.Builder
	record := func(seq, slot, xid int) {
		fmt.Fprintf(&log, "3,%d,%d,-;NVRM: Xid (PCI:0000:%02x:00): %d, x\n", seq, seq*10_000_000, slot, xid)
	}
	record(1, 1, 119)
	for i := range 3 * maxRead {
		record(i+2, 2, 31)
	}
	contents, err := present(t.Context(), strings.NewReader(log.String()), 0, nil)
	if err != nil || len(contents.Lines) > maxRead || contents.Lines[0].XID != 119 {
		t.Errorf("%d lines, the first is %+v, %v", len(contents.Lines), contents.Lines[0], err)
	}
}
