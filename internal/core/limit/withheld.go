package limit

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Support is what a node can do for the limits of new work.
type Support struct {
	Node          Node
	ControllerOff string                  // the group in which the backend's controller is off for new work: "/nomad.slice/share.slice"; "" = it is on
	Tried         map[gpu.DeviceID]string // GPUs on which a limit was set on an own group and read back: why that failed, "" = it did not
	Waiting       map[gpu.DeviceID]bool   // see Table.Waiting
	Elsewhere     bool                    // Node.CannotSet is ErrElsewhere
	Given         map[gpu.DeviceID]Given  // see Table.Given
	Unread        string                  // why limits can't be read at present; "" = they are
	Unlisted      string                  // why it can't be known which task of Nomad has which share, with the remedy; "" = it can
}

// Limits returns on which of the GPUs of an inventory that have shares with a limit, required or not, nothing can limit new work. A GPU that was not tried so far
// is missing: it takes none. The value is nil if no share has a limit.
//
// That this agent can't set limits counts for nothing where NVIDIA's hook sets them. Then nothing can be tried, and a limit that another program has replaced is
// reported and not corrected.
func (s Support) Limits(inv *inventory.Allocatable) *inventory.Limits {
	var out *inventory.Limits
	for u := range inv.Devices() {
		id := u.Device.ID
		if u.Memory == 0 || u.Sharing.Limit == inventory.LimitNone { // a GPU in MIG mode has none
			continue
		}
		if out == nil {
			out = &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}, Room: map[gpu.DeviceID]inventory.Room{}, Backend: string(s.Node.Backend)}
		}
		if why, decided := s.missing(&u); decided {
			out.Withheld[id] = why
		}
		if room, limited := s.room(&u, inv); limited {
			out.Room[id] = room
		}
	}
	return out
}

// room returns which shares of the GPU of one take no new work, because with them the limits of all work would be more than the GPU has. limited is false where that is
// not decided here: with overcommit they may be more, the memory of claims is counted by the scheduler, and shares with best effort may have no limit at all.
//
// All shares fit unless work began by a policy with other shares. Then as many of the free shares take work as fit beside it. A share that such work has takes new work
// after it, perhaps before the next reading, only if there is room for what the share has more than that work.
func (s Support) room(u *inventory.Unit, inv *inventory.Allocatable) (r inventory.Room, limited bool) {
	policy, id := inv.LimitPolicy(), u.Device.ID
	if u.Sharing.Limit != inventory.LimitRequired || u.API == inventory.DRA || policy.Overcommit {
		return r, false
	}
	r.Share, r.Replicas = u.Memory, u.Sharing.Replicas
	given, available := s.Given[id], policy.Available(u.Device.Memory)
	left := available - min(given.Bytes, available)
	for _, held := range []bool{false, true} {
		for one := range inv.Units() {
			bytes, has := given.Units[one.ID]
			switch more := one.Memory - min(bytes, one.Memory); {
			case one.Device.ID != id || one.Health.Reason == health.ReasonWithdrawn || has != held:
			case left < more:
				r.None = append(r.None, one.ID)
			default:
				left -= more
			}
		}
	}
	slices.Sort(r.None)
	if r.None != nil {
		r.Detail = fmt.Sprintf("the limits of running work are %d of %d MiB: some of it began by a policy with other shares", given.Bytes/gpu.MiB, available/gpu.MiB)
	}
	return r, true
}

func (s Support) missing(u *inventory.Unit) (why inventory.LimitMissing, decided bool) {
	cannotSet := s.Node.CannotSet
	byHook := u.API == inventory.DevicePlugin && cannotSet != ""
	if byHook {
		cannotSet = ""
	}
	none := func(detail string) (inventory.LimitMissing, bool) {
		return inventory.LimitMissing{Reason: health.ReasonNoLimit, Detail: detail}, true
	}
	failed, tried := s.Tried[u.Device.ID]
	switch {
	case cmp.Or(s.Node.Unsupported, cannotSet) != "":
		why, decided = none(cmp.Or(s.Node.Unsupported, cannotSet))
		why.Passing = s.Elsewhere && s.Node.Unsupported == ""
		return why, decided
	case s.Unread != "":
		return none(s.Unread)
	case s.Unlisted != "" && u.API == inventory.Nomad && u.Sharing.Limit == inventory.LimitRequired: // else NVIDIA's hook limits those tasks that it can
		return none(s.Unlisted)
	case s.ControllerOff != "":
		return inventory.LimitMissing{Reason: health.ReasonNoController, Detail: "the controller " + string(s.Node.Backend) + " is off in " + s.ControllerOff}, true
	case byHook:
		return inventory.LimitMissing{}, true
	case !tried:
		return inventory.LimitMissing{}, false
	case failed != "":
		return none(failed)
	case s.Waiting[u.Device.ID]:
		return inventory.LimitMissing{Reason: health.ReasonNoLimit, Detail: "the limits of running work are not set so far", Passing: true}, true
	}
	return inventory.LimitMissing{}, true
}

// unlisted shows tasks of Nomad with processes on a GPU whose shares have limits, and whose allocation is in no record: nothing can find out which shares they have.
func (d *decision) unlisted() {
	for _, p := range d.Processes {
		g, w := d.GPUs[p.GPU], p.Work
		shown := slices.ContainsFunc(d.out.Table.Shares, func(s Share) bool {
			return s.GPU == p.GPU && s.Work.ID == w.ID && (s.Work.Container == w.Container || w.Container == "")
		})
		if g.Share == 0 || w.Orchestrator != holders.Nomad || w.ID == "" || d.Listed[w.ID] || shown {
			continue
		}
		s := Share{Work: w, GPU: p.GPU, Pool: g.Pool, Way: ByTask, Required: g.Required, Want: g.Share, Group: p.Group, Begun: true, State: Unlimited}
		if s.Reason = "its allocation is not shown to this agent, so which shares it has is not known"; !d.HoldersKnown {
			s.State = Unknown
		}
		d.out.Table.Shares = append(d.out.Table.Shares, s)
	}
}
