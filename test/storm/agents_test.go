package storm

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// agent is one of the two agents, of which one process after another runs.
type agent struct {
	name    string
	p       *twoAgents
	process *process // nil while none runs

	goodFile []byte // before the file of the agent was damaged
}

// process is one process of an agent.
type process struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan message
	ended   chan struct{} // closed when it has ended and all its output was read
	full    bool          // it can open no file; of the goroutine that makes faults

	mu     sync.Mutex
	latest *offered
}

// start starts the agent; full: it can open no file.
func (a *agent) start(full bool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := json.Marshal(startOptions{
		Agent: a.name, StateDir: a.p.stateDir, Root: a.p.Root, Split: a.p.split, Ahead: a.p.ahead, Full: full,
	})
	if err != nil {
		return err
	}
	l := &process{cmd: exec.Command(self), answers: make(chan message, 16), ended: make(chan struct{}), full: full}
	l.cmd.Env = append(os.Environ(), agentVariable+"="+string(text))
	l.cmd.Stderr = a.p.journal
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
	a.process = l
	go func() {
		defer close(l.ended)
		a.readMessages(l, out)
		_ = l.cmd.Wait() // an error if it was killed
	}()
	return nil
}

// readMessages checks all that a process writes until it ends.
func (a *agent) readMessages(l *process, out io.Reader) {
	for lines := json.NewDecoder(out); ; {
		var m message
		if err := lines.Decode(&m); err != nil { // the end, or a line that was cut short by a kill
			return
		}
		switch {
		case m.Offer != nil:
			l.mu.Lock()
			if l.latest == nil || !maps.Equal(l.latest.Numbers, m.Offer.Numbers) {
				a.p.journal.note("  %-9s generation %d, numbers %s", a.name, m.Offer.Generation, numbersText(m.Offer.Numbers))
			}
			l.latest = m.Offer
			l.mu.Unlock()
			if err := a.p.assignments.check(a.name, m.Offer); err != nil {
				a.p.fail("%w", err)
			}
		case m.Answer != "":
			l.answers <- m
		default:
			a.p.journal.note("  %-9s %s", a.name, m.Log)
		}
	}
}

// numbersText has the number and the beginning of the UUID of each GPU.
func numbersText(numbers map[gpu.DeviceID]gpu.DeviceIndex) string {
	var words []string
	for id, at := range numbers {
		words = append(words, fmt.Sprintf("%d=%.8s", at.GPU, id))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

// offer is the latest inventory that the running process has sent; nil if there is none.
func (a *agent) offer() *offered {
	if a.process == nil {
		return nil
	}
	a.process.mu.Lock()
	defer a.process.mu.Unlock()
	return a.process.latest
}

// ready is offer, if the driver answers in it; else nil.
func (a *agent) ready() *offered {
	if o := a.offer(); o != nil && o.Ready {
		return o
	}
	return nil
}

// command has a running agent execute a command, and returns the agent's error.
func (a *agent) command(verb, rest string) error {
	if a.process == nil {
		return nil
	}
	if _, err := fmt.Fprintln(a.process.in, verb, rest); err != nil {
		return a.noAnswer(err)
	}
	select {
	case m := <-a.process.answers:
		if m.Err != "" {
			return fmt.Errorf("%s %s: %s", a.name, verb, m.Err)
		}
		return nil
	case <-a.process.ended:
		return a.noAnswer(nil)
	case <-time.After(a.p.o.limit(20 * time.Second)):
		return a.noAnswer(fmt.Errorf("no answer to %s", verb))
	}
}

// noAnswer fails the test because an agent has ended by itself, or does not answer.
func (a *agent) noAnswer(err error) error {
	a.p.fail("%s has ended, or does not answer: %v", a.name, err)
	return err
}

// stop ends the agent in order.
func (a *agent) stop() {
	if a.process == nil {
		return
	}
	_ = a.process.in.Close() // at which it ends
	select {
	case <-a.process.ended:
	case <-time.After(a.p.o.limit(20 * time.Second)):
		a.p.fail("%s does not end", a.name)
	}
	a.kill()
}

// kill ends the agent immediately.
func (a *agent) kill() {
	if a.process == nil {
		return
	}
	_ = a.process.cmd.Process.Kill() // it fails if it has ended
	<-a.process.ended
	a.process = nil
	a.recordEnd()
}

// recordEnd records what is lost with a process that has just ended: what it bound is on disk within about a second, unless it could
// not write.
func (a *agent) recordEnd() {
	numbered, decided := a.inHistory()
	kept := func(id gpu.DeviceID) bool {
		return numbered[id] || slices.ContainsFunc(agentNames, func(name string) bool {
			other := a.p.agents[name]
			if other.inFile()[id] {
				return true
			}
			o := other.offer()
			if o == nil {
				return false
			}
			_, ok := o.Numbers[id]
			return ok
		})
	}
	a.p.assignments.agentEnded(a.name, kept, func(id gpu.DeviceID) bool { return decided[id] })
}

// historyPath is the path of the agent's history.
func (a *agent) historyPath() string { return filepath.Join(a.p.stateDir, a.name+".json") }

// filePath is the path of the file in which the agent records its devices.
func (a *agent) filePath() string { return filepath.Join(a.p.stateDir, "agents", a.name+".json") }

// inHistory are the devices that have a number in the agent's history, and those that a share has decided on.
func (a *agent) inHistory() (numbered, decided map[gpu.DeviceID]bool) {
	var file struct{ Record core.Checkpoint }
	numbered, decided = map[gpu.DeviceID]bool{}, map[gpu.DeviceID]bool{}
	if text, err := os.ReadFile(a.historyPath()); err != nil || json.Unmarshal(text, &file) != nil {
		return numbered, decided
	}
	for _, n := range file.Record.Binding.Numbering.Numbers {
		numbered[n.ID] = true
	}
	for _, c := range file.Record.Binding.Counts {
		if !strings.HasPrefix(c.Share, a.p.split.pool("gpu")+" ") {
			continue // of another policy
		}
		for _, id := range slices.Concat(c.Taken, c.Rejected) {
			decided[id] = true
		}
	}
	return numbered, decided
}

// inFile are the devices that have a number in the file of the agent.
func (a *agent) inFile() map[gpu.DeviceID]bool {
	var file struct {
		Numbers []struct{ ID gpu.DeviceID }
	}
	numbered := map[gpu.DeviceID]bool{}
	if text, err := os.ReadFile(a.filePath()); err != nil || json.Unmarshal(text, &file) != nil {
		return numbered
	}
	for _, n := range file.Numbers {
		numbered[n.ID] = true
	}
	return numbered
}
