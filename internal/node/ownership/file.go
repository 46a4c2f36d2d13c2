package ownership

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// FileName is the name of the file in the state directory that the agents of a host share.
const FileName = "assignments.json"

// Names of the agents.
const (
	KubernetesAgent = "k8s-gpu"
	NomadAgent      = "nomad-gpu"
)

// AgentOf returns the agent that offers devices through an API; "" for another value.
func AgentOf(a inventory.API) string {
	switch a {
	case inventory.DevicePlugin, inventory.DRA:
		return KubernetesAgent
	case inventory.Nomad:
		return NomadAgent
	}
	return ""
}

// APIs are all APIs, in the order in which they are shown.
func APIs() []inventory.API {
	return []inventory.API{inventory.DevicePlugin, inventory.DRA, inventory.Nomad}
}

// DefaultSettle is for how long a side must have had no holder before it gives a GPU up. Nothing is given out in that time, so it only
// serves work that was placed on the GPU before its orchestrator knew that it takes none: the kubelet reports the number of devices
// every 10 s, the taint of a device reaches the scheduler in about a second, a Nomad client sends its devices within some seconds. What
// an agent gives out until then holds the GPU; later the orchestrator would find another API there, and the pod or task would fail.
const DefaultSettle = 30 * time.Second

// Entry is the assignment of a GPU with a target.
type Entry struct {
	Target inventory.API
	Side   inventory.API // that has the GPU now; "" = no agent has recorded it so far
	Turn   uint64        // number of changes of Side
	Change uint64        // of Target: a later one is greater, also if this file was lost in between; see WithTargets
	Settle time.Duration // 0 = DefaultSettle
	Force  bool          // what can't be known about holders counts as none

	Without string // agent that force does without, as it has not run for the settle time; "" = none, or it runs again
}

// File is the content of the file. It is immutable: With... methods return another one. The zero value assigns nothing.
type File struct {
	GPUs     map[gpu.DeviceID]Entry                    // with a target
	Inner    map[string]map[gpu.DeviceID]inventory.API // by agent: which of its APIs has a GPU without an entry
	Previous map[gpu.DeviceID]inventory.API            // targets before the latest change of targets
}

// Empty reports whether the file assigns nothing.
func (f File) Empty() bool { return len(f.GPUs) == 0 && len(f.Inner) == 0 }

// Equal reports whether two files have the same content.
func (f File) Equal(g File) bool {
	return maps.Equal(f.GPUs, g.GPUs) && maps.EqualFunc(f.Inner, g.Inner, maps.Equal) && maps.Equal(f.Previous, g.Previous)
}

// clone returns a copy whose maps can be changed.
func (f File) clone() File {
	next := File{GPUs: map[gpu.DeviceID]Entry{}, Inner: map[string]map[gpu.DeviceID]inventory.API{}, Previous: maps.Clone(f.Previous)}
	maps.Copy(next.GPUs, f.GPUs)
	for agent, apis := range f.Inner {
		next.Inner[agent] = maps.Clone(apis)
	}
	return next
}

// Change is a new target of a GPU.
type Change struct {
	GPU    gpu.DeviceID
	Target inventory.API
	From   inventory.API // where the GPU is, which WithTargets(Back()) restores; "" = its former target
	Settle time.Duration // 0 = DefaultSettle
	Force  bool
}

// WithTargets returns the file with new targets, and with the former ones as Previous. Their Change is the time in milliseconds, and in any
// case greater than that of the former target: the file may have been removed just before, and an agent that remembers the former target
// must not take that for the later one.
func (f File) WithTargets(changes []Change, now time.Time) File {
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
		e.Target, e.Settle, e.Force, e.Without = c.Target, c.Settle, c.Force, ""
		e.Change = min(max(e.Change+1, uint64(max(now.UnixMilli(), 0))), maxTurns)
		next.GPUs[c.GPU] = e
	}
	return next
}

// Back returns the changes that restore the targets before the latest change.
func (f File) Back() []Change {
	var changes []Change
	for _, id := range slices.Sorted(maps.Keys(f.Previous)) {
		changes = append(changes, Change{GPU: id, Target: f.Previous[id], Settle: f.GPUs[id].Settle})
	}
	return changes
}

