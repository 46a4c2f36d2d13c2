package checkpoint

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
)

// version is that of the format. A change that an older agent would misread needs another.
const version = 1

// envelope is the file.
type envelope struct {
	Version int
	Agent   string
	Record  core.Checkpoint
}

// lenient is an envelope whose parts are understood one by one, so that one that is not understood does not
// take the others with it.
type lenient struct {
	Version int
	Agent   string
	Record  struct {
		Boot       string
		Booted     json.RawMessage
		Unread     bool
		Inherited  json.RawMessage
		Driver     string
		Away       json.RawMessage
		Binding    json.RawMessage
		Devices    []json.RawMessage
		Links      []json.RawMessage
		Conditions []json.RawMessage
		Charts     map[core.DeviceID]json.RawMessage
		KernelLog  json.RawMessage
	}
}

func encode(r core.Checkpoint, agent string) ([]byte, error) {
	text, err := json.MarshalIndent(envelope{version, agent, r}, "", "\t")
	return append(text, '\n'), err
}

// decode returns what was understood of a file, and what was not. It fails if that is the file as a whole.
func decode(text []byte, agent string) (r core.Checkpoint, skipped []error, err error) {
	var e lenient
	// The version first: what another one looks like is unknown.
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
	r.BootID, r.Driver = e.Record.Boot, e.Record.Driver
	r.NotReadSinceBoot = e.Record.Unread
	part := func(what string, text json.RawMessage, into any) {
		if text == nil {
			return
		}
		if err := json.Unmarshal(text, into); err != nil {
			skip(what, "", err)
			reflect.ValueOf(into).Elem().SetZero() // of a part that was understood in part nothing counts
		}
	}
	part("boot moment", e.Record.Booted, &r.BootTime)
	part("maintenance", e.Record.Away, &r.Maintenance)
	part("GPUs inherited", e.Record.Inherited, &r.UnconfirmedGPUs)
	part("binding", e.Record.Binding, &r.Binding)
	part("kernel log", e.Record.KernelLog, &r.KernelLog)
	known := map[core.DeviceID]bool{}
	for i, text := range e.Record.Devices {
		d, err := device(text)
		switch {
		case err != nil:
			skip("device", i, err)
		case known[d.ID]:
			skip("device", i, fmt.Errorf("%s is there twice", d.ID))
		default:
			known[d.ID] = true
			r.Devices = append(r.Devices, d)
		}
	}
	for i, text := range e.Record.Links {
		var l core.Link
		if err := json.Unmarshal(text, &l); err != nil {
			skip("link", i, err)
			continue
		}
		r.Links = append(r.Links, l)
	}
	for i, text := range e.Record.Conditions {
		c, err := condition(text)
		if err != nil {
			skip("condition", i, err)
			continue
		}
		r.Conditions = append(r.Conditions, c)
	}
	if e.Record.Charts != nil {
		r.GPUs = make(map[core.DeviceID]core.GPUHistory, len(e.Record.Charts))
	}
	for _, gpu := range slices.Sorted(maps.Keys(e.Record.Charts)) {
		var chart core.GPUHistory
		if err := json.Unmarshal(e.Record.Charts[gpu], &chart); err != nil {
			skip("chart", gpu, err)
			continue
		}
		r.GPUs[gpu] = chart
	}
	return r, skipped, nil
}

func device(text []byte) (d core.Device, err error) {
	if err := json.Unmarshal(text, &d); err != nil {
		return d, err
	}
	if d.ID == "" || d.At.GPU == "" {
		return d, fmt.Errorf("no UUID")
	}
	return d, nil
}

// condition refuses what the core would never have written, and could not put into words.
func condition(text []byte) (c core.Condition, err error) {
	if err := json.Unmarshal(text, &c); err != nil {
		return c, err
	}
	switch {
	case c.At.GPU == "":
		return c, fmt.Errorf("no GPU")
	case c.Reason == core.ReasonNone:
		return c, fmt.Errorf("no reason")
	case c.Reason == core.ReasonRecoveryAction && c.Code > uint64(core.RecoveryOther):
		return c, fmt.Errorf("no verdict %d", c.Code)
	}
	return c, nil
}
