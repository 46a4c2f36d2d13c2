package ownership

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// Names in the state directory that the agents of a node share.
const (
	FileName   = "ownership.json" // the file of the node
	FolderName = "agents"         // with a file of each agent, and the lock for all
)

// DefaultSettle is for how long a GPU must have had no holder before its owner changes. Nothing is given out in that time, so it only
// serves work that was placed on the GPU before its orchestrator knew that it takes none: the kubelet reports the number of devices
// every 10 s, the taint of a device reaches the scheduler in about a second, a Nomad client sends its devices within some seconds. What
// an agent gives out until then holds the GPU; later the orchestrator would find another API there, and the pod or task would fail.
const DefaultSettle = 30 * time.Second

// Entry is a GPU with a target.
type Entry struct {
	Target inventory.API
	Owner  inventory.API // that has the GPU now; "" = no agent has recorded it so far
	Epoch  uint64        // number of changes of Owner
	Settle time.Duration // 0 = DefaultSettle
	Force  bool          // what can't be known about holders counts as none

	TargetRevision uint64 // a later target has a greater one, also if this file was lost in between; see WithTargets
	AgentGone      string // agent that force does without, as it has not run for the settle time; "" = none, or it runs again
}

// File is the content of the file. It is immutable: With... methods return another one. The zero value has no GPU.
type File struct {
	GPUs      map[gpu.DeviceID]Entry                    // with a target
	LocalAPIs map[string]map[gpu.DeviceID]inventory.API // by agent: which of its APIs has a GPU without an entry
	Previous  map[gpu.DeviceID]inventory.API            // targets before the latest change of targets
	Taken     map[gpu.DeviceID]Mark                     // GPUs that no API gives out, as an agent has taken them
}

// Empty reports whether the file has no GPU.
func (f File) Empty() bool { return len(f.GPUs) == 0 && len(f.LocalAPIs) == 0 && len(f.Taken) == 0 }

// Equal reports whether two files have the same content.
func (f File) Equal(g File) bool {
	return maps.Equal(f.GPUs, g.GPUs) && maps.EqualFunc(f.LocalAPIs, g.LocalAPIs, maps.Equal) && maps.Equal(f.Previous, g.Previous) && maps.Equal(f.Taken, g.Taken)
}

// clone returns a copy whose maps can be changed.
func (f File) clone() File {
	next := File{
		GPUs: map[gpu.DeviceID]Entry{}, LocalAPIs: map[string]map[gpu.DeviceID]inventory.API{}, Previous: maps.Clone(f.Previous), Taken: map[gpu.DeviceID]Mark{},
	}
	maps.Copy(next.GPUs, f.GPUs)
	maps.Copy(next.Taken, f.Taken)
	for agent, apis := range f.LocalAPIs {
		next.LocalAPIs[agent] = maps.Clone(apis)
	}
	return next
}

// TargetChange is a new target of a GPU.
type TargetChange struct {
	GPU    gpu.DeviceID
	Target inventory.API
	From   inventory.API // where the GPU is, which WithTargets(Back()) restores; "" = its former target
	Settle time.Duration // 0 = DefaultSettle
	Force  bool
}

// WithTargets returns the file with new targets, and with the former ones as Previous. Their TargetRevision is the time in milliseconds, and in any
// case greater than that of the former target: the file may have been removed just before, and an agent that remembers the former target
// must not take that for the later one.
func (f File) WithTargets(changes []TargetChange, now time.Time) File {
	next := f.clone()
	next.Previous = map[gpu.DeviceID]inventory.API{}
	for _, c := range changes {
		e, known := next.GPUs[c.GPU]
		was := c.From
		if known {
			was = e.Target
		}
		if was != "" {
			next.Previous[c.GPU] = was
		}
		e.Target, e.Settle, e.Force, e.AgentGone = c.Target, c.Settle, c.Force, ""
		e.TargetRevision = min(max(e.TargetRevision+1, uint64(max(now.UnixMilli(), 0))), maxOrder)
		next.GPUs[c.GPU] = e
	}
	return next
}

