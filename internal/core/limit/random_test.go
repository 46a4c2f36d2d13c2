package limit_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/limit"
)

const (
	zero, one = gpu.DeviceID("GPU-0"), gpu.DeviceID("GPU-1")
	gib       = uint64(1) << 30
	reserve   = gib
)

// storm is random work on a node with two GPUs of 80 GiB, of which one is shared by a policy with limits.
type storm struct {
	*world
	random  *rand.Rand
	t       *testing.T
	states  map[limit.State]int
	suspect map[string]int // groups without a limit by the policy that had one at the reading before
}

// fence 25, 30: 10,000 random starts, restarts and kills, of both backends and orchestrators. The limits of live work and the reserve never exceed the total, no
// limit is left on a group that no policy limits for more than one reading, nothing is called limited that is not, and readings are deterministic.
func TestRandomWork(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		for name, ways := range map[string][]limit.Way{"nomad": {limit.ByTask}, "kubernetes": {limit.ByPod, limit.ByHook}} {
			t.Run(string(b)+" "+name, func(t *testing.T) {
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				s := &storm{newWorld(b, zero, one), rand.New(rand.NewPCG(seed, 0)), t, map[limit.State]int{}, map[string]int{}}
				for step := range 2500 {
					what := s.step(ways)
					s.now = s.now.Add(time.Duration(s.random.IntN(3000)) * time.Millisecond)
					if s.random.IntN(3) > 0 {
						s.read()
					}
					if t.Failed() {
						t.Fatalf("seed %d, step %d: %s", seed, step, what)
					}
				}
				if s.states[limit.Limited] < 500 || b == limit.Misc && s.states[limit.Late] < 20 {
					t.Errorf("%+v", s.states)
				}
			})
		}
	}
}

// step lets something happen.
func (s *storm) step(ways []limit.Way) string {
	switch n := s.random.IntN(100); {
	case n < 35 && len(s.work) < 12:
		return s.begin(ways[s.random.IntN(len(ways))])
	case n < 50 && len(s.work) > 0:
		k := s.work[s.random.IntN(len(s.work))]
		if k.Way == limit.ByPod {
			s.passes.saved = s.passes.saved.WithoutPod(k.Work)
			if s.random.IntN(2) == 0 { // Unprepare comes before the end of the group
				for _, p := range s.sorted() {
					if p.owner == k.owner() {
						s.kill(p)
					}
				}
				s.passes.pass()
			}
		}
		s.end(k)
		return "end of " + k.Work.String()
	case n < 58 && len(s.work) > 0:
		return s.restartInPlace(s.work[s.random.IntN(len(s.work))])
	case n < 60:
		if err := s.passes.restart(); err != nil {
			s.t.Error(err)
		}
		return "restart of the agent"
	case n < 61 && s.random.IntN(4) == 0:
		s.passes.saved.Records = slices.DeleteFunc(slices.Clone(s.passes.saved.Records), func(r limit.Record) bool { return r.Way == limit.ByHook })
		return "the records of containers are lost"
	case n < 61:
		s.off = map[string]bool{} // a container was started, whose runtime enables all
		return "controllers on"
	case n < 63:
		s.reset([]gpu.DeviceID{zero, one}[s.random.IntN(2)])
		return "reset"
	case n < 90 && len(s.work) > 0:
		k := s.work[s.random.IntN(len(s.work))]
		g := k.groups[s.random.IntN(len(k.groups))]
		p := s.fork(g, k.owner())
		if len(s.pidsBelow(g.path)) > 1 && s.random.IntN(2) == 0 {
			p = s.procs[s.pidsBelow(g.path)[0]]
		}
		if !s.charge(p, k.GPU, uint64(1+s.random.IntN(12))*gib) && p.used[k.GPU] == 0 {
			s.kill(p)
		}
		return fmt.Sprintf("pid %d of %s in %s", p.pid, k.Work, g.path)
	case len(s.procs) > 0:
		all := s.sorted()
		s.kill(all[s.random.IntN(len(all))])
		return "a process ends"
	}
	return "nothing"
}

