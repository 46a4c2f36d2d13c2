package storm

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// pair is a machine of eight GPUs with both agents on it, each in a process of its own, under a policy that splits the GPUs
// by index. They share a state directory.
type pair struct {
	*simdriver.Machine
	t        testing.TB
	ctx      context.Context // ends with the first failure, or the test
	fail     context.CancelFunc
	o        options
	random   *rand.Rand
	journal  *journal
	deals    *deals
	stateDir string
	agents   map[string]*agent

	mu      sync.Mutex
	failure error

	// of the runner
	split    split
	ahead    time.Duration     // of the wall clock
	out      map[int]unplugged // GPUs that lie on the table, by slot
	touched  map[int]bool      // slots in whose GPU a lasting fault is in force
	driver   bool              // one of the driver as a whole is
	renewed  map[int]time.Time // when a GPU may have looked repaired last, by slot
	troubles map[int]trouble   // by slot
	lifts    []lift
	foreign  map[string]bool // agents that have found the history of another machine since the last calm
	done     map[string]int
	moves    int // how often GPUs were unplugged since the last calm
}

// unplugged is a GPU out of its slot.
type unplugged struct {
	lines []string
	uuid  gpu.DeviceID
}

// agent is one of the two, of which one process after another runs.
type agent struct {
	name string
	p    *pair
	life *life // nil while none runs
}

// life is one process of an agent.
type life struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan report
	ended   chan struct{} // closed when it has ended and all it wrote was read
	full    bool          // its descriptor table; the runner's

	mu     sync.Mutex
	latest *offered
}

func newPair(t testing.TB, o options) *pair {
	ctx, cancel := context.WithCancel(t.Context())
	p := &pair{
		Machine: simdriver.Start(t, "h100x8"), t: t, ctx: ctx, fail: cancel, o: o,
		random: rand.New(rand.NewPCG(o.seed, 0)), journal: newJournal(), deals: newDeals(),
		stateDir: t.TempDir(), agents: map[string]*agent{}, out: map[int]unplugged{}, touched: map[int]bool{},
		renewed: map[int]time.Time{}, troubles: map[int]trouble{}, foreign: map[string]bool{}, done: map[string]int{},
		split: split{Number: 1, Nomad: []int{0, 1, 2, 3}},
	}
	must(t, os.Symlink("/proc/uptime", filepath.Join(p.Root, "proc/uptime")))
	for n := range gpus {
		p.deals.plug(gpu.DeviceID(p.UUID(n)), false)
	}
	for _, name := range []string{forNomad, forKubernetes} {
		p.agents[name] = &agent{name: name, p: p}
	}
	t.Cleanup(func() {
		cancel()
		for _, a := range p.agents {
			a.kill()
		}
		must(t, p.Heal(), p.ForgiveViolations())
	})
	for _, a := range p.agents {
		must(t, a.start(false))
	}
	return p
}

// wrong ends the storm with its first failure.
func (p *pair) wrong(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failure == nil && p.ctx.Err() == nil {
		p.failure = wrongAt(time.Now(), format, args...)
		p.journal.note("WRONG: %v", p.failure)
		p.fail()
	}
}

// verdict fails the test if anything went wrong, with what led to it.
func (p *pair) verdict() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failure != nil {
		p.t.Errorf("%v\nTANDEM_STORM_SEED=%d\n%s", p.failure, p.o.seed, p.journal)
	}
}

// start starts the agent, with a descriptor table that is full if that is asked for.
func (a *agent) start(full bool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := json.Marshal(orders{
		Agent: a.name, StateDir: a.p.stateDir, Root: a.p.Root, Split: a.p.split, Ahead: a.p.ahead, Full: full,
	})
	if err != nil {
		return err
	}
	l := &life{cmd: exec.Command(self), answers: make(chan report, 16), ended: make(chan struct{}), full: full}
	l.cmd.Env = append(os.Environ(), asAgent+"="+string(text))
	l.cmd.Stderr = logOf{a}
	if l.in, err = l.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := l.cmd.Start(); err != nil {
		return err
	}
	a.life = l
	go func() {
		defer close(l.ended)
		a.follow(l, out)
		_ = l.cmd.Wait() // a process that was killed says so
	}()
	return nil
}

