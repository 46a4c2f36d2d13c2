package history

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/core"
)

// ReadBoot reads the present boot of the node beneath procRoot; "" is /proc. An error concerns its ID. A boot time that is not
// known is zero: a jump of the wall clock between two processes is then detected only by times in the future.
func ReadBoot(procRoot string) (core.Boot, error) { return readBoot(procRoot, time.Now()) }

// readBoot is ReadBoot at a given wall clock time.
func readBoot(procRoot string, now time.Time) (core.Boot, error) {
	proc := cmp.Or(procRoot, "/proc")
	boot := core.Boot{Time: bootTime(proc, now)}
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

// bootTime is now minus the time since the boot; zero if that is unknown.
func bootTime(proc string, now time.Time) time.Time {
	since, ok := Uptime(proc)
	if !ok {
		return time.Time{}
	}
	return now.Add(-since).UTC().Truncate(time.Millisecond)
}

// Uptime is the time since the boot by the kernel's clock, if proc is a procfs; "" is /proc. The file uptime of proc(5) has the same, except in a container of
// LXC: there it is the age of the container (lxcfs), while the boot ID is that of the host. Of another folder, that of a simulated machine, it is
// the first field of that file, in seconds.
func Uptime(proc string) (time.Duration, bool) {
	proc = cmp.Or(proc, "/proc")
	var fs unix.Statfs_t
	if err := unix.Statfs(proc, &fs); err == nil && fs.Type == unix.PROC_SUPER_MAGIC {
		var since unix.Timespec
		err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &since)
		return time.Duration(since.Nano()), err == nil
	}
	text, err := os.ReadFile(filepath.Join(proc, "uptime"))
	if err != nil {
		return 0, false
	}
	first, _, _ := strings.Cut(string(text), " ")
	seconds, err := strconv.ParseFloat(strings.TrimSpace(first), 64)
	return time.Duration(seconds * float64(time.Second)), err == nil && seconds >= 0 && seconds <= 1e10
}
