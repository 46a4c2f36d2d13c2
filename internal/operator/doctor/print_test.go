package doctor_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/doctor"
)

// What other processes chose, such as their command lines, changes nothing on the terminal.
func TestFindingsArePrintable(t *testing.T) {
	var out bytes.Buffer
	all := []doctor.Finding{{"nomad", doctor.Problem, "/x\x1b[2J", "open /x\x1b]0;owned\a: no such file", "see \x9b31m"}}
	if err := doctor.Write(&out, all, true); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); strings.ContainsAny(text, "\x1b\a\u009b") || !strings.Contains(text, "open /x?]0;owned?") {
		t.Errorf("%q", text)
	}
}
