package history

import (
	"encoding/json"
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

// rawEnvelope is an envelope whose parts are decoded one by one, so that an invalid part does not invalidate the others. Its
// field names are those of the file.
type rawEnvelope struct {
	Version int
	Agent   string
	Record  struct {
		BootID           string
		BootTime         json.RawMessage
		NotReadSinceBoot bool
		UnconfirmedGPUs  json.RawMessage
		Driver           string
		Maintenance      json.RawMessage
		Binding          json.RawMessage
		Devices          []json.RawMessage
		Links            []json.RawMessage
		Conditions       []json.RawMessage
		GPUs             map[gpu.DeviceID]json.RawMessage
		KernelLog        json.RawMessage
	}
}

func encode(r core.Checkpoint, agent string) ([]byte, error) {
	text, err := json.MarshalIndent(envelope{version, agent, r}, "", "\t")
	return append(text, '\n'), err
}

// decode returns the valid parts of a file and an error for each invalid one. It fails if the file as a whole is invalid.
func decode(text []byte, agent string) (r core.Checkpoint, skipped []error, err error) {
	var e rawEnvelope
	// The version first: the rest of another version is unknown.
	if err := json.Unmarshal(text, &struct{ Version *int }{&e.Version}); err != nil {
		return r, nil, err
	}
	if e.Version != version {
		return r, nil, fmt.Errorf("format version %d, this agent knows %d", e.Version, version)
	}
	if err := json.Unmarshal(text, &e); err != nil {
		return r, nil, err
	}
	if e.Agent != agent {
		return r, nil, fmt.Errorf("the history of %q, not of %s", e.Agent, agent)
	}
	skip := func(what string, i any, err error) {
		skipped = append(skipped, fmt.Errorf("%s %v: %w", what, i, err))
	}
	r.BootID, r.Driver = e.Record.BootID, e.Record.Driver
	r.NotReadSinceBoot = e.Record.NotReadSinceBoot
	part := func(what string, text json.RawMessage, into any) {
		if text == nil {
			return
		}
		if err := json.Unmarshal(text, into); err != nil {
			skip(what, "", err)
			reflect.ValueOf(into).Elem().SetZero() // a part that is valid in part does not count
		}
	}
	part("boot time", e.Record.BootTime, &r.BootTime)
	part("maintenance", e.Record.Maintenance, &r.Maintenance)
	part("unconfirmed GPUs", e.Record.UnconfirmedGPUs, &r.UnconfirmedGPUs)
	part("binding", e.Record.Binding, &r.Binding)
	part("kernel log", e.Record.KernelLog, &r.KernelLog)
	known := map[gpu.DeviceID]bool{}
	r.Devices = decodeAll(e.Record.Devices, func(text []byte) (gpu.Device, error) {
		d, err := decodeDevice(text)
		if err != nil {
			return d, err
		}
		if known[d.ID] {
			return d, fmt.Errorf("%s is there twice", d.ID)
		}
		known[d.ID] = true
		return d, nil
	}, func(i int, err error) { skip("device", i, err) })
	r.Links = decodeAll(e.Record.Links, func(text []byte) (l gpu.Link, err error) {
		err = json.Unmarshal(text, &l)
		return l, err
	}, func(i int, err error) { skip("link", i, err) })
	r.Conditions = decodeAll(e.Record.Conditions, decodeCondition, func(i int, err error) { skip("condition", i, err) })
	if e.Record.GPUs != nil {
		r.GPUs = make(map[gpu.DeviceID]health.GPUHistory, len(e.Record.GPUs))
	}
	for _, id := range slices.Sorted(maps.Keys(e.Record.GPUs)) {
		var history health.GPUHistory
		if err := json.Unmarshal(e.Record.GPUs[id], &history); err != nil {
			skip("GPU history", id, err)
			continue
		}
		r.GPUs[id] = history
	}
	return r, skipped, nil
}

// decodeAll decodes the valid elements of a list and calls skip for the others.
func decodeAll[T any](texts []json.RawMessage, decode func([]byte) (T, error), skip func(int, error)) (all []T) {
	for i, text := range texts {
		v, err := decode(text)
		if err != nil {
			skip(i, err)
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
