package nomadadapter

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

const (
	groupFileName = "nomad-gpu.groups.json" // in the state directory

	// maxGroupFile bounds the bytes that are read. maxNames names and topology groups, with long names, need half of it.
	maxGroupFile = 1 << 20

	// groupFileVersion is the version of the format. It changes if an older plugin would misread the file.
	groupFileVersion = 2
)

// groupFile is the file of announced group names. Its methods block as long as the disk does; one goroutine calls them.
type groupFile struct {
	path string
	boot string                            // the node's boot ID; "" = unknown
	read func(path string) ([]byte, error) // readGroupFile, but in tests
	log  *slog.Logger
}

// load returns the content of the file, and its text; nothing if there is no file. An invalid file is renamed, so that a
// new one can be written. A file that can't be read is not changed, and is the error.
func (f *groupFile) load() (assignment, []byte, error) {
	text, err := f.read(f.path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return assignment{}, nil, nil
	}
	if err != nil && !statefile.IsContent(err) {
		return assignment{}, nil, err
	}
	if err == nil {
		var saved assignment
		var boot string
		if saved, boot, err = decodeGroups(text, f.boot); err == nil {
			f.boot = cmp.Or(f.boot, boot)
			return saved, text, nil
		}
	}
	renamed, failed := statefile.SetAside(f.path, "broken")
	if failed != nil {
		return assignment{}, nil, errors.Join(err, failed)
	}
	f.log.Warn("invalid group name file, renamed; groups may get other names", "file", renamed, "error", err)
	return assignment{}, nil, nil
}

// save replaces the file, unless it would be equal to previous, its present text. It is on disk when save returns.
func (f *groupFile) save(a assignment, previous []byte) error {
	text, err := encodeGroups(a, f.boot)
	if err != nil || bytes.Equal(text, previous) {
		return err
	}
	return statefile.Write(f.path, text)
}

func readGroupFile(path string) ([]byte, error) { return statefile.Read(path, maxGroupFile, 0) }

// groupFileText is the content of the file.
type groupFileText struct {
	Version  int            `json:"version"`
	Boot     string         `json:"boot"` // the node's boot ID when it was written; "" = unknown
	Topology []topologyText `json:"topology"`
	Names    []nameText     `json:"names"`
}

// topologyText is the topology group of a GPU under one value of group_by.
type topologyText struct {
	By        config.GroupBy `json:"by"`
	GPU       gpu.DeviceID   `json:"gpu"`
	Group     topologyGroup  `json:"group"`     // "" = none
	Announced bool           `json:"announced"` // in that boot; else before
	Boots     int            `json:"boots"`     // see previousTopology
}

// nameText is the name of a group.
type nameText struct {
	Type     string        `json:"type"`
	Name     string        `json:"name"`
	Pool     string        `json:"pool"`
	Topology topologyGroup `json:"topology"`
	Model    string        `json:"model"`
	Memory   uint64        `json:"memory_mib"`
	Major    int           `json:"compute_major"`
	Minor    int           `json:"compute_minor"`
	Boots    int           `json:"boots"` // see previous
}

func (t nameText) key() groupKey {
	return groupKey{groupType: t.Type, pool: t.Pool, topology: t.Topology, model: t.Model, memory: t.Memory, compute: gpu.Compute{Major: t.Major, Minor: t.Minor}}
}

// encodeGroups returns the text of the file. Equal assignments give equal texts.
func encodeGroups(a assignment, boot string) ([]byte, error) {
	t := groupFileText{Version: groupFileVersion, Boot: boot, Topology: []topologyText{}, Names: []nameText{}}
	for k, g := range a.topology {
		t.Topology = append(t.Topology, topologyText{By: k.by, GPU: k.device, Group: g, Announced: true, Boots: a.previous.topology[k].boots})
	}
	for k, p := range a.previous.topology {
		if _, announced := a.topology[k]; !announced {
			t.Topology = append(t.Topology, topologyText{By: k.by, GPU: k.device, Group: p.group, Boots: p.boots})
		}
	}
	for k, name := range a.names {
		t.Names = append(t.Names, nameText{
			Type: k.groupType, Name: name, Pool: k.pool, Topology: k.topology, Model: k.model,
			Memory: k.memory, Major: k.compute.Major, Minor: k.compute.Minor, Boots: a.previous.names[k],
		})
	}
	slices.SortFunc(t.Topology, func(a, b topologyText) int {
		return cmp.Or(cmp.Compare(a.By, b.By), cmp.Compare(a.GPU, b.GPU))
	})
	slices.SortFunc(t.Names, func(a, b nameText) int {
		return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Name, b.Name))
	})
	text, err := json.MarshalIndent(t, "", "\t")
	return append(text, '\n'), err
}

// decodeGroups parses the text of the file on a node with this boot ID, and returns the boot ID in the text. The node has
// booted in between if both are known and differ. After a boot no topology group counts as announced: no task runs any
// more, so a GPU may be assigned by its present links. Entries that were unused for too many boots are left out.
func decodeGroups(text []byte, boot string) (assignment, string, error) {
	var t groupFileText
	// The version first: other versions may have another structure.
	if err := json.Unmarshal(text, &struct{ Version *int }{&t.Version}); err != nil {
		return assignment{}, "", err
	}
	if t.Version != groupFileVersion {
		return assignment{}, "", fmt.Errorf("format version %d, want %d", t.Version, groupFileVersion)
	}
	if err := json.Unmarshal(text, &t); err != nil {
		return assignment{}, "", err
	}
	booted := 0
	if t.Boot != "" && boot != "" && t.Boot != boot {
		booted = 1
	}
	a := assignment{topology: topologyGroups{}, names: groupNames{}, previous: previous{map[topologyKey]previousTopology{}, map[groupKey]int{}}}
	for _, entry := range t.Topology {
		if err := a.addTopology(entry, booted); err != nil {
			return assignment{}, "", err
		}
	}
	for _, entry := range t.Names {
		if err := a.addName(entry, booted); err != nil {
			return assignment{}, "", err
		}
	}
	return a, t.Boot, nil
}

// addTopology adds an entry of the file to the maps of a. Entries that encodeGroups does not write are errors.
func (a assignment) addTopology(t topologyText, booted int) error {
	k := topologyKey{t.By, t.GPU}
	_, announced := a.topology[k]
	_, known := a.previous.topology[k]
	if t.By != config.GroupByNUMA && t.By != config.GroupByNVLink || t.GPU == "" || t.Boots < 0 || announced || known {
		return fmt.Errorf("invalid or duplicate topology group of gpu %q by %q", t.GPU, t.By)
	}
	if t.Announced && booted == 0 {
		a.topology[k] = t.Group
	}
	if boots := t.Boots + booted; boots > 0 && boots <= unusedBoots && t.Group != "" {
		a.previous.topology[k] = previousTopology{t.Group, boots}
	}
	return nil
}

// addName adds an entry of the file to the maps of a. Entries that encodeGroups does not write are errors: Nomad takes
// two groups with one name for one group.
func (a assignment) addName(t nameText, booted int) error {
	k := t.key()
	known := slices.Contains([]string{typeExclusive, typeTimeSlicing, typeMPS}, t.Type)
	if !known || t.Name == "" || t.Boots < 0 || a.names[k] != "" || a.names.taken(t.Type, t.Name) {
		return fmt.Errorf("invalid or duplicate name %q of type %q", t.Name, t.Type)
	}
	if boots := t.Boots + booted; boots <= unusedBoots {
		a.names[k], a.previous.names[k] = t.Name, boots
	}
	return nil
}
