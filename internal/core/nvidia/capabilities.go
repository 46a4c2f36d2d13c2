package nvidia

import (
	"io/fs"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// This file reads which device nodes MIG instances have, from procfs, on the reader. It makes no NVML call.

// migCapability is the permission to use a GPU instance (ci is gpu.Whole) or a compute instance of the GPU with a
// minor number.
type migCapability struct {
	minor  int
	gi, ci uint32
}

// migCapabilities maps each to N of /dev/nvidia-caps/nvidia-capN.
type migCapabilities map[migCapability]int

// of returns the numbers for an instance, 0 where the kernel module lists none.
func (m migCapabilities) of(minor int, at gpu.Placement) (gi, ci int) {
	return m[migCapability{minor, at.GI, gpu.Whole}], m[migCapability{minor, at.GI, at.CI}]
}

// capabilities is the kernel module's list. The list has every possible instance from when the module is loaded, so a
// session reads it once.
func (s *Session) capabilities() migCapabilities {
	if s.capabilityList == nil {
		if text, err := fs.ReadFile(s.proc, "driver/nvidia-caps/mig-minors"); err == nil {
			s.capabilityList = parseMIGMinors(string(text))
		}
	}
	return s.capabilityList
}

// parseMIGMinors parses /proc/driver/nvidia-caps/mig-minors:
//
//	config 1
//	gpu0/gi1/access 12
//	gpu0/gi1/ci0/access 13
//
// It ignores lines of any other form (config, monitor, later additions).
func parseMIGMinors(text string) migCapabilities {
	all := migCapabilities{}
	for line := range strings.Lines(text) {
		path, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseUint(number, 10, 20) // Linux has 20 bits of minor number
		capability, ok := parseCapability(path)
		if err == nil && ok {
			all[capability] = int(n)
		}
	}
	return all
}

func parseCapability(path string) (migCapability, bool) {
	parts := strings.Split(path, "/")
	if n := len(parts); n < 3 || n > 4 || parts[n-1] != "access" {
		return migCapability{}, false
	}
	ok := true
	number := func(part, prefix string) uint32 {
		digits, found := strings.CutPrefix(part, prefix)
		n, err := strconv.ParseUint(digits, 10, 16)
		ok = ok && found && err == nil
		return uint32(n)
	}
	c := migCapability{minor: int(number(parts[0], "gpu")), gi: number(parts[1], "gi"), ci: gpu.Whole}
	if len(parts) == 4 {
		c.ci = number(parts[2], "ci")
	}
	return c, ok
}
