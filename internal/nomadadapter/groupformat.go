package nomadadapter

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
)

// groupsVersion is that of the file's format. A change that an older plugin would misread needs another.
const groupsVersion = 1

// groupsText is the file of announced names.
type groupsText struct {
	Version int         `json:"version"`
	Boot    string      `json:"boot"` // the machine's boot id when it was written; "" = unknown
	Places  []placeText `json:"places"`
	Names   []nameText  `json:"names"`
}

// placeText is the place of a GPU under one way to group.
type placeText struct {
	By        GroupBy       `json:"by"`
	GPU       core.DeviceID `json:"gpu"`
	Place     place         `json:"place"`     // "" = none
	Announced bool          `json:"announced"` // since that boot; else it is from before
	Boots     int           `json:"boots"`     // see earlierPlace
}

// nameText is the name of a kind.
type nameText struct {
	Type   string `json:"type"`
	Name   string `json:"name"`
	Pool   string `json:"pool"`
	Place  place  `json:"place"`
	Model  string `json:"model"`
	Memory uint64 `json:"memory_mib"`
	Major  int    `json:"compute_major"`
	Minor  int    `json:"compute_minor"`
	Boots  int    `json:"boots"` // since one of the kind was seen
}

func (t nameText) kind() groupKey {
	return groupKey{groupType: t.Type, pool: t.Pool, place: t.Place, model: t.Model, memory: t.Memory, compute: core.Compute{Major: t.Major, Minor: t.Minor}}
}

// encodeGroups puts all that a naming remembers into the words of the file. Equal namings give equal texts.
func encodeGroups(n assignment, boot string) ([]byte, error) {
	t := groupsText{Version: groupsVersion, Boot: boot, Places: []placeText{}, Names: []nameText{}}
	for s, where := range n.topology {
		t.Places = append(t.Places, placeText{By: s.by, GPU: s.gpu, Place: where, Announced: true, Boots: n.previous.topology[s].boots})
	}
	for s, e := range n.previous.topology {
		if _, announced := n.topology[s]; !announced {
			t.Places = append(t.Places, placeText{By: s.by, GPU: s.gpu, Place: e.place, Boots: e.boots})
		}
	}
	for k, name := range n.names {
		t.Names = append(t.Names, nameText{
			Type: k.groupType, Name: name, Pool: k.pool, Place: k.place, Model: k.model,
			Memory: k.memory, Major: k.compute.Major, Minor: k.compute.Minor, Boots: n.previous.names[k],
		})
	}
	slices.SortFunc(t.Places, func(a, b placeText) int {
		return cmp.Or(cmp.Compare(a.By, b.By), cmp.Compare(a.GPU, b.GPU))
	})
	slices.SortFunc(t.Names, func(a, b nameText) int {
		return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Name, b.Name))
	})
	text, err := json.MarshalIndent(t, "", "\t")
	return append(text, '\n'), err
}

// decodeGroups reads what encodeGroups wrote, on a machine with this boot id, and returns the id that is in the text.
// Where either is unknown the machine has not booted: not to know is no sign of it. After a boot nothing counts as
// announced: tasks do not run on, so a GPU may come to where its links show it to be. What was not seen for too many
// boots is left out.
func decodeGroups(text []byte, boot string) (assignment, string, error) {
	var t groupsText
	// The version first: what another one looks like is unknown.
	if err := json.Unmarshal(text, &struct{ Version *int }{&t.Version}); err != nil {
		return assignment{}, "", err
	}
	if t.Version != groupsVersion {
		return assignment{}, "", fmt.Errorf("format version %d, this plugin knows %d", t.Version, groupsVersion)
	}
	if err := json.Unmarshal(text, &t); err != nil {
		return assignment{}, "", err
	}
	booted := 0
	if t.Boot != "" && boot != "" && t.Boot != boot {
		booted = 1
	}
	n := assignment{topology: places{}, names: groupNames{}, previous: previous{map[seat]earlierPlace{}, map[groupKey]int{}}}
	for _, p := range t.Places {
		if err := n.addPlace(p, booted); err != nil {
			return assignment{}, "", err
		}
	}
	for _, name := range t.Names {
		if err := n.addName(name, booted); err != nil {
			return assignment{}, "", err
		}
	}
	return n, t.Boot, nil
}

// addPlace refuses what encodeGroups never writes. The maps are n's own.
func (n assignment) addPlace(t placeText, booted int) error {
	s := seat{t.By, t.GPU}
	_, announced := n.topology[s]
	_, known := n.previous.topology[s]
	if t.By != GroupByNUMA && t.By != GroupByNVLink || t.GPU == "" || t.Boots < 0 || announced || known {
		return fmt.Errorf("the place of %q by %q is not understood", t.GPU, t.By)
	}
	if t.Announced && booted == 0 {
		n.topology[s] = t.Place
	}
	if boots := t.Boots + booted; boots > 0 && boots <= forgetAfter && t.Place != "" {
		n.previous.topology[s] = earlierPlace{t.Place, boots}
	}
	return nil
}

// addName refuses what encodeGroups never writes: two groups of one name would be one group to Nomad.
func (n assignment) addName(t nameText, booted int) error {
	k := t.kind()
	known := slices.Contains([]string{typeExclusive, typeTimeSlicing, typeMPS}, t.Type)
	if !known || t.Name == "" || t.Boots < 0 || n.names[k] != "" || n.names.taken(t.Type, t.Name) {
		return fmt.Errorf("the name %q of type %q is not understood", t.Name, t.Type)
	}
	if boots := t.Boots + booted; boots <= forgetAfter {
		n.names[k], n.previous.names[k] = t.Name, boots
	}
	return nil
}
