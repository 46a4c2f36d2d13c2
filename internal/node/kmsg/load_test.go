package kmsg_test

import (
	"fmt"
	"strings"
	"testing"
)

// The load of the driver has initialised the GPUs: XIDs from before it are left out where all of the log is read. An agent that
// continues at a record has watched the GPUs, and gets all lines.
func TestReadSinceTheLoadOfTheDriver(t *testing.T) {
	loaded := func(seq uint64, priority int, message string) string {
		return fmt.Sprintf("%d,%d,%d000000,-;%s\n", priority, seq, seq, message)
	}
	closed, open := "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.163.01", "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06"
	for _, c := range []struct {
		name     string
		log      string
		first    uint64
		want     string
		complete bool
	}{
		{"before and after", at(1, 10, 1, 79) + loaded(2, 3, closed) + at(3, 20, 1, 119), 0, "[119@3]", true},
		{"the open module", at(1, 10, 1, 79) + loaded(2, 4, open), 0, "[]", true},
		{"twice", loaded(1, 3, closed) + at(2, 10, 1, 79) + loaded(3, 3, open) + at(4, 20, 1, 48), 0, "[48@4]", true},
		{"a log that begins after it", at(1, 10, 1, 79), 0, "[79@1]", false},
		{"the same XID just before and after", at(1, 10, 1, 79) + loaded(2, 3, closed) + at(3, 11, 1, 79), 0, "[79@3]", true},
		{"an agent that continues", at(1, 10, 1, 79) + at(2, 20, 1, 48) + loaded(3, 3, closed) + at(4, 21, 1, 48), 2, "[48@2 48@4]", false},
		{"a log of another boot", at(1, 10, 1, 79) + loaded(2, 3, closed) + at(3, 20, 1, 119), 50, "[119@3]", true},
		{"forged by a process", at(1, 10, 1, 79) + loaded(2, 12, closed), 0, "[79@1]", false},
		{"within a text", at(1, 10, 1, 79) + loaded(2, 4, "audit: "+closed), 0, "[79@1]", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path, _ := file(t, c.log)
			got, err := readFile(t.Context(), path, c.first)
			must(t, err)
			lines := []string{}
			for _, l := range got.Lines {
				lines = append(lines, fmt.Sprintf("%d@%d", l.XID, l.Seq))
			}
			if fmt.Sprint(lines) != c.want || got.Complete != c.complete {
				t.Errorf("%v, complete %t; want %s, %t", lines, got.Complete, c.want, c.complete)
			}
		})
	}
	var many strings.Builder
	many.WriteString(loaded(1, 3, closed))
	for i := range 5000 {
		many.WriteString(at(uint64(i+2), 10*i, 1, i))
	}
	path, _ := file(t, many.String())
	if got, err := readFile(t.Context(), path, 0); err != nil || got.Complete {
		t.Errorf("more faults than are read: complete %t, %v", got.Complete, err)
	}
}
