package storm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// agentKinds are the faults of agents and their files.
func (p *twoAgents) agentKinds() (kinds []kind) {
	var files []string
	down := [2]time.Duration{10 * time.Millisecond, 500 * time.Millisecond}
	full := [2]time.Duration{50 * time.Millisecond, 1500 * time.Millisecond}
	for _, name := range agentNames {
		a, both := p.agents[name], []string{name, name + " files"}
		files = append(files, both[1])
		kinds = append(kinds, []kind{
			{name: name + " ends", weight: 11, domains: both[:1], lasts: down, begin: a.ending(a.stop), end: a.startAgain},
			{name: name + " is killed", weight: 5, domains: both[:1], lasts: down, begin: a.ending(a.kill), end: a.startAgain},
			{name: name + " can open no file", weight: 7, domains: both[1:], lasts: full, begin: a.fill, end: a.free},
			{name: name + " starts without files", weight: 8, domains: both, lasts: full, begin: a.startFull, end: a.free},
			{name: name + " has a foreign history", weight: 4, domains: both, lasts: down, begin: a.foreignHistory, end: a.startAgain},
			{name: name + " has a damaged file", weight: 4, domains: both[1:], lasts: down, begin: a.damageFile, end: a.repairFile},
			{name: name + " rebinds", weight: 2, domains: both, begin: a.rebind},
		}...)
	}
	return append(kinds,
		kind{name: "foreign state directory", weight: 2, domains: append(files, agentNames...), lasts: down, begin: p.foreignDirectory, end: p.startAll},
		kind{name: "the folder of the agents is locked", weight: 4, domains: files, lasts: full, begin: p.lockFolder, end: p.unlockFolder},
		kind{name: "policy changes", weight: 2, domains: files, begin: p.changeSplit},
	)
}

func (a *agent) ending(how func()) func(*fault) error {
	return func(*fault) error { how(); return nil }
}

func (a *agent) startAgain(*fault) error { return a.start(false) }

func (p *twoAgents) startAll(*fault) error {
	return errors.Join(p.agents[forNomad].start(false), p.agents[forKubernetes].start(false))
}

func (a *agent) fill(*fault) error {
	if a.process == nil {
		return errSkipped
	}
	a.process.full = true
	return a.command("full", "")
}

func (a *agent) startFull(*fault) error {
	a.stop()
	return a.start(true)
}

// free has the agent open files again, if it is still the same process. The simulated driver, which takes a file that it could not open
// for read until it changes, reads its files again.
func (a *agent) free(*fault) error {
	if a.process == nil || !a.process.full {
		return nil
	}
	a.process.full = false
	now := time.Now()
	return errors.Join(a.command("free", ""), a.p.Sync(), os.Chtimes(filepath.Join(a.p.Root, "faults"), now, now))
}

// damages make the file of an agent one that can't be used, is of a later version, or can't be read. An agent that runs writes it
// again, but where a directory is in its place.
var damages = []func(path string, good []byte) error{
	func(path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) },
	func(path string, good []byte) error { return os.WriteFile(path, good[:len(good)/2], 0o600) },
	func(path string, _ []byte) error { return os.WriteFile(path, []byte("\x00\xff"), 0o600) },
	func(path string, _ []byte) error { return os.WriteFile(path, []byte(`{"version": 1000}`), 0o600) },
	func(path string, _ []byte) error { return os.Symlink(path, path) }, // root may open every file: this one fails with ELOOP
	func(path string, _ []byte) error { return os.Mkdir(path, 0o700) },
}

func (a *agent) damageFile(*fault) error {
	good, err := os.ReadFile(a.filePath())
	if err != nil || !json.Valid(good) {
		return errSkipped
	}
	a.goodFile = good
	err = errors.Join(os.Remove(a.filePath()), one(a.p.random, damages...)(a.filePath(), good))
	if errors.Is(err, fs.ErrExist) { // the agent has just written it
		return errSkipped
	}
	return err
}

