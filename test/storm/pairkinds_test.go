package storm

import (
	"errors"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// lift is the end of a fault, and when it is due.
type lift struct {
	at   time.Time
	name string
	do   func() error
}

// pairKind is a kind of fault of a machine with two agents. Its strike makes it begin; it returns errSkipped where it makes no
// sense now, and has later called what ends it.
type pairKind struct {
	name   string
	weight int
	strike func(*pair) error
}

var errSkipped = errors.New("makes no sense now")

// pairKinds are all that can happen. It is filled at init because what a fault does draws on the table.
var pairKinds []pairKind

func init() {
	pairKinds = []pairKind{
		{"unplugged", 16, unplug},
		{"replaced", 5, replaceGPU},
		{"moved to another place", 8, replug},
		{"lost", 4, loseOne},
		{"call fails", 6, failOne},
		{"fatal XID", 5, fatalOne},
		{"unloaded", 2, unloadForAWhile},
		{"slow statistics", 4, slowStatistics},
		{"clock jumps", 4, jump},
		{"agent ends", 7, endAgent},
		{"agent is killed", 5, killAgent},
		{"full table", 4, fillTable},
		{"full table from the start", 4, startFull},
		{"history of another machine", 4, foreignHistory},
		{"directory of another machine", 1, foreignDirectory},
		{"rebind", 1, rebind},
		{"policy changes", 1, changeSplit},
	}
}

// later has a fault end after a time.
func (p *pair) later(d time.Duration, name string, do func() error) {
	p.lifts = append(p.lifts, lift{time.Now().Add(d), name, do})
	slices.SortStableFunc(p.lifts, func(a, b lift) int { return a.at.Compare(b.at) })
}

// between draws a time.
func (p *pair) between(least, most time.Duration) time.Duration {
	return least + time.Duration(p.random.Int64N(int64(most-least)))
}

// away is for how long a GPU is out of its slot: mostly for less time than agents remember it.
func (p *pair) away() time.Duration {
	if p.random.IntN(12) == 0 {
		return p.between(forget, forget+forget/4)
	}
	return p.between(20*time.Millisecond, 700*time.Millisecond)
}

// slot draws a GPU that no lasting fault concerns, and its UUID.
func (p *pair) slot() (int, gpu.DeviceID, bool) {
	var free []int
	for n := range gpus {
		if _, out := p.out[n]; !out && !p.touched[n] {
			free = append(free, n)
		}
	}
	if len(free) < 3 {
		return 0, "", false
	}
	n := one(p.random, free...)
	return n, gpu.DeviceID(p.UUID(n)), true
}
