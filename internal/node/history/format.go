package history

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// version is that of the format. A change that an older agent would misread needs another.
const version = 2

// envelope is the file.
type envelope struct {
	Version int
	Agent   string
	Record  core.Checkpoint
}

// rawEnvelope is an envelope whose parts are decoded one by one, so that an invalid part does not invalidate the
// others.
type rawEnvelope struct {
	Version int
	Agent   string
	Record  map[string]json.RawMessage // by the name of the field of core.Checkpoint
}

func encode(r core.Checkpoint, agent string) ([]byte, error) {
	text, err := json.MarshalIndent(envelope{version, agent, r}, "", "\t")
	return append(text, '\n'), err
}

// decoded is what could be read of a file.
type decoded struct {
	record  core.Checkpoint
	skipped []error // an error for each part that could not be used

	// Faults that are not in record: those of single GPUs, by the GPU; or of GPUs that are not known.
	faults    map[gpu.DeviceID]string
	anyFaults bool
}

func (d *decoded) skip(what string, err error) {
	d.skipped = append(d.skipped, fmt.Errorf("%s: %w", what, err))
}

// decode returns what can be used of a file. It fails if that is nothing.
//
// A later format is read like this one. Then the faults are known only if the record has no part that this version
// does not know: the part may have some of them.
func decode(text []byte, agent string) (decoded, error) {
	var e rawEnvelope
	// The version first: an earlier format has other names.
	if err := json.Unmarshal(text, &struct{ Version *int }{&e.Version}); err != nil {
		return decoded{}, err
	}
	if e.Version < version {
		return decoded{}, fmt.Errorf("format version %d, this agent knows %d", e.Version, version)
	}
	if err := json.Unmarshal(text, &e); err != nil {
		return decoded{}, err
	}
	if e.Agent != agent {
		return decoded{}, fmt.Errorf("the history of %q, not of %s", e.Agent, agent)
	}
	var d decoded
	if e.Version > version {
		err := fmt.Errorf("format version %d, this agent knows %d and reads what it knows", e.Version, version)
		d.skipped = append(d.skipped, err)
		for _, name := range unknownParts(e.Record) {
			d.skipped, d.anyFaults = append(d.skipped, fmt.Errorf("%s is not known to this version", name)), true
		}
	}
	d.readParts(e.Record)
	d.readConditions(e.Record["Conditions"])
	d.readGPUs(e.Record["GPUs"])
	return d, nil
}

// unknownParts returns the names of a record that this version does not know, sorted.
func unknownParts(parts map[string]json.RawMessage) []string {
	fields := reflect.TypeFor[core.Checkpoint]()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(parts)), func(name string) bool {
		_, known := fields.FieldByName(name)
		return known
	})
}

// readParts decodes all parts but the conditions and the histories of GPUs.
func (d *decoded) readParts(parts map[string]json.RawMessage) {
	r := &d.record
	for _, part := range []struct {
		name string
		into any
	}{
		{"BootID", &r.BootID}, {"BootTime", &r.BootTime}, {"NotReadSinceBoot", &r.NotReadSinceBoot}, {"Driver", &r.Driver},
		{"Maintenance", &r.Maintenance}, {"Binding", &r.Binding}, {"KernelLog", &r.KernelLog},
		{"UnconfirmedGPUs", &r.UnconfirmedGPUs}, {"FaultsUnknown", &r.FaultsUnknown},
	} {
		d.readPart(part.name, parts[part.name], part.into)
	}
	known := map[gpu.DeviceID]bool{}
	r.Devices = decodeAll(d, "Devices", parts["Devices"], func(text []byte) (gpu.Device, error) {
		device, err := decodeDevice(text)
		if err == nil && known[device.ID] {
			err = fmt.Errorf("%s is there twice", device.ID)
		}
		known[device.ID] = true
		return device, err
	})
	r.Links = decodeAll(d, "Links", parts["Links"], func(text []byte) (l gpu.Link, err error) {
		err = json.Unmarshal(text, &l)
		return l, err
	})
}

// readPart decodes a part that may be missing. One that is valid in part does not count.
func (d *decoded) readPart(name string, text json.RawMessage, into any) (ok bool) {
	if text == nil {
		return true
	}
	if err := json.Unmarshal(text, into); err != nil {
		d.skip(name, err)
		reflect.ValueOf(into).Elem().SetZero()
		return false
	}
	return true
}

// readConditions decodes the conditions. One that this version does not know is a fault that is not known.
func (d *decoded) readConditions(text json.RawMessage) {
	var all []json.RawMessage
	if text == nil {
		d.skip("Conditions", errors.New("missing"))
		d.anyFaults = true
	}
	if !d.readPart("Conditions", text, &all) {
		d.anyFaults = true
	}
	for i, text := range all {
		c, err := decodeCondition(text)
		if err == nil {
			d.record.Conditions = append(d.record.Conditions, c)
			continue
		}
		d.skip(fmt.Sprintf("condition %d", i), err)
		var known struct{ At struct{ GPU gpu.DeviceID } }
		if json.Unmarshal(text, &known) != nil || known.At.GPU == "" {
			d.anyFaults = true
			continue
		}
		if d.faults == nil {
			d.faults = map[gpu.DeviceID]string{}
		}
		d.faults[known.At.GPU] = "the history has a condition that can't be read"
	}
}

// readGPUs decodes the histories of the GPUs.
func (d *decoded) readGPUs(text json.RawMessage) {
	var all map[gpu.DeviceID]json.RawMessage
	d.readPart("GPUs", text, &all)
	if all != nil {
		d.record.GPUs = make(map[gpu.DeviceID]health.GPUHistory, len(all))
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		var history health.GPUHistory
		if d.readPart("history of "+string(id), all[id], &history) {
			d.record.GPUs[id] = history
		}
	}
}

// bootOf returns the boot ID in a file that may have been cut: it is near the beginning. "" = not found.
func bootOf(text []byte) (id string) {
	tokens := json.NewDecoder(bytes.NewReader(text))
	for last := json.Token(nil); ; {
		token, err := tokens.Token()
		if err != nil {
			return ""
		}
		if id, ok := token.(string); ok && last == "BootID" {
			return id
		}
		last = token
	}
}

// decodeAll decodes the valid elements of a list.
func decodeAll[T any](d *decoded, name string, list json.RawMessage, decode func([]byte) (T, error)) (all []T) {
	var texts []json.RawMessage
	d.readPart(name, list, &texts)
	for i, text := range texts {
		v, err := decode(text)
		if err != nil {
			d.skip(fmt.Sprintf("%s %d", name, i), err)
			continue
		}
		all = append(all, v)
	}
	return all
}

func decodeDevice(text []byte) (d gpu.Device, err error) {
	if err := json.Unmarshal(text, &d); err != nil {
		return d, err
	}
	if d.ID == "" || d.At.GPU == "" {
		return d, fmt.Errorf("no UUID")
	}
	return d, nil
}

// decodeCondition refuses what the core would never have written and could not format.
func decodeCondition(text []byte) (c health.Condition, err error) {
	if err := json.Unmarshal(text, &c); err != nil {
		return c, err
	}
	switch {
	case c.At.GPU == "":
		return c, fmt.Errorf("no GPU")
	case c.Reason == health.ReasonNone:
		return c, fmt.Errorf("no reason")
	case c.Reason == health.ReasonRecoveryAction && c.Code > uint64(health.RecoveryOther):
		return c, fmt.Errorf("no recovery action %d", c.Code)
	}
	return c, nil
}
