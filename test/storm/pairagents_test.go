package storm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

// running draws an agent that runs.
func (p *pair) running() (*agent, error) {
	a := p.agents[one(p.random, forNomad, forKubernetes)]
	if a.life == nil {
		return nil, errSkipped
	}
	p.journal.note("%s is struck", a.name)
	return a, nil
}

// startLater starts an agent after a while.
func (p *pair) startLater(a *agent) {
	p.later(p.between(10*time.Millisecond, 500*time.Millisecond), a.name+" starts", func() error { return a.start(false) })
}

func endAgent(p *pair) error {
	a, err := p.running()
	if err != nil {
		return err
	}
	a.stop()
	p.startLater(a)
	return nil
}

func killAgent(p *pair) error {
	a, err := p.running()
	if err != nil {
		return err
	}
	a.kill()
	p.startLater(a)
	return nil
}

// free has the table of an agent free again, if it is still the same process.
func (p *pair) free(a *agent, l *life) {
	p.later(p.between(50*time.Millisecond, 1500*time.Millisecond), a.name+" can open files", func() error {
		if a.life != l {
			return nil
		}
		l.full = false
		return errors.Join(a.command("free", ""), p.showAgain())
	})
}

// showAgain has the simulated driver read its files anew, which it could not open, and which it takes for read until they change.
func (p *pair) showAgain() error {
	now := time.Now()
	return errors.Join(p.Sync(), os.Chtimes(filepath.Join(p.Root, "faults"), now, now))
}

func fillTable(p *pair) error {
	a, err := p.running()
	if err != nil || a.life.full {
		return errSkipped
	}
	a.life.full = true
	p.free(a, a.life)
	return a.command("full", "")
}

// startFull restarts an agent where nothing can be opened.
func startFull(p *pair) error {
	a, err := p.running()
	if err != nil {
		return err
	}
	a.stop()
	if err := a.start(true); err != nil {
		return err
	}
	p.free(a, a.life)
	return nil
}

var (
	uuidStart  = regexp.MustCompile(`\b(GPU|MIG)-[0-9a-f]{8}`)
	generation = regexp.MustCompile(`"(G|g)eneration": [0-9]+`)
	bootField  = regexp.MustCompile(`("Boot"|"boot"): "[^"]*"`)
)

// ofAnother makes the files of another machine of the same model: other GPUs at the same addresses, and numbered anew more often.
func ofAnother(text []byte, sameBoot bool) []byte {
	text = uuidStart.ReplaceAll(text, []byte("${1}-0ddba115"))
	text = generation.ReplaceAll(text, []byte(`"${1}eneration": 1000`))
	if !sameBoot {
		text = bootField.ReplaceAll(text, []byte(`${1}: "0ddba115"`))
	}
	return text
}

// foreignHistory gives an agent the history of another machine between two lives.
func foreignHistory(p *pair) error {
	a, err := p.running()
	if err != nil || a.life.full {
		return errSkipped
	}
	a.stop()
	p.startLater(a)
	text, err := os.ReadFile(a.history())
	if errors.Is(err, fs.ErrNotExist) || !bytes.Contains(text, []byte("GPU-")) {
		return errSkipped
	}
	p.deals.lose(a.name)
	p.foreign[a.name] = true
	return errors.Join(err, os.WriteFile(a.history(), ofAnother(text, p.random.IntN(2) == 0), 0o600))
}

// foreignDirectory gives both the state directory of another machine, with claims on its GPUs.
func foreignDirectory(p *pair) error {
	for _, a := range p.agents {
		if a.life == nil || a.life.full || a.life.offer() == nil || !a.life.offer().Ready {
			return errSkipped
		}
	}
	for _, a := range p.agents {
		a.stop()
		p.startLater(a)
	}
	p.deals.loseAll()
	for _, a := range p.agents {
		for _, path := range []string{a.history(), filepath.Join(p.stateDir, "claims", a.name+".json")} {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if err := os.WriteFile(path, ofAnother(text, false), 0o600); err != nil {
				return err
			}
		}
		p.deals.lose(a.name)
		p.foreign[a.name] = true
	}
	return nil
}

// follow reports whether both agents run and go by the same numbering.
func (p *pair) follow() bool {
	a, b := p.agents[forNomad].life.offer(), p.agents[forKubernetes].life.offer()
	return a != nil && b != nil && a.Ready && b.Ready && a.Generation == b.Generation
}

// rebind is an operator's word that no work is on any GPU. The next one comes when both agents have followed.
func rebind(p *pair) error {
	if !p.follow() {
		return errSkipped
	}
	a, err := p.running()
	if err != nil || a.life.full || a.life.offer() == nil || !a.life.offer().Ready {
		return errSkipped
	}
	if err := a.command("rebind", ""); err != nil { // the driver may not answer now
		p.journal.note("%v", err)
		return nil
	}
	return a.command("keep", "")
}

// changeSplit gives both agents another policy.
func changeSplit(p *pair) error {
	for _, a := range p.agents {
		if a.life != nil && (a.life.full || a.life.offer() == nil || !a.life.offer().Ready) {
			return errSkipped // it may wait for its history, and takes no orders meanwhile
		}
	}
	nomad := p.random.Perm(gpus)[:2+p.random.IntN(4)]
	p.split = split{Number: p.split.Number + 1, Nomad: nomad}
	text, err := json.Marshal(p.split)
	if err != nil {
		return err
	}
	for _, a := range p.agents {
		if err := a.command("split", string(text)); err != nil {
			return err
		}
	}
	return nil
}
