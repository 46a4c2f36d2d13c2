package checkpoint

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// ReadBoot reads the present boot of the node beneath procRoot; "" is /proc. An error concerns its ID. A boot time that can't be
// read is zero: a jump of the wall clock between two processes is then detected only by times in the future.
func ReadBoot(procRoot string) (core.Boot, error) { return readBoot(procRoot, time.Now()) }

// readBoot is ReadBoot at a given wall clock time.
func readBoot(procRoot string, now time.Time) (core.Boot, error) {
	proc := cmp.Or(procRoot, "/proc")
	boot := core.Boot{Time: bootTime(filepath.Join(proc, "uptime"), now)}
	path := filepath.Join(proc, "sys/kernel/random/boot_id") // random(4)
	text, err := os.ReadFile(path)
	if err != nil {
		return boot, err
	}
	if boot.ID = strings.TrimSpace(string(text)); boot.ID == "" {
		return boot, fmt.Errorf("%s is empty", path)
	}
	return boot, nil
}

// BootID reads the ID of the present boot beneath procRoot; "" is /proc.
func BootID(procRoot string) (string, error) {
	boot, err := ReadBoot(procRoot)
	return boot.ID, err
}

// bootTime is now minus the uptime of proc(5), whose first field is in seconds; zero if it can't be read.
func bootTime(path string, now time.Time) time.Time {
	text, err := os.ReadFile(path)
	if err != nil {
		return time.Time{}
	}
	seconds, _, _ := strings.Cut(string(text), " ")
	uptime, err := strconv.ParseFloat(strings.TrimSpace(seconds), 64)
	if err != nil || uptime < 0 || uptime > 1e10 {
		return time.Time{}
	}
	return now.Add(-time.Duration(uptime * float64(time.Second))).UTC().Truncate(time.Millisecond)
}
