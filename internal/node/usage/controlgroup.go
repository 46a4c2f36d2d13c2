package usage

import (
	"regexp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
)

// group is what the control groups of a process show.
type group struct {
	owner     holders.Work // see cgroup.Member
	container bool
	user      bool
}

var uuid = regexp.MustCompile(`^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func isUUID(s string) bool { return uuid.MatchString(s) }

// parseGroup reads /proc/PID/cgroup (cgroups(7)): one line in version 2, one for each hierarchy in version 1, of which some have no
// path of the work. The first line with work counts.
// A process that this one's cgroup namespace does not cover has a path that begins with "/..".
func parseGroup(text string) group {
	var g group
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		one := cgroup.MemberOf(fields[2])
		if one.Work != (holders.Work{}) {
			return group{owner: one.Work}
		}
		g.container, g.user = g.container || one.Container, g.user || one.User
	}
	return g
}

// unifiedPath is the path of version 2 in /proc/PID/cgroup; "" = there is none.
func unifiedPath(text string) string {
	for line := range strings.Lines(text) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			return path
		}
	}
	return ""
}
