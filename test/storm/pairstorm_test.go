package storm

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Both agents, each in a process of its own, under rules by index and count: no device is ever in two pools, or offered by
// both agents, until an operator has everything bound anew.
func TestStormOfTwoAgents(t *testing.T) {
	o := asked(t)
	t.Logf("TANDEM_STORM_SEED=%d", o.seed)
	p := newPair(t, o)
	defer p.verdict()
	if os.Getenv("TANDEM_STORM_FAULTS") == "" {
		p.o.faults /= 2 // each takes longer than those of the other storms
	}
	p.calm()
	began := time.Now()
	for struck := 0; p.ctx.Err() == nil && (struck < p.o.faults || time.Since(began) < o.lasts); {
		for n := 0; n < min(betweenCalms, p.o.faults) && p.ctx.Err() == nil; n++ {
			p.blow(struck)
			struck++
		}
		p.calm()
		if testing.Verbose() && struck%1000 == 0 {
			t.Logf("%v: %d faults, %d inventories, %d changes of index", time.Since(began).Round(time.Second), struck, p.deals.seen, p.deals.moved)
		}
	}
	if p.ctx.Err() != nil {
		return
	}
	words := []string{}
	for _, name := range slices.Sorted(maps.Keys(p.done)) {
		words = append(words, fmt.Sprintf("%s %d", name, p.done[name]))
	}
	t.Logf("seed %d, %v, %s\n%d inventories, the driver's index of a GPU changed %d times between two of them", o.seed,
		time.Since(began).Round(time.Second), strings.Join(words, ", "), p.deals.seen, p.deals.moved)
	if p.deals.moved < p.o.faults/10 {
		t.Errorf("the driver's index of a GPU changed %d times between two inventories: too rarely for %d faults to mean anything", p.deals.moved, p.o.faults)
	}
}

const betweenCalms = 200 // faults

// blow makes one fault begin, after a moment in which others may end.
func (p *pair) blow(number int) {
	for rest := time.Now().Add(p.between(0, 90*time.Millisecond)); time.Now().Before(rest); {
		p.liftDue(time.Now())
		time.Sleep(2 * time.Millisecond)
	}
	if err := p.deals.contested(p.o.slack); err != nil {
		p.wrong("%w", err)
	}
	for p.ctx.Err() == nil {
		kind := p.pick()
		began := time.Now()
		err := kind.strike(p)
		if errors.Is(err, errSkipped) {
			p.liftDue(time.Now())
			time.Sleep(time.Millisecond)
			continue
		}
		p.journal.note("#%d %s, made in %v", number, kind.name, time.Since(began).Round(time.Millisecond))
		if err != nil {
			p.wrong("fault #%d %s: %w", number, kind.name, err)
		}
		p.done[kind.name]++
		return
	}
}

// pick draws a kind by weight.
func (p *pair) pick() pairKind {
	total := 0
	for _, k := range pairKinds {
		total += k.weight
	}
	n := p.random.IntN(total)
	for _, k := range pairKinds {
		if n -= k.weight; n < 0 {
			if slices.Contains(p.o.without, k.name) {
				return p.pick()
			}
			return k
		}
	}
	return pairKinds[0]
}

// liftDue ends what is due by a time.
func (p *pair) liftDue(by time.Time) {
	for len(p.lifts) > 0 && !p.lifts[0].at.After(by) && p.ctx.Err() == nil {
		l := p.lifts[0]
		p.lifts = p.lifts[1:]
		p.journal.note("%s", l.name)
		if err := l.do(); err != nil {
			p.wrong("%s: %w", l.name, err)
		}
	}
}

// calm ends all faults, has an operator replace what is broken and bind anew, and checks that everything is as it should be.
func (p *pair) calm() {
	p.liftDue(time.Now().Add(time.Hour))
	p.journal.note("calm")
	right := func() bool { return p.follow() && len(p.amiss()) == 0 }
	for try := 0; p.ctx.Err() == nil; try++ { // an XID of before may be heard now
		if err := p.operate(); err != nil {
			p.wrong("%w", err)
		}
		if p.until(recovery, right) {
			break
		}
		if try == 2 {
			p.wrong("after a calm:\n%s", strings.Join(p.amiss(), "\n"))
		}
	}
	if p.ctx.Err() == nil {
		p.deals.clean(p.agents[forNomad].life.offer().Generation)
		p.files()
		p.misuse()
	}
}

