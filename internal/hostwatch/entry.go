package hostwatch

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// The format of <agent>.json. A file of another version is ignored, as what it says can't be known.
const (
	version   = 1
	maxSize   = 1 << 20 // bytes; 16 GPUs of 7 instances need 20 KiB
	maxClaims = 4096
	maxTurn   = 1 << 53 // what every JSON reader has exactly
)

// claim is hardware that an agent offers.
type claim struct {
	at    core.Placement
	turn  uint64    // when it was first claimed, in the order in which claims were made on this host
	since time.Time // the same by the clock, for people
}

// entry is what one agent has written down.
type entry struct {
	agent   string
	boot    string // of the machine: random(4), boot_id; "" = unknown
	started time.Time
	claims  []claim // by placement

	numbering core.Numbering // of devices, for policies that select by index
}

// same reports whether two entries say the same.
func (e entry) same(o entry) bool {
	return e.agent == o.agent && e.boot == o.boot && e.started.Equal(o.started) && e.numbering.Equal(o.numbering) &&
		slices.EqualFunc(e.claims, o.claims, func(c, d claim) bool {
			return c.at == d.at && c.turn == d.turn && c.since.Equal(d.since)
		})
}

// file is an entry as JSON. GI and CI are left out where all of it is meant.
type file struct {
	Version int         `json:"version"`
	Agent   string      `json:"agent"`
	Boot    string      `json:"boot"`
	Started time.Time   `json:"started"`
	Claims  []fileClaim `json:"claims"`

	Generation int          `json:"generation,omitempty"` // of the numbers
	Numbers    []fileNumber `json:"numbers,omitempty"`
}

// fileNumber is the number by which policies select a GPU, or an instance of one.
type fileNumber struct {
	ID       core.DeviceID `json:"id"`
	GPU      int           `json:"gpu"`
	Instance *int          `json:"instance,omitempty"`
}

type fileClaim struct {
	GPU   core.DeviceID `json:"gpu"`
	GI    *uint32       `json:"gi,omitempty"`
	CI    *uint32       `json:"ci,omitempty"`
	Turn  uint64        `json:"turn"`
	Since time.Time     `json:"since"`
}

func (e entry) encode() ([]byte, error) {
	f := file{Version: version, Agent: e.agent, Boot: e.boot, Started: e.started, Claims: []fileClaim{}}
	for _, c := range e.claims {
		f.Claims = append(f.Claims, fileClaim{GPU: c.at.GPU, GI: part(c.at.GI), CI: part(c.at.CI), Turn: c.turn, Since: c.since})
	}
	f.Generation = e.numbering.Generation
	for _, n := range e.numbering.Numbers {
		number := fileNumber{ID: n.ID, GPU: n.Index.GPU}
		if n.Index.Instance >= 0 {
			number.Instance = new(n.Index.Instance)
		}
		f.Numbers = append(f.Numbers, number)
	}
	text, err := json.MarshalIndent(f, "", "  ")
	return append(text, '\n'), err
}

func part(id uint32) *uint32 {
	if id == core.Whole {
		return nil
	}
	return &id
}

func whole(id *uint32) uint32 {
	if id == nil {
		return core.Whole
	}
	return *id
}

// names of agents and of devices come from others and go into logs and file names.
var (
	agentNames  = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	deviceNames = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$`)
)

var errFormat = errors.New("not a file of claims")

// decode reads the file of an agent. All of it is understood, or none.
func decode(text []byte, agent string) (entry, error) {
	var f file
	if err := json.Unmarshal(text, &f); err != nil {
		return entry{}, fmt.Errorf("%w: %w", errFormat, err)
	}
	switch {
	case f.Version != version:
		return entry{}, fmt.Errorf("%w of version %d, but of version %d", errFormat, version, f.Version)
	case f.Agent != agent:
		return entry{}, fmt.Errorf("%w of %s, but of %.80q", errFormat, agent, f.Agent)
	case len(f.Claims) > maxClaims:
		return entry{}, fmt.Errorf("%w: %d claims, at most %d are read", errFormat, len(f.Claims), maxClaims)
	}
	e := entry{agent: agent, boot: f.Boot, started: f.Started}
	for _, c := range f.Claims {
		at := core.Placement{GPU: c.GPU, GI: whole(c.GI), CI: whole(c.CI)}
		if !deviceNames.MatchString(string(c.GPU)) || at.GI == core.Whole && at.CI != core.Whole || c.Turn > maxTurn {
			return entry{}, fmt.Errorf("%w: %.80q, turn %d", errFormat, c.GPU, c.Turn)
		}
		e.claims = append(e.claims, claim{at: at, turn: c.Turn, since: c.Since})
	}
	e.claims = sorted(e.claims)
	numbering, err := f.numbering()
	e.numbering = numbering
	return e, err
}

// numbering reads the numbers of devices.
func (f file) numbering() (core.Numbering, error) {
	if len(f.Numbers) > maxClaims || f.Generation < 0 {
		return core.Numbering{}, fmt.Errorf("%w: %d numbers, at most %d are read; generation %d", errFormat, len(f.Numbers), maxClaims, f.Generation)
	}
	var numbers []core.Number
	for _, n := range f.Numbers {
		at := core.DeviceIndex{GPU: n.GPU, Instance: -1}
		if n.Instance != nil {
			at.Instance = *n.Instance
		}
		if !deviceNames.MatchString(string(n.ID)) || at.GPU < 0 || n.Instance != nil && at.Instance < 0 {
			return core.Numbering{}, fmt.Errorf("%w: %.80q has number %d:%d", errFormat, n.ID, at.GPU, at.Instance)
		}
		numbers = append(numbers, core.Number{ID: n.ID, Index: at})
	}
	return core.NewNumbering(f.Generation, numbers), nil
}

// sorted are the claims by placement, each placement once: with its first turn.
func sorted(claims []claim) []claim {
	claims = slices.SortedFunc(slices.Values(claims), func(a, b claim) int {
		return cmp.Or(comparePlacements(a.at, b.at), cmp.Compare(a.turn, b.turn))
	})
	return slices.CompactFunc(claims, func(a, b claim) bool { return a.at == b.at })
}

func comparePlacements(a, b core.Placement) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI+1, b.GI+1), cmp.Compare(a.CI+1, b.CI+1)) // the whole first
}