// logOf takes what an agent writes to its standard error.
type logOf struct{ a *agent }

func (l logOf) Write(text []byte) (int, error) {
	l.a.p.journal.note("  %s stderr: %s", l.a.name, text)
	return len(text), nil
}

// follow judges all that a process reports until it ends.
func (a *agent) follow(l *life, out io.Reader) {
	for lines := json.NewDecoder(out); ; {
		var r report
		if err := lines.Decode(&r); err != nil { // the end, or a line that a kill has cut short
			return
		}
		switch {
		case r.Offer != nil:
			l.mu.Lock()
			if l.latest == nil || !maps.Equal(l.latest.Numbers, r.Offer.Numbers) {
				a.p.journal.note("  %-9s generation %d, numbers %s", a.name, r.Offer.Generation, numbersText(r.Offer.Numbers))
			}
			l.latest = r.Offer
			l.mu.Unlock()
			if err := a.p.deals.see(a.name, r.Offer); err != nil {
				a.p.wrong("%w", err)
			}
		case r.Answer != "":
			l.answers <- r
		default:
			a.p.journal.note("  %-9s %s", a.name, r.Log)
		}
	}
}

// numbersText is each GPU by the start of its UUID, and its number.
func numbersText(numbers map[gpu.DeviceID]gpu.DeviceIndex) string {
	var words []string
	for id, at := range numbers {
		words = append(words, fmt.Sprintf("%d=%.8s", at.GPU, id))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

// offer is the latest inventory that a process reported; nil if there is none.
func (l *life) offer() *offered {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.latest
}

// command has a running agent do something. An error is that of the agent.
func (a *agent) command(verb, rest string) error {
	if a.life == nil {
		return nil
	}
	if _, err := fmt.Fprintln(a.life.in, verb, rest); err != nil {
		return a.vanished(err)
	}
	select {
	case r := <-a.life.answers:
		if r.Err != "" {
			return fmt.Errorf("%s %s: %s", a.name, verb, r.Err)
		}
		return nil
	case <-a.life.ended:
		return a.vanished(nil)
	case <-time.After(a.p.o.patient(20 * time.Second)):
		return a.vanished(fmt.Errorf("%s does not answer", verb))
	}
}

// vanished is that an agent ended which nobody has ended.
func (a *agent) vanished(err error) error {
	a.p.wrong("%s has ended, or does not answer: %v", a.name, err)
	return err
}

// stop has the agent end in order.
func (a *agent) stop() {
	if a.life == nil {
		return
	}
	_ = a.life.in.Close() // at which it ends
	select {
	case <-a.life.ended:
	case <-time.After(a.p.o.patient(20 * time.Second)):
		a.p.wrong("%s does not end", a.name)
		_ = a.life.cmd.Process.Kill()
		<-a.life.ended
	}
	a.life = nil
	a.died()
}

// kill ends the agent at once.
func (a *agent) kill() {
	if a.life == nil {
		return
	}
	_ = a.life.cmd.Process.Kill() // it fails if it has ended
	<-a.life.ended
	a.life = nil
	a.died()
}

// history is the path of the agent's history.
func (a *agent) history() string { return filepath.Join(a.p.stateDir, a.name+".json") }

// until waits for something, and says whether it came to be in time.
func (p *pair) until(limit time.Duration, ok func() bool) bool {
	for began := time.Now(); !ok(); {
		if time.Since(began) > p.o.patient(limit) || p.ctx.Err() != nil {
			return false
		}
		time.Sleep(5 * time.Millisecond)
	}
	return true
}