// Back returns the changes that restore the targets before the latest change.
func (f File) Back() []TargetChange {
	var changes []TargetChange
	for _, id := range slices.Sorted(maps.Keys(f.Previous)) {
		changes = append(changes, TargetChange{GPU: id, Target: f.Previous[id], Settle: f.GPUs[id].Settle})
	}
	return changes
}

// Restore returns f, which was read, with what an agent remembers and f lacks, because the file may have been removed or replaced by an
// older one: entries, and later targets and owners. Which API of the agent itself has a GPU only that agent changes. Marks are as read: an agent
// writes again those that it needs.
func (f File) Restore(agent string, remembered File) File {
	next := f.clone()
	if len(f.GPUs) == 0 && len(remembered.Previous) > 0 {
		next.Previous = maps.Clone(remembered.Previous)
	}
	for id, was := range remembered.GPUs {
		if is, ok := next.GPUs[id]; !ok {
			next.GPUs[id] = was
		} else {
			switch {
			case was.TargetRevision > is.TargetRevision:
				is.Target, is.TargetRevision, is.Settle, is.Force, is.AgentGone = was.Target, was.TargetRevision, was.Settle, was.Force, was.AgentGone
			case was.TargetRevision == is.TargetRevision: // force may have ended since then, and never begins
				if is.Force = is.Force && was.Force; is.AgentGone != was.AgentGone {
					is.AgentGone = ""
				}
			}
			if was.Epoch > is.Epoch {
				is.Owner, is.Epoch = was.Owner, was.Epoch
			}
			next.GPUs[id] = is
		}
	}
	for of, apis := range remembered.LocalAPIs {
		if _, ok := next.LocalAPIs[of]; of == agent || !ok {
			next.LocalAPIs[of] = maps.Clone(apis)
		}
	}
	if next.Equal(f) {
		return f
	}
	return next
}

const (
	version  = 2
	maxSize  = 1 << 20 // bytes
	maxOrder = 1 << 53 // integers up to here are exact in every JSON reader
)

type jsonFile struct {
	Version   int                                       `json:"version"`
	GPUs      map[gpu.DeviceID]jsonEntry                `json:"gpus"`
	LocalAPIs map[string]map[gpu.DeviceID]inventory.API `json:"localAPIs,omitempty"`
	Previous  map[gpu.DeviceID]inventory.API            `json:"previous,omitempty"`
	Taken     map[gpu.DeviceID]jsonMark                 `json:"taken,omitempty"`
}

type jsonMark struct {
	Agent   string            `json:"agent"`
	Purpose inventory.Purpose `json:"for"`

	DriverReleased bool `json:"driverReleased,omitempty"`
}

type jsonEntry struct {
	Target         inventory.API `json:"target"`
	Owner          inventory.API `json:"owner,omitempty"`
	Epoch          uint64        `json:"epoch,omitempty"`
	TargetRevision uint64        `json:"targetRevision,omitempty"`
	Settle         string        `json:"settle,omitempty"`
	Force          bool          `json:"force,omitempty"`

	AgentGone string `json:"agentGone,omitempty"`
}

// Encode returns the text of the file.
func (f File) Encode() ([]byte, error) {
	j := jsonFile{Version: version, GPUs: map[gpu.DeviceID]jsonEntry{}, LocalAPIs: f.LocalAPIs, Previous: f.Previous}
	for id, e := range f.GPUs {
		one := jsonEntry{Target: e.Target, Owner: e.Owner, Epoch: e.Epoch, TargetRevision: e.TargetRevision, Force: e.Force, AgentGone: e.AgentGone}
		if e.Settle > 0 {
			one.Settle = e.Settle.String()
		}
		j.GPUs[id] = one
	}
	if len(f.Taken) > 0 {
		j.Taken = map[gpu.DeviceID]jsonMark{}
	}
	for id, m := range f.Taken {
		j.Taken[id] = jsonMark(m)
	}
	text, err := json.MarshalIndent(j, "", "  ")
	return statefile.Seal(text), err
}