// Restore returns f, which was read, with what an agent remembers and f lacks, because the file may have been removed or replaced by an
// older one: entries, and later changes of a target or a side. Which API of the agent itself has a GPU only that agent changes.
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
			case was.Change > is.Change:
				is.Target, is.Change, is.Settle, is.Force, is.Without = was.Target, was.Change, was.Settle, was.Force, was.Without
			case was.Change == is.Change: // force may have ended since then, and never begins
				if is.Force = is.Force && was.Force; is.Without != was.Without {
					is.Without = ""
				}
			}
			if was.Turn > is.Turn {
				is.Side, is.Turn = was.Side, was.Turn
			}
			next.GPUs[id] = is
		}
	}
	for of, apis := range remembered.Inner {
		if _, ok := next.Inner[of]; of == agent || !ok {
			next.Inner[of] = maps.Clone(apis)
		}
	}
	if next.Equal(f) {
		return f
	}
	return next
}

const (
	version  = 1
	maxSize  = 1 << 20 // bytes
	maxTurns = 1 << 53 // integers up to here are exact in every JSON reader
)

type jsonFile struct {
	Version  int                                       `json:"version"`
	GPUs     map[gpu.DeviceID]jsonEntry                `json:"gpus"`
	Inner    map[string]map[gpu.DeviceID]inventory.API `json:"inner,omitempty"`
	Previous map[gpu.DeviceID]inventory.API            `json:"previous,omitempty"`
}

type jsonEntry struct {
	Target inventory.API `json:"target"`
	Side   inventory.API `json:"side,omitempty"`
	Turn   uint64        `json:"turn,omitempty"`
	Change uint64        `json:"change,omitempty"`
	Settle string        `json:"settle,omitempty"`
	Force  bool          `json:"force,omitempty"`

	Without string `json:"without,omitempty"`
}

// Encode returns the text of the file.
func (f File) Encode() ([]byte, error) {
	j := jsonFile{Version: version, GPUs: map[gpu.DeviceID]jsonEntry{}, Inner: f.Inner, Previous: f.Previous}
	for id, e := range f.GPUs {
		one := jsonEntry{Target: e.Target, Side: e.Side, Turn: e.Turn, Change: e.Change, Force: e.Force, Without: e.Without}
		if e.Settle > 0 {
			one.Settle = e.Settle.String()
		}
		j.GPUs[id] = one
	}
	text, err := json.MarshalIndent(j, "", "  ")
	return append(text, '\n'), err
}

// ErrFormat is wrapped by the errors of a file that is not one of assignments. Its content is not known.
var ErrFormat = errors.New("not a file of assignments")

var gpuNames = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

func isGPU(id gpu.DeviceID) bool { return len(id) <= 128 && gpuNames.MatchString(string(id)) }

// Decode returns the content of a text. It is valid as a whole, or an error.
func Decode(text []byte) (File, error) {
	var j jsonFile
	if err := json.Unmarshal(text, &j); err != nil {
		return File{}, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if j.Version != version {
		return File{}, fmt.Errorf("%w of version %d, but of version %d", ErrFormat, version, j.Version)
	}
	f := File{Inner: j.Inner, Previous: j.Previous}.clone()
	for id, one := range j.GPUs {
		e := Entry{Target: one.Target, Side: one.Side, Turn: one.Turn, Change: one.Change, Force: one.Force, Without: one.Without}
		var err error
		if one.Settle != "" {
			e.Settle, err = time.ParseDuration(one.Settle)
		}
		if err != nil || e.Settle < 0 || !isGPU(id) || !isAPI(e.Target) || e.Side != "" && !isAPI(e.Side) || max(e.Turn, e.Change) > maxTurns || !slices.Contains([]string{"", KubernetesAgent, NomadAgent}, e.Without) {
			return File{}, fmt.Errorf("%w: %.80q: %+v", ErrFormat, id, one)
		}
		f.GPUs[id] = e
	}
	for _, apis := range append(slices.Collect(maps.Values(j.Inner)), j.Previous) {
		for id, a := range apis {
			if !isGPU(id) || !isAPI(a) {
				return File{}, fmt.Errorf("%w: %.80q: %.80q", ErrFormat, id, a)
			}
		}
	}
	return f, nil
}

func isAPI(a inventory.API) bool { return slices.Contains(APIs(), a) }

// Read reads the file in a state directory. A missing file is the zero value, also where there can be none.
func Read(stateDir string) (File, error) {
	path := filepath.Join(stateDir, FileName)
	text, err := statefile.Read(path, maxSize, statefile.SharedDir)
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

// Write replaces the file in a state directory. The caller holds the lock of the claims: see ChangeAssignments.
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

// Has reports whether a GPU is on the side of an API, or was there last for its agent.
func (f File) Has(a inventory.API) bool {
	for _, e := range f.GPUs {
		if e.Side == a {
			return true
		}
	}
	for _, apis := range f.Inner {
		if slices.Contains(slices.Collect(maps.Values(apis)), a) {
			return true
		}
	}
	return false
}
