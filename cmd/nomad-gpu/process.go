package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
)

var errOrphaned = errors.New("the Nomad agent is gone")

// parentEvery is how often the parent is looked for.
const parentEvery = time.Second

// watchParent calls end when this process has another parent than it had at the start: an agent that is
// killed does not stop its plugins, and a -dev agent never finds them again. It returns when ctx ends.
//
// Not PR_SET_PDEATHSIG: it fires when the *thread* that started us exits, and which thread of the agent
// that was is up to its Go runtime. The parent is compared with the first one and not with 1, because
// in a container the agent may well be process 1.
func watchParent(ctx context.Context, parent int, end context.CancelCauseFunc) {
	t := time.NewTicker(parentEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		if os.Getppid() != parent {
			end(errOrphaned)
			return
		}
	}
}

// lifeOf tells the life of a process from those of others that had its number, by when it began (proc(5), field 22 of
// stat) and the boot; "" if that can't be known.
func lifeOf(pid int) string {
	boot, err := checkpoint.BootID("/proc")
	stat, errStat := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, ok := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
	if fields := strings.Fields(rest); err == nil && errStat == nil && ok && len(fields) >= 20 {
		return fmt.Sprintf("agent %d, begun at %s, boot %s", pid, fields[19], boot)
	}
	return ""
}
