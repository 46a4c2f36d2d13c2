package ownership

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// The format of <agent>.json. What an agent offers whose file has another version is not known: see store.read.
const (
	maxDevices = 4096
)

// device is hardware that an agent offers, as it is recorded in its file.
type device struct {
	at    gpu.Placement
	order uint64    // position in which devices were first recorded on this node
	since time.Time // the time of that, for operators
}

// agentFile is the file of one agent.
type agentFile struct {
	agent   string
	boot    string // boot_id of the node (random(4)); "" = unknown
	started time.Time
	devices []device // by placement

	numbering inventory.Numbering // of devices, for policies that select by index

	// unknown reports whether the agent may offer a GPU that is not in devices, because its file can't be used. nil = it offers no other.
	unknown func(gpu.DeviceID) bool
}

// mayOffer reports whether it is not known whether the agent offers a GPU.
func (f agentFile) mayOffer(id gpu.DeviceID) bool { return f.unknown != nil && f.unknown(id) }

func (f agentFile) equal(o agentFile) bool {
	return f.agent == o.agent && f.boot == o.boot && f.started.Equal(o.started) && f.numbering.Equal(o.numbering) &&
		slices.EqualFunc(f.devices, o.devices, func(c, d device) bool {
			return c.at == d.at && c.order == d.order && c.since.Equal(d.since)
		})
}

// jsonAgent is an agentFile as JSON. GI and CI are left out where the whole GPU or GPU instance is offered.
type jsonAgent struct {
	Version int          `json:"version"`
	Agent   string       `json:"agent"`
	Boot    string       `json:"bootID"`
	Started time.Time    `json:"started"`
	Devices []jsonDevice `json:"devices"`

	Generation int          `json:"generation,omitempty"` // of the numbers
	Numbers    []jsonNumber `json:"numbers,omitempty"`
}

type jsonDevice struct {
	GPU   gpu.DeviceID `json:"gpu"`
	GI    *uint32      `json:"gi,omitempty"`
	CI    *uint32      `json:"ci,omitempty"`
	Order uint64       `json:"order"`
	Since time.Time    `json:"since"`
}

// jsonNumber is the number by which policies select a GPU or a MIG instance.
type jsonNumber struct {
	ID       gpu.DeviceID `json:"id"`
	GPU      int          `json:"gpu"`
	Instance *int         `json:"instance,omitempty"`
}

func (f agentFile) encode() ([]byte, error) {
	j := jsonAgent{Version: version, Agent: f.agent, Boot: f.boot, Started: f.started, Devices: []jsonDevice{}}
	for _, c := range f.devices {
		j.Devices = append(j.Devices, jsonDevice{GPU: c.at.GPU, GI: unlessWhole(c.at.GI), CI: unlessWhole(c.at.CI), Order: c.order, Since: c.since})
	}
	j.Generation = f.numbering.Generation
	for _, n := range f.numbering.Numbers {
		number := jsonNumber{ID: n.ID, GPU: n.Index.GPU}
		if n.Index.Instance >= 0 {
			number.Instance = new(n.Index.Instance)
		}
		j.Numbers = append(j.Numbers, number)
	}
	text, err := json.MarshalIndent(j, "", "  ")
	return statefile.Seal(text), err
}

func unlessWhole(id uint32) *uint32 {
	if id == gpu.Whole {
		return nil
	}
	return &id
}

func orWhole(id *uint32) uint32 {
	if id == nil {
		return gpu.Whole
	}
	return *id
}

// Names of agents and devices come from other processes and are used in logs and file names. A limit of the length in the
// expression would take 60 kB for as long as the process runs.
var (
	agentNames  = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)
	deviceNames = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)
)

func isAgentName(s string) bool { return len(s) <= 63 && agentNames.MatchString(s) }

func isDeviceName(id gpu.DeviceID) bool { return len(id) <= 128 && deviceNames.MatchString(string(id)) }

var errFormat = errors.New("not the file of an agent")

// decode decodes the file of an agent. It is valid as a whole, or an error.
func decode(text []byte, agent string) (agentFile, error) {
	var j jsonAgent
	text, err := statefile.Unseal(text)
	if err == nil {
		err = json.Unmarshal(text, &j)
	}
	if err != nil {
		return agentFile{}, fmt.Errorf("%w: %w", errFormat, err)
	}
	switch {
	case j.Version != version:
		return agentFile{}, fmt.Errorf("%w of version %d, but of version %d", errFormat, version, j.Version)
	case j.Agent != agent:
		return agentFile{}, fmt.Errorf("%w %s, but of %.80q", errFormat, agent, j.Agent)
	case len(j.Devices) > maxDevices:
		return agentFile{}, fmt.Errorf("%w: %d devices, at most %d are read", errFormat, len(j.Devices), maxDevices)
	}
	f := agentFile{agent: agent, boot: j.Boot, started: j.Started}
	for _, c := range j.Devices {
		at := gpu.Placement{GPU: c.GPU, GI: orWhole(c.GI), CI: orWhole(c.CI)}
		if !isDeviceName(c.GPU) || at.GI == gpu.Whole && at.CI != gpu.Whole || c.Order > maxOrder {
			return agentFile{}, fmt.Errorf("%w: %.80q, order %d", errFormat, c.GPU, c.Order)
		}
		f.devices = append(f.devices, device{at: at, order: c.Order, since: c.Since})
	}
	f.devices = normalized(f.devices)
	f.numbering, err = j.numbering()
	return f, err
}

// numbering decodes the numbers of devices.
func (j jsonAgent) numbering() (inventory.Numbering, error) {
	if len(j.Numbers) > maxDevices || j.Generation < 0 {
		return inventory.Numbering{}, fmt.Errorf("%w: %d numbers, at most %d are read; generation %d", errFormat, len(j.Numbers), maxDevices, j.Generation)
	}
	var numbers []inventory.Number
	for _, n := range j.Numbers {
		at := gpu.DeviceIndex{GPU: n.GPU, Instance: -1}
		if n.Instance != nil {
			at.Instance = *n.Instance
		}
		if !isDeviceName(n.ID) || at.GPU < 0 || n.Instance != nil && at.Instance < 0 {
			return inventory.Numbering{}, fmt.Errorf("%w: %.80q has number %d:%d", errFormat, n.ID, at.GPU, at.Instance)
		}
		numbers = append(numbers, inventory.Number{ID: n.ID, Index: at})
	}
	return inventory.NewNumbering(j.Generation, numbers), nil
}

// normalized are devices by placement, each placement once: in its first order.
func normalized(all []device) []device {
	all = slices.SortedFunc(slices.Values(all), func(a, b device) int {
		return cmp.Or(comparePlacements(a.at, b.at), cmp.Compare(a.order, b.order))
	})
	return slices.CompactFunc(all, func(a, b device) bool { return a.at == b.at })
}

func comparePlacements(a, b gpu.Placement) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI+1, b.GI+1), cmp.Compare(a.CI+1, b.CI+1)) // gpu.Whole first
}