// begin starts work with a limit if shares are left, else without, on the other GPU or on the same.
func (s *storm) begin(way limit.Way) string {
	bytes := uint64(0)
	if s.live()+20*gib+reserve <= s.gpus[zero] && s.random.IntN(3) > 0 {
		bytes = []uint64{10 * gib, 20 * gib}[s.random.IntN(2)]
		if way != limit.ByPod {
			bytes = 20 * gib
		}
	}
	id := zero
	if bytes == 0 {
		id = one
	}
	k := s.start(way, id, bytes, 1+s.random.IntN(2))
	if way == limit.ByTask && s.random.IntN(8) == 0 {
		s.off[k.groups[0].path] = true // the controller is not enabled so far
	}
	switch {
	case bytes == 0:
	case way == limit.ByPod: // before any container: see limits.LimitPod
		s.passes.saved = s.passes.saved.WithPod(limit.Pod{Work: k.Work, GPU: id, Bytes: bytes})
		s.passes.pass()
		if a := s.get(k.root, id); a.State != gpu.LimitRead || a.Limit.Hard != bytes {
			s.t.Errorf("%s was prepared, and has %+v", k.Work, a)
		}
	case way == limit.ByHook:
		k.groups = k.groups[:1] // the other container uses no GPU
		switch s.random.IntN(6) {
		case 0:
			s.hook(k.groups[0], id, 60*gib) // by an image
		case 1, 2:
			s.charge(s.fork(k.groups[0], k.owner()), zero, gib)
		default:
			s.hook(k.groups[0], id, bytes)
		}
	case s.random.IntN(4) > 0: // the agent sees the folder before the first process
		s.passes.pass()
	default:
		s.charge(s.fork(k.groups[0], k.owner()), zero, gib)
	}
	return fmt.Sprintf("start of %s by %s with %d GiB", k.Work, way, bytes>>30)
}

// live is the sum of the limits of live work.
func (s *storm) live() (sum uint64) {
	for _, k := range s.work {
		sum += k.Bytes
	}
	return sum
}

// restartInPlace restarts the processes of work: in the same group, as raw_exec does, or in a new one of the same path, as exec does.
func (s *storm) restartInPlace(k *work) string {
	for _, p := range s.sorted() {
		if p.owner == k.owner() {
			s.kill(p)
		}
	}
	if k.Way == limit.ByTask && s.random.IntN(2) == 0 {
		s.rmdir(k.groups[0].path)
		k.groups[0] = s.mkdir(k.groups[0].path)
		if s.random.IntN(2) == 0 {
			s.passes.pass()
		}
	}
	s.fork(k.groups[0], k.owner())
	return "restart of " + k.Work.String()
}

// read makes a pass and checks what it shows.
func (s *storm) read() {
	if s.random.IntN(10) == 0 {
		s.check()
	}
	s.passes.pass()
	sum := uint64(0)
	for _, k := range s.work {
		share, ok := s.passes.table.Share(k.Work, k.GPU)
		s.states[share.State]++
		switch {
		case k.Bytes == 0 && ok && share.State != limit.Foreign:
			s.t.Errorf("%s has no limit: %+v", k.Work, share)
		case k.Bytes > 0 && !ok:
			s.t.Errorf("%s is not in the table", k.Work)
		case share.State == limit.Limited:
			sum += share.Driver.Hard
			if why := s.truth(k); why != "" {
				s.t.Errorf("%s is called limited: %s: %+v", k.Work, why, share)
			}
		}
	}
	if sum+reserve > s.gpus[zero] {
		s.t.Errorf("the limits are %d GiB", sum>>30)
	}
	s.leftovers()
}

// check checks that a decision is the same for the same readings, and that what is known can be written and read.
func (s *storm) check() {
	r := s.passes.read(nil)
	if a, b := limit.Next(s.passes.saved, s.passes.table, r), limit.Next(s.passes.saved, s.passes.table, r); !reflect.DeepEqual(a, b) {
		s.t.Errorf("two decisions of the same readings differ:\n%+v\n%+v", a, b)
	}
	if text, err := s.passes.saved.Encode(); err != nil {
		s.t.Error(err)
	} else if _, err = limit.Parse(text); err != nil {
		s.t.Errorf("%v\n%s", err, text)
	}
}

// leftovers checks that a group for which the policy has no limit has had none since the reading before.
func (s *storm) leftovers() {
	had := s.suspect
	s.suspect = map[string]int{}
	for p, g := range s.groups {
		for id := range s.gpus {
			e := s.entries[id][g.address]
			limited := slices.ContainsFunc(s.work, func(k *work) bool {
				return k.Bytes > 0 && k.GPU == id && k.has(p)
			})
			if e == nil || e.hard == maximum || limited || e.hard == 60*gib {
				continue
			}
			key := fmt.Sprint(p, g.inode, id)
			if s.suspect[key] = had[key] + 1; s.suspect[key] > 1 {
				s.t.Errorf("%s has a limit of %d GiB on %s since %d readings", p, e.hard>>30, id, s.suspect[key])
			}
		}
	}
}
