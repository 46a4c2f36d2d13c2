package hostwatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/filelock"
)

// register is one agent's part of the folder in which the agents of a host write down what they offer.
//
//	<state_dir>/claims/             locked while somebody reads, decides and writes
//	                   nomad-gpu.json   what nomad-gpu claims; outlives it
//	                   nomad-gpu.lock   locked while a nomad-gpu runs
//	                   k8s-gpu.json ...
//
// Two agents that start together, with refuse, on a host where nobody has claimed anything:
//
//	nomad-gpu  lock, reads nothing, claims GPU 3 as turn 1, unlock
//	k8s-gpu      waits for the lock .............................. lock, reads turn 1, leaves GPU 3 alone, unlock
//
// An agent claims what it has read of the machine, a few milliseconds after it was published. What others have
// claimed by then counts at once; only where both learn of a device in the same moment, the later one offers it for
// those milliseconds.
//
// It is used by one goroutine.
type register struct {
	folder  string
	agent   string
	boot    string
	refuse  bool
	started time.Time
	log     *slog.Logger

	life *os.File          // our lock file, locked; nil = not had yet
	said map[string]string // what is wrong with a file, by its name
	tidy bool              // what crashes have left is removed

	known map[string]known // by name of a file
}

// known is a file that was understood.
type known struct {
	text  []byte
	entry entry
}

// view is what an agent sees in the register.
type view struct {
	claims    []core.Claim
	numbering core.Numbering // of all agents
	others    []other        // by name
}

// other is another agent.
type other struct {
	agent, file string
	lives       bool // it runs
	devices     int  // of ours, that it claims
}

// unwritten is an agent's trouble to say what it claims; what the others claim is seen nevertheless.
type unwritten struct{ error }

func (e unwritten) Unwrap() error { return e.error }

// round claims what is offered now and tells what the others claim. It fails with errTwin while another process
// writes under our name, and with unwritten if nothing can be written: the view is good in both cases. With another
// error nothing was seen.
func (r *register) round(ctx context.Context, o offer) (view, error) {
	mkdir := os.MkdirAll(r.folder, 0o700)
	unlock, err := lockFolder(ctx, r.folder)
	if err != nil {
		if mkdir != nil {
			err = mkdir
		}
		return view{}, err
	}
	defer unlock()
	failed := r.live()
	mine, others, err := r.read()
	if err != nil {
		return view{}, err
	}
	if failed == nil {
		next := mine
		next.started, next.boot = r.started, r.boot
		next.claims = settle(mine, others, o, r.refuse, time.Now())
		if len(o.numbering.Numbers) > 0 { // else what was written before stands
			next.numbering = agreed(o.numbering, mine.numbering, others)
		}
		if !next.same(mine) {
			failed = r.write(next)
		}
		if failed == nil {
			mine = next
		}
	}
	// What this agent itself has written counts, too: its history may be older, or another machine's.
	v := view{claims: against(mine, others, o), numbering: numberingOf(append(slices.Clone(others), mine))}
	for _, e := range others {
		v.others = append(v.others, other{
			agent: e.agent, file: r.path(e.agent, ".json"),
			lives: filelock.IsHeld(r.path(e.agent, ".lock")), devices: contested(mine, e, o),
		})
	}
	return v, failed
}

func (r *register) path(agent, suffix string) string { return filepath.Join(r.folder, agent+suffix) }

// live takes our own lock unless we have it, and it is still the one that others find.
func (r *register) live() error {
	path := r.path(r.agent, ".lock")
	if r.life != nil && filelock.IsAt(r.life, path) {
		return nil
	}
	r.close()
	life, err := holdLife(path)
	switch {
	case errors.Is(err, errTwin):
		return errTwin
	case err != nil:
		return unwritten{err}
	}
	r.life = life
	return nil
}

// close says that we do not run any more. What we claim stands.
func (r *register) close() {
	if r.life != nil {
		_ = r.life.Close() // which unlocks
		r.life = nil
	}
}

// read reads what is claimed, and by whom. Claims of before the last boot are void. What can't be read is said once
// and taken for nothing.
func (r *register) read() (mine entry, others []entry, err error) {
	mine.agent = r.agent
	files, err := os.ReadDir(r.folder) // sorted
	if err != nil {
		return mine, nil, err
	}
	for _, f := range files {
		agent, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok || !agentNames.MatchString(agent) {
			continue
		}
		text, err := readFile(filepath.Join(r.folder, f.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var e entry
		if err == nil {
			e, err = r.decode(f.Name(), text, agent)
		}
		r.complain(f.Name(), err)
		switch {
		case err != nil || e.boot != r.boot && e.boot != "" && r.boot != "": // not to know is no sign of a reboot
		case agent == r.agent:
			mine = e
		default:
			others = append(others, e)
		}
	}
	return mine, others, nil
}

// decode is decode for a file that is mostly the same as a second ago.
func (r *register) decode(name string, text []byte, agent string) (entry, error) {
	if k, ok := r.known[name]; ok && bytes.Equal(k.text, text) {
		return k.entry, nil
	}
	e, err := decode(text, agent)
	if err == nil {
		if r.known == nil {
			r.known = map[string]known{}
		}
		r.known[name] = known{text, e}
	}
	return e, err
}

// complain logs what is wrong with a file, once until that changes.
func (r *register) complain(name string, err error) {
	if err == nil {
		delete(r.said, name)
		return
	}
	if r.said[name] != err.Error() {
		r.said[name] = err.Error()
		r.log.Warn("what an agent claims can't be read and does not count", "file", filepath.Join(r.folder, name), "error", err)
	}
}

// write replaces our file.
func (r *register) write(e entry) error {
	path := r.path(r.agent, ".json")
	if !r.tidy {
		left, _ := filepath.Glob(filepath.Join(r.folder, "."+r.agent+".json[0-9]*")) // its only error is a bad pattern
		for _, path := range left {
			_ = os.Remove(path) // if it stays, it is in nobody's way
		}
		r.tidy = true
	}
	text, err := e.encode()
	if err != nil {
		return unwritten{err}
	}
	if err := renameio.WriteFile(path, text, 0o600, renameio.WithTempDir(r.folder)); err != nil {
		return unwritten{fmt.Errorf("%s: %w", path, err)}
	}
	return nil
}
