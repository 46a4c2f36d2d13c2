package kmsg_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/kmsg"
)

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
			got, err := kmsg.Read(t.Context(), path, c.first)
			if err != nil {
				t.Fatal(err)
			}
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
	first, err := kmsg.Read(t.Context(), "/dev/kmsg", 0)
	if errors.Is(err, kmsg.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil || first.Next == 0 || first.Older {
		t.Fatalf("%+v, %v", first, err)
	}
	again, err := kmsg.Read(t.Context(), "/dev/kmsg", first.Next)
	if err != nil || again.Next < first.Next || again.Older {
		t.Errorf("read again: %+v after %d, %v", again, first.Next, err)
	}
}

// Follow and Read fail in the same way.
func TestErrors(t *testing.T) {
	missing, folder := filepath.Join(t.TempDir(), "kmsg"), t.TempDir()
	for name, read := range map[string]func(path string) error{
		"Follow": func(path string) error {
			return kmsg.Follow(t.Context(), path, 0, func(l kmsg.Line) { t.Errorf("emitted %v", l) })
		},
		"Read": func(path string) error { _, err := kmsg.Read(t.Context(), path, 0); return err },
	} {
		err := read(missing)
		want := "kernel log is not readable: open " + missing + ": no such file or directory: give the agent the host's device /dev/kmsg (a container must be allowed to open it, or be privileged) and, where sysctl kernel.dmesg_restrict is 1, the capability CAP_SYSLOG"
		if !errors.Is(err, kmsg.ErrUnavailable) || !errors.Is(err, fs.ErrNotExist) || err.Error() != want {
			t.Errorf("%s: %q, want %q", name, err, want)
		}
		if err := read(folder); !errors.Is(err, syscall.EISDIR) || errors.Is(err, kmsg.ErrUnavailable) {
			t.Errorf("%s: %v, want EISDIR of the read", name, err)
		}
	}
}

// The number of lines is bounded: the latest are returned.
func TestReadIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kmsg")
	var text []byte
	for i := range 5000 {
		text = append(text, at(uint64(i), 10*i, 1, 31)...)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := kmsg.Read(t.Context(), path, 0)
	if err != nil || len(got.Lines) > 4096 || got.Next != 5000 || slices.IndexFunc(got.Lines, func(l kmsg.Line) bool { return l.Seq == 4999 }) < 0 {
		t.Errorf("%d lines, next %d, %v", len(got.Lines), got.Next, err)
	}
}
