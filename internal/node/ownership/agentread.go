package ownership

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// reading is what the folder of the agents has.
type reading struct {
	mine   agentFile
	broken error       // why the file of this agent can't be used; nil = it can, or there is none
	lost   bool        // because of that it is not known what this agent has offered
	former agentFile   // of this agent, of an earlier boot
	others []agentFile // by agent
	alone  bool        // no other agent has a file, of any boot: none has run on this node
	faults []fault     // of other agents, by agent

	unrecorded bool // this agent offers GPUs that mine does not have, by its link
}

// unknown are the agents that may offer any GPU.
func (r reading) unknown() (agents []string) {
	for _, f := range r.others {
		if f.unknown != nil {
			agents = append(agents, f.agent)
		}
	}
	return agents
}

// fault is a file of an agent that can't be used.
type fault struct {
	agent, path string
	err         error
	remembered  bool // what was read before counts
}

// errUnwritten is the error of the file of an agent that runs and has written none in this boot.
var errUnwritten = errors.New("the agent runs and has not written its file: see its warnings")

// decodedFile is a file as it was decoded last.
type decodedFile struct {
	text []byte
	file agentFile
}

// read reads the files of all agents. Those of an earlier boot are void.
//
// A file that can't be used, whatever the reason, is not one without devices: those that were read from it before count, and the agent
// may have offered any other GPU since. That ends with the file: an operator removes that of an agent that was removed. The file of an
// agent that runs can't be removed so.
func (s *store) read(running func(agent string) bool) (reading, error) {
	r := reading{mine: agentFile{agent: s.agent}, alone: true}
	agents, err := s.agents()
	if err != nil {
		return r, err
	}
	r.unrecorded = s.isUnrecorded(s.agent)
	for _, agent := range agents {
		f, err := s.readFile(agent)
		void := err == nil && s.isVoid(f)
		switch {
		case agent == s.agent && void:
			r.former = f
			continue
		case agent == s.agent:
			s.readOwn(&r, f, err)
			continue
		}
		r.alone = false
		missing := void || errors.Is(err, fs.ErrNotExist)
		switch {
		case s.isUnrecorded(agent):
			err = errUnrecorded
		case missing && !running(agent) && !s.wasRemoved():
			delete(s.decoded, agent)
			continue
		case missing:
			err = errUnwritten
		}
		if err != nil {
			one := fault{agent: agent, path: s.path(agent, ".json"), err: err}
			if errors.Is(err, errUnrecorded) {
				one.path = s.path(agent, unrecordedSuffix)
			}
			f, one.remembered = s.remembered(agent)
			f.agent, f.unknown = agent, func(gpu.DeviceID) bool { return true }
			r.faults = append(r.faults, one)
		}
		r.others = append(r.others, f)
	}
	return r, nil
}

// readOwn adds the file of this agent, of which err is the error. Without a file this agent has recorded nothing: an operator has removed it.
// If all of the folder was removed, this agent writes its file again, as the others do.
func (s *store) readOwn(r *reading, f agentFile, err error) {
	missing := errors.Is(err, fs.ErrNotExist)
	if err == nil || missing && !s.wasRemoved() {
		f.agent = s.agent
		r.mine = f
		return
	}
	r.broken = err
	if f, ok := s.remembered(s.agent); ok {
		r.mine = f
	} else {
		r.lost = !missing
	}
}