// ErrFormat is wrapped by the errors of a file that is not the one of the node. Its content is not known.
var ErrFormat = errors.New("not a file of the owners of GPUs")

// Decode returns the content of a text. It is valid as a whole, or an error.
func Decode(text []byte) (File, error) {
	var j jsonFile
	text, err := statefile.Unseal(text)
	if err == nil {
		err = json.Unmarshal(text, &j)
	}
	if err != nil {
		return File{}, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if j.Version != version {
		return File{}, fmt.Errorf("%w of version %d, but of version %d", ErrFormat, version, j.Version)
	}
	f := File{LocalAPIs: j.LocalAPIs, Previous: j.Previous}.clone()
	for id, one := range j.GPUs {
		e := Entry{Target: one.Target, Owner: one.Owner, Epoch: one.Epoch, TargetRevision: one.TargetRevision, Force: one.Force, AgentGone: one.AgentGone}
		var err error
		if one.Settle != "" {
			e.Settle, err = time.ParseDuration(one.Settle)
		}
		if err != nil || e.Settle < 0 || !isDeviceName(id) || !isAPI(e.Target) || e.Owner != "" && !isAPI(e.Owner) || max(e.Epoch, e.TargetRevision) > maxOrder || e.AgentGone != "" && !slices.Contains(Agents(), e.AgentGone) {
			return File{}, fmt.Errorf("%w: %.80q: %+v", ErrFormat, id, one)
		}
		f.GPUs[id] = e
	}
	for _, apis := range append(slices.Collect(maps.Values(j.LocalAPIs)), j.Previous) {
		for id, a := range apis {
			if !isDeviceName(id) || !isAPI(a) {
				return File{}, fmt.Errorf("%w: %.80q: %.80q", ErrFormat, id, a)
			}
		}
	}
	for id, m := range j.Taken {
		if !isDeviceName(id) || !slices.Contains(Agents(), m.Agent) || !isAgentName(string(m.Purpose)) {
			return File{}, fmt.Errorf("%w: %.80q: %+.80v", ErrFormat, id, m)
		}
		f.Taken[id] = Mark(m)
	}
	return f, nil
}

func isAPI(a inventory.API) bool { return slices.Contains(APIs(), a) }

// Read reads the file in a state directory. A missing file is the zero value, also where there can be none.
func Read(stateDir string) (File, error) {
	path := filepath.Join(stateDir, FileName)
	text, err := statefile.Read(path, maxSize+statefile.SealBytes, statefile.SharedDir)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return File{}, nil
	case err != nil:
		return File{}, err
	}
	f, err := Decode(text)
	if err != nil {
		return File{}, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

// Write replaces the file in a state directory. The caller holds the lock of the devices: see Change.
func Write(stateDir string, f File) error {
	text, err := f.Encode()
	if err != nil {
		return err
	}
	return statefile.Write(filepath.Join(stateDir, FileName), text)
}

// Needs reports whether a GPU is or may come to an API by the file in a state directory: then the agent must serve that API, whatever
// its configuration is. A file that can't be read needs every API.
func Needs(stateDir string, a inventory.API) bool {
	f, err := Read(stateDir)
	if err != nil {
		return true
	}
	for _, e := range f.GPUs {
		if e.Target == a {
			return true
		}
	}
	return f.Has(a)
}

// Has reports whether an API has a GPU, or was the last of its agent that did.
func (f File) Has(a inventory.API) bool {
	for _, e := range f.GPUs {
		if e.Owner == a {
			return true
		}
	}
	for _, apis := range f.LocalAPIs {
		if slices.Contains(slices.Collect(maps.Values(apis)), a) {
			return true
		}
	}
	return false
}
