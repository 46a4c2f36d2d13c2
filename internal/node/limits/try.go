package limits

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
)

// Groups on which limits are tried: each program that may do so on a node has its own. No process is ever in them.
const (
	ServerTry = "/tandem-limit-test" // of k8s-gpu limit-server
	localTry  = ServerTry + "-nomad"
)

// tryBytes is a limit that no share has.
const tryBytes = 3 << 20

// Set is the call SetMemoryLimit of a driver.
type Set func(gpu.LimitChange) error

// Get is the call MemoryLimits of a driver.
type Get func([]gpu.LimitQuery) ([]gpu.LimitAnswer, error)

// Try makes an empty group at a path, sets a limit on it, reads that back, ends it, and removes the group. The error is why no limit can be set on the GPU. The group
// stays, and is taken by the next call, if the limit could not be ended: the driver keeps it for the next group with its address (backend misc).
func Try(groups cgroup.FS, at string, b limit.Backend, id gpu.DeviceID, set Set, get Get) error {
	if err := groups.Enable("/", b.Controller()); err != nil {
		return err
	}
	q := gpu.LimitQuery{GPU: id, Group: groups.Path(at)}
	if err := os.Mkdir(q.Group, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	want := gpu.MemoryLimit{Hard: tryBytes}
	if b == limit.Misc {
		want.Soft = tryBytes
	}
	if err := set(gpu.LimitChange{LimitQuery: q, Soft: want.Soft, Hard: want.Hard}); err != nil {
		return errors.Join(err, EndTry(groups, at, []gpu.DeviceID{id}, set, get))
	}
	err := isSet(q, want, get)
	if end := set(gpu.LimitChange{LimitQuery: q, Hard: gpu.NoMemoryLimit}); end != nil {
		return errors.Join(err, end)
	}
	return errors.Join(err, groups.Remove(at))
}

// isSet returns why a limit that was set is not read back.
func isSet(q gpu.LimitQuery, want gpu.MemoryLimit, get Get) error {
	answers, err := get([]gpu.LimitQuery{q})
	if err != nil {
		return err
	}
	switch a := answers[0]; {
	case a.State == gpu.LimitFailed:
		return errors.New(a.Err)
	case a.State != gpu.LimitRead:
		return errors.New("the driver returns no limit for a group after one was set")
	case a.Limit.Hard != want.Hard || a.Limit.Soft != want.Soft:
		return fmt.Errorf("the driver returns a limit of %d bytes, soft %d, after %d, soft %d, was set", a.Limit.Hard, a.Limit.Soft, want.Hard, want.Soft)
	}
	return nil
}

// EndTry ends the limits that a Try has left on GPUs, as that of a process that was killed, and removes its group.
func EndTry(groups cgroup.FS, at string, ids []gpu.DeviceID, set Set, get Get) error {
	if err := endLimits(groups, at, ids, set, get); err != nil {
		return err
	}
	return groups.Remove(at)
}

func endLimits(groups cgroup.FS, at string, ids []gpu.DeviceID, set Set, get Get) error {
	var queries []gpu.LimitQuery
	for _, id := range ids {
		queries = append(queries, gpu.LimitQuery{GPU: id, Group: groups.Path(at)})
	}
	answers, err := get(queries)
	if err != nil {
		return err
	}
	for _, a := range answers {
		if a.State == gpu.LimitRead && a.Limit.Hard == tryBytes {
			if err := set(gpu.LimitChange{LimitQuery: a.LimitQuery, Hard: gpu.NoMemoryLimit}); err != nil {
				return err
			}
		}
	}
	return nil
}

// LeftTry reports whether there is a group for EndTry.
func LeftTry(groups cgroup.FS, at string) bool {
	_, err := os.Lstat(groups.Path(at))
	return err == nil
}