// repairFile puts the file back, unless its agent has written it again.
func (a *agent) repairFile(*fault) error {
	var file struct{ Agent string }
	if text, err := os.ReadFile(a.filePath()); err == nil && json.Unmarshal(text, &file) == nil && file.Agent == a.name {
		return nil
	}
	return errors.Join(os.RemoveAll(a.filePath()), os.WriteFile(a.filePath(), a.goodFile, 0o600))
}

// lockFolder holds the lock that agents take to read and write their files.
func (p *twoAgents) lockFolder(*fault) (err error) {
	p.folderLock, err = filelock.Wait(p.ctx, filepath.Join(p.stateDir, "agents"))
	return err
}

func (p *twoAgents) unlockFolder(*fault) error { return p.folderLock.Close() }

var (
	uuidStart  = regexp.MustCompile(`\b(GPU|MIG)-[0-9a-f]{8}`)
	generation = regexp.MustCompile(`"(G|g)eneration": [0-9]+`)
	bootField  = regexp.MustCompile(`("[Bb]ootID"): "[^"]*"`) // of a history, and of the file of an agent
)

// makeForeign replaces a file by that of another node of the same model: other GPUs at the same addresses, with a later numbering.
func makeForeign(path string, sameBoot bool) error {
	text, err := os.ReadFile(path)
	if err == nil {
		text, err = statefile.Unseal(text)
	}
	if err != nil {
		return err
	}
	text = uuidStart.ReplaceAll(text, []byte("${1}-0ddba115"))
	text = generation.ReplaceAll(text, []byte(`"${1}eneration": 1000`))
	if !sameBoot {
		if !bootField.Match(text) {
			return fmt.Errorf("%s has no boot ID", path)
		}
		text = bootField.ReplaceAll(text, []byte(`${1}: "0ddba115"`))
	}
	return os.WriteFile(path, text, 0o600)
}

// foreignHistory gives the agent the history of another node between two processes.
func (a *agent) foreignHistory(*fault) error {
	a.stop()
	text, err := os.ReadFile(a.historyPath())
	if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Contains(text, []byte("GPU-")) {
		if err := a.start(false); err != nil {
			return err
		}
		return errSkipped
	}
	a.p.assignments.historyLost(a.name)
	a.p.foreign[a.name] = true
	return makeForeign(a.historyPath(), a.p.random.IntN(2) == 0)
}

// foreignDirectory gives both agents the state directory of another node, with records of its GPUs.
func (p *twoAgents) foreignDirectory(*fault) error {
	for _, a := range p.agents {
		if a.ready() == nil {
			return errSkipped
		}
	}
	for _, a := range p.agents {
		a.stop()
	}
	p.assignments.bindingsLost()
	for _, a := range p.agents {
		if err := errors.Join(makeForeign(a.historyPath(), false), makeForeign(a.filePath(), false)); err != nil {
			return err
		}
		p.assignments.historyLost(a.name)
		p.foreign[a.name] = true
	}
	return nil
}

// sameNumbering reports whether both agents run and have applied the same rebind.
func (p *twoAgents) sameNumbering() bool {
	a, b := p.agents[forNomad].ready(), p.agents[forKubernetes].ready()
	return a != nil && b != nil && a.Generation == b.Generation
}

// rebind is the command of an operator after all workloads have ended. The next one follows when both agents have applied it.
func (a *agent) rebind(*fault) error {
	if !a.p.sameNumbering() {
		return errSkipped
	}
	if err := a.command("rebind", ""); err != nil { // the driver may not answer now
		a.p.journal.note("%v", err)
		return nil
	}
	return a.command("save", "")
}

// changeSplit gives both agents another policy. One that waits for its history takes no commands.
func (p *twoAgents) changeSplit(*fault) error {
	for _, a := range p.agents {
		if a.process != nil && (a.process.full || a.ready() == nil) {
			return errSkipped
		}
	}
	p.split = split{Number: p.split.Number + 1, Nomad: p.random.Perm(gpus)[:2+p.random.IntN(4)]}
	text, err := json.Marshal(p.split)
	if err != nil {
		return err
	}
	return errors.Join(p.agents[forNomad].command("split", string(text)), p.agents[forKubernetes].command("split", string(text)))
}
