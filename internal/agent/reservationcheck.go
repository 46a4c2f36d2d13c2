package agent

import (
	"cmp"
	"os"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/core"
)

// hostPIDNamespace is what procfs shows as the host's PID namespace (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h).
const hostPIDNamespace = "pid:[4026531836]"

// reservationCheckWarnings has a line if reservations are checked, but this process is in another PID namespace than the host's: it
// does not see the processes outside of it.
func reservationCheckWarnings(c core.Config) []string {
	if !c.ReservationCheck.Enabled() {
		return nil
	}
	namespace, err := os.Readlink(filepath.Join(cmp.Or(c.Roots.Proc, "/proc"), "self/ns/pid"))
	if err != nil || namespace == hostPIDNamespace {
		return nil
	}
	return []string{"reservation check: processes outside of the agent's PID namespace are not seen: set hostPID: true in its pod"}
}