// operate replaces the GPUs that do not get well by themselves, and has one of the agents bind anew.
func (p *pair) operate() error {
	for n := range gpus {
		gpu := gpu.DeviceID(p.UUID(n))
		if p.ctx.Err() != nil || !p.broken(gpu) {
			continue
		}
		if err := errors.Join(p.takeOut(n, gpu), p.putAnother(n)); err != nil {
			return err
		}
	}
	if !p.until(recovery, p.forgotten) && p.ctx.Err() == nil {
		return errors.New("after a calm GPUs are listed that are gone")
	}
	if !p.until(recovery, p.follow) && p.ctx.Err() == nil {
		return errors.New("after a calm agents go by different numberings")
	}
	a := p.agents[one(p.random, forNomad, forKubernetes)]
	generation := a.life.offer().Generation
	defer p.until(recovery, func() bool { return p.follow() && a.life.offer().Generation > generation })
	return errors.Join(a.command("rebind", ""), a.command("keep", ""))
}

// broken reports whether an agent does not get a GPU well in the time that this takes.
func (p *pair) broken(gpu gpu.DeviceID) bool {
	well := func() bool {
		for _, a := range p.agents {
			o := a.life.offer()
			if o == nil || !o.Ready || slices.ContainsFunc(o.Units, func(u offeredUnit) bool { return u.GPU == gpu && !u.Well }) {
				return false
			}
		}
		return true
	}
	return !p.until(5*time.Second, well)
}

// forgotten reports whether agents have dropped all that is gone.
func (p *pair) forgotten() bool {
	there := map[gpu.DeviceID]bool{}
	for n := range gpus {
		there[gpu.DeviceID(p.UUID(n))] = true
	}
	for _, a := range p.agents {
		o := a.life.offer()
		if o == nil || !o.Ready || len(o.Numbers) > gpus {
			return false
		}
		for id := range o.Numbers {
			if !there[id] {
				return false
			}
		}
	}
	return true
}

// amiss says what is not as it should be in a calm: each GPU is offered by the agent that its index belongs to.
func (p *pair) amiss() (lines []string) {
	slots, err := p.Slots()
	if err != nil || len(slots) != gpus {
		return []string{fmt.Sprintf("there are %d GPUs: %v", len(slots), err)}
	}
	for _, a := range p.agents {
		offers := map[gpu.DeviceID]offeredUnit{}
		o := a.life.offer()
		if o == nil || !o.Ready {
			return append(lines, a.name+" has not read the driver")
		}
		for _, u := range o.Units {
			offers[u.Device] = u
		}
		for index, n := range slots {
			gpu := gpu.DeviceID(p.UUID(n))
			u, listed := offers[gpu]
			if mine := p.split.owner(index) == a.name; mine != listed || listed && !u.Well || o.Numbers[gpu].GPU != index || listed && numberOf(u.Pool) != p.split.Number {
				lines = append(lines, fmt.Sprintf("%s: GPU %d (%s, number %v, generation %d): listed %v, %+v", a.name, index, gpu, o.Numbers[gpu], o.Generation, listed, u))
			}
		}
	}
	return lines
}

// files checks that no good history was taken for a bad one, and that each of another machine was set aside.
func (p *pair) files() {
	for _, a := range p.agents {
		if err := a.command("keep", ""); err != nil {
			p.wrong("%w", err)
		}
		others, _ := filepath.Glob(a.history() + ".*") // its only error is a bad pattern
		for _, path := range others {
			if !strings.Contains(path, ".other") {
				p.wrong("there is %s", path)
			}
			if err := os.Remove(path); err != nil {
				p.wrong("%w", err)
			}
		}
		if p.foreign[a.name] != (len(others) > 0) {
			p.wrong("%s found the history of another machine: %v, set aside: %v", a.name, p.foreign[a.name], others)
		}
	}
	clear(p.foreign)
}

// misuse ends the storm if NVML was misused: see storm.misuse.
func (p *pair) misuse() {
	violations, err := p.Violations()
	raced, rest := strayLookups(violations)
	rest = slices.DeleteFunc(rest, func(line string) bool {
		return strings.Contains(line, "machine.conf") || strings.Contains(line, "faults") // nothing could be opened
	})
	if err != nil || len(rest) > 0 || raced > 2*p.moves {
		p.wrong("NVML misused, indices moved %d times: %q, %v", p.moves, violations, err)
	}
	p.moves = 0
	if err := errors.Join(p.ForgiveViolations(), p.Heal(simdriver.All)); err != nil {
		p.wrong("%w", err)
	}
}
