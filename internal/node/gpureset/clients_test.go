package gpureset

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// A process that names itself or its control group after an escape sequence changes nothing on the terminal of the
// person who resets its GPU.
func TestNameOfAClientIsPrintable(t *testing.T) {
	for _, c := range []struct {
		client Client
		want   string
	}{
		{Client{PID: 7, Name: "python3", Group: "/kubepods/pod7"}, "python3 (pid 7, control group /kubepods/pod7)"},
		{Client{PID: 7}, "process (pid 7)"},
		{Client{PID: 7, Name: "\x1b]0;owned\a\x1b[2J"}, "?]0;owned??[2J (pid 7)"},
		{Client{PID: 7, Name: "a\nb\tc\xff", Group: "/x/\u009b31m"}, "a b c? (pid 7, control group /x/?31m)"},
	} {
		if got := c.client.String(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
		err := &InUseError{GPU: gpu.DeviceID("GPU-1"), Clients: []Client{c.client}}
		if text := err.Error(); !strings.Contains(text, c.want) {
			t.Errorf("%q, want %q in it", text, c.want)
		}
	}
	long := Client{PID: 7, Name: "a", Group: strings.Repeat("/long", 1000)}
	if got := long.String(); len(got) > maxClientText {
		t.Errorf("%d bytes", len(got))
	}
}
