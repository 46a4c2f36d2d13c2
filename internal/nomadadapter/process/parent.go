package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
)

// ErrOrphaned is why a plugin ends whose Nomad agent has ended.
var ErrOrphaned = errors.New("the Nomad agent has ended")

// parentInterval is how often the parent process is checked.
const parentInterval = time.Second

// WatchParent calls end with ErrOrphaned when this process has another parent than at its start: a Nomad agent that is killed does not stop its
// plugins, and a -dev agent does not reattach to them. It returns when ctx ends.
//
// PR_SET_PDEATHSIG is no alternative: it fires when the thread that started this process exits, and the agent's Go runtime
// chooses that thread. The parent is compared with the first one, not with 1, because in a container the agent may be process 1.
func WatchParent(ctx context.Context, parent int, end context.CancelCauseFunc) {
	t := time.NewTicker(parentInterval)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		if os.Getppid() != parent {
			end(ErrOrphaned)
			return
		}
	}
}

// Incarnation distinguishes a process from others with the same number, by its start time (proc(5), field 22 of stat) and the
// boot; "" if they can't be read.
func Incarnation(pid int) string {
	boot, err := checkpoint.BootID("/proc")
	stat, errStat := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, ok := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
	if fields := strings.Fields(rest); err == nil && errStat == nil && ok && len(fields) >= 20 {
		return fmt.Sprintf("agent %d, begun at %s, boot %s", pid, fields[19], boot)
	}
	return ""
}
