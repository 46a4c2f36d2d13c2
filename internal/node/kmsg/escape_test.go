package kmsg

import (
	"slices"
	"strings"
	"testing"
)

// ringRecord is what syslog(2) has of one record: each line with the head of the record.
func ringRecord(micros int, text string) string {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(ringLine(0, micros, line))
	}
	return b.String()
}

const xid119 = "NVRM: Xid (PCI:0000:1b:00): 119, pid=7, name=NAME, Timeout after 6s of waiting for RPC response from GPU0 GSP!"

// A tenant chooses the name of a process, of at most 15 bytes. Whatever these are, the XID of a line counts, and as
// one.
func TestNameOfAProcessHidesNoXID(t *testing.T) {
	for _, name := range []string{
		"python3",
		"größer",
		"aaaaaaaaaaaaaa\xc3", // a rune cut at 15 bytes
		"\x1b[31mred\x1b[0m",
		"a\rb", "\r", "a\tb", "a\x00b", "a\x7fb", "\xff\xfe",
		"a\nb", "\n", "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n", "a, b\nc, d",
		`a\x0ab`, `\`, `a;b,c`, "a, 79", "</>&;",
		"NVRM: Xid (PCI:", "\nNVRM: Xid (PC", "\nNVRM: Xid (00", "\n<0>[0.0001] N",
	} {
		if len(name) > 15 {
			t.Fatalf("%q is too long", name)
		}
		text := strings.ReplaceAll(xid119, "NAME", name)
		other := ringXID(10, 2, 79) // of another GPU, at the same time
		for _, c := range []struct {
			log  string
			want []uint64
		}{
			{ringRecord(10, text), []uint64{119}},
			{ringRecord(10, text) + other, []uint64{119, 79}},
			{other + ringRecord(10, text), []uint64{79, 119}},
			{ringRecord(10, text) + ringXID(11, 2, 48), []uint64{119, 48}},
		} {
			b := &buffer{text: c.log}
			got, err := b.log().Read(t.Context(), 0)
			if err != nil || !slices.Equal(xidsOf(got.Lines), c.want) {
				t.Errorf("%q in %q: %+v, %v; want %v", name, c.log, got.Lines, err, c.want)
			}
		}
	}
}

// A record with text of a process is no XID, however that continues: the options of mount(2), and the version that a
// client of the driver claims to have, which the driver logs with its newlines (rm_perform_version_check).
func TestTextOfAProcessForgesNoXID(t *testing.T) {
	const forged = "NVRM: Xid (PCI:0000:1b:00): 79, x"
	mismatch := "NVRM: API mismatch: the client has the version \n" + forged + ", but\n" +
		"NVRM: this kernel module has the version 580.95.05.  Please\nNVRM: make sure that this kernel module and all NVIDIA driver\n" +
		"NVRM: components have the same version."
	option := "tmpfs: Unknown parameter 'x\n" + forged + "\n" + forged + "'"
	for _, c := range []struct {
		log  string
		want []uint64
	}{
		{ringRecord(10, option), nil},
		{ringRecord(10, mismatch), nil},
		{ringXID(10, 3, 31) + ringRecord(10, mismatch), []uint64{31}},
		{ringXID(10, 3, 31) + ringRecord(10, option), []uint64{31}},
		{ringRecord(10, strings.ReplaceAll(xid119, "NAME", "a\nb")) + ringRecord(10, option), []uint64{119}},
		{ringRecord(10, mismatch) + ringXID(11, 3, 31), []uint64{31}},
	} {
		b := &buffer{text: c.log}
		got, err := b.log().Read(t.Context(), 0)
		if err != nil || !slices.Equal(xidsOf(got.Lines), c.want) {
			t.Errorf("%q: %v, %v; want %v", c.log, xidsOf(got.Lines), err, c.want)
		}
	}
}

// The kernel's own example (mount(2) of a tmpfs, 6.18): /dev/kmsg has what syslog(2) has, with the bytes escaped.
func TestEscapeAsTheKernel(t *testing.T) {
	for raw, want := range map[string]string{
		"":              "",
		"plain text, ~": "plain text, ~",
		"tmpfs: Unknown parameter 'zz\tx\xc3\xa4\\y'": `tmpfs: Unknown parameter 'zz\x09x\xc3\xa4\x5cy'`,
		`a\x0ab`:           `a\x5cx0ab`,
		"\x00\x1f\x7f\xff": `\x00\x1f\x7f\xff`,
	} {
		if got := escape(raw, escapedByKernel); got != want {
			t.Errorf("%q: %q, want %q", raw, got, want)
		}
	}
}

// An XID counts whatever its length: a line that is longer than a record when it is escaped is cut.
func TestLongLine(t *testing.T) {
	for _, text := range []string{strings.Repeat("\xff", recordSize), strings.Repeat("x", recordSize)} {
		b := &buffer{text: ringLine(0, 10, "NVRM: Xid (PCI:0000:1b:00): 119, "+text) + ringXID(11, 2, 79)}
		got, err := b.log().Read(t.Context(), 0)
		if err != nil || !slices.Equal(xidsOf(got.Lines), []uint64{119, 79}) {
			t.Errorf("%d bytes: %v, %v", len(text), xidsOf(got.Lines), err)
		}
	}
}
