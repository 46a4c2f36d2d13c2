package nvidia

import (
	"io/fs"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// capability is the right to use a GPU instance (ci is core.Whole) or a compute instance of the GPU with
// a minor number.
type capability struct {
	minor  int
	gi, ci uint32
}

// capabilities maps each to N of /dev/nvidia-caps/nvidia-capN.
type capabilities map[capability]int

// of returns the numbers for an instance, 0 where the kernel module lists none.
func (c capabilities) of(minor int, at core.Placement) (gi, ci int) {
	return c[capability{minor, at.GI, core.Whole}], c[capability{minor, at.GI, at.CI}]
}

// capabilities is the kernel module's list. It holds every possible instance from when the module is
// loaded, so a session reads it once.
func (s *Session) capabilities() capabilities {
	if s.caps == nil {
		if text, err := fs.ReadFile(s.proc, "driver/nvidia-caps/mig-minors"); err == nil {
			s.caps = parseMIGMinors(string(text))
		}
	}
	return s.caps
}

// parseMIGMinors reads /proc/driver/nvidia-caps/mig-minors:
//
//	config 1
//	gpu0/gi1/access 12
//	gpu0/gi1/ci0/access 13
//
// Lines of any other form (config, monitor, what is yet to come) are passed over.
func parseMIGMinors(text string) capabilities {
	c := capabilities{}
	for line := range strings.Lines(text) {
		path, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseUint(number, 10, 20) // Linux has 20 bits of minor number
		of, ok := parseCapability(path)
		if err == nil && ok {
			c[of] = int(n)
		}
	}
	return c
}

func parseCapability(path string) (capability, bool) {
	parts := strings.Split(path, "/")
	if n := len(parts); n < 3 || n > 4 || parts[n-1] != "access" {
		return capability{}, false
	}
	ok := true
	number := func(part, prefix string) uint32 {
		digits, found := strings.CutPrefix(part, prefix)
		n, err := strconv.ParseUint(digits, 10, 16)
		ok = ok && found && err == nil
		return uint32(n)
	}
	c := capability{minor: int(number(parts[0], "gpu")), gi: number(parts[1], "gi"), ci: core.Whole}
	if len(parts) == 4 {
		c.ci = number(parts[2], "ci")
	}
	return c, ok
}