// agents are those that have a file in the folder, by name, and while the folder is a new one those of the former folder.
func (s *store) agents() ([]string, error) {
	entries, err := os.ReadDir(s.folder)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if agent, ok := agentOf(e.Name()); ok {
			names = append(names, agent)
		}
	}
	if s.wasRemoved() {
		names = slices.AppendSeq(names, maps.Keys(s.decoded))
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// agentOf returns the agent of a file in the folder of the agents; false for another file, such as a temporary one.
func agentOf(name string) (agent string, ok bool) {
	for _, suffix := range []string{".json", ".lock", unrecordedSuffix} {
		if agent, ok = strings.CutSuffix(name, suffix); ok {
			return agent, isAgentName(agent)
		}
	}
	return "", false
}

// isVoid reports whether a file is of an earlier boot. An unknown boot is no sign of a reboot.
func (s *store) isVoid(f agentFile) bool {
	return f.boot != s.boot && f.boot != "" && s.boot != ""
}

// remembered is the file of an agent as it was read last, or written by this process, in this boot.
func (s *store) remembered(agent string) (agentFile, bool) {
	if d, ok := s.decoded[agent]; ok && !s.isVoid(d.file) {
		return d.file, true
	}
	return agentFile{}, false
}

// readFile reads the file of an agent, and decodes it unless it is the same as before.
func (s *store) readFile(agent string) (agentFile, error) {
	text, err := statefile.Read(s.path(agent, ".json"), maxSize+statefile.SealBytes, statefile.SharedDir)
	if err != nil {
		return agentFile{}, err
	}
	if d, ok := s.decoded[agent]; ok && bytes.Equal(d.text, text) {
		return d.file, nil
	}
	f, err := decode(text, agent)
	if err == nil {
		s.remember(text, f)
	}
	return f, err
}

func (s *store) remember(text []byte, f agentFile) {
	if s.decoded == nil {
		s.decoded = map[string]decodedFile{}
	}
	s.decoded[f.agent] = decodedFile{text, f}
}

// wasRemoved reports whether the folder was removed a moment ago while this agent ran: other agents that run write their files again when
// they find that.
func (s *store) wasRemoved() bool {
	return !s.removed.IsZero() && time.Since(s.removed) < defaultTimings.alone+restartAtMost
}

// Texts of inventory.Recorded.Reason, in the health of devices: "offered by another agent (perhaps: ...)".
const (
	elseUnread     = "perhaps: what the agents of this node offer is not read so far"
	elseUnrecorded = "perhaps: not recorded so far"
	elseUnwritten  = "perhaps: the record of this agent is not written"
	elseUnseen     = "perhaps: no agent can record its GPUs now"
	elseDuplicate  = "perhaps: not recorded by the process of this agent that runs already"
)

// own is what this agent has recorded on disk, and what that means for other devices. failed is why that is not all that it offers.
func (s *store) own(r reading, failed error) inventory.Recorded {
	if !s.refuse || s.unrecorded {
		return inventory.Recorded{}
	}
	o := inventory.Recorded{Reason: elseUnrecorded, Pending: failed == nil}
	for _, c := range r.mine.devices {
		o.At = append(o.At, c.at)
	}
	unknown := r.unknown()
	switch {
	case len(unknown) > 0:
		o.Reason, o.Pending = fmt.Sprintf("perhaps %s, whose file can't be read", strings.Join(unknown, ", ")), false
	case errors.Is(failed, errDuplicateAgent):
		o.Reason = elseDuplicate
	case failed != nil && r.alone:
		o.Reason = elseUnseen
	case failed != nil:
		o.Reason = elseUnwritten
	}
	return o
}

// ownUnread is own while the files were not read in this process; why is the error, nil before the first attempt. What the agent has recorded
// before needs no lock: only this agent changes its file, and only as a whole. Where there is no folder, or one that can't be locked at all,
// and no file of another agent in it, none has recorded anything: then it is the zero value.
func (s *store) ownUnread(why error) (own inventory.Recorded, missing bool) {
	if !s.refuse {
		return inventory.Recorded{}, false
	}
	agents, err := s.agents()
	missing = errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
	other := slices.ContainsFunc(agents, func(agent string) bool { return agent != s.agent })
	if held := errors.Is(why, context.DeadlineExceeded); why != nil && (missing || err == nil && !other && !held) {
		return inventory.Recorded{}, missing
	}
	return s.ownRecorded(elseUnread), missing
}

// ownRecorded is what the file of this agent has, with the reason against all other devices.
func (s *store) ownRecorded(reason string) inventory.Recorded {
	o := inventory.Recorded{Reason: reason}
	if f, err := s.readFile(s.agent); err == nil && !s.isVoid(f) {
		for _, c := range f.devices {
			o.At = append(o.At, c.at)
		}
	}
	return o
}
