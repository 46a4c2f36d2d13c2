package control

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// words reads what an operator wrote, about a machine and at a time. Every error is a *core.ConfigError, and
// there is one for each thing that is wrong.
type words struct {
	state core.State
	now   time.Time
}

const timeForm = "a time such as 2026-11-20T10:31:00Z"

func (w words) order(gpu, cause, verified string) (core.Command, error) {
	id, err := w.gpu(gpu)
	o := core.Command{GPU: id, Cause: causeOf(cause)}
	if verified = strings.TrimSpace(verified); verified != "" {
		var timeErr error
		if o.VerifiedAt, timeErr = time.Parse(time.RFC3339, verified); timeErr != nil {
			err = errors.Join(err, &core.ConfigError{Key: "verified-at", Value: verified, Remedy: "want " + timeForm})
		}
	}
	return o, err
}

// gpu finds the one physical GPU that is meant.
func (w words) gpu(word string) (core.DeviceID, error) {
	word = strings.TrimSpace(word)
	refuse := func(remedy string) (core.DeviceID, error) {
		return "", &core.ConfigError{Key: "gpu", Value: word, Remedy: remedy}
	}
	means, ok := meant(word)
	if !ok {
		return refuse("want a UUID or the beginning of one, a PCI address or an index, as inspect shows them")
	}
	var found []core.DeviceID
	for _, d := range w.devices() {
		if d.At.GPU != "" && means(d) && !slices.Contains(found, d.At.GPU) {
			found = append(found, d.At.GPU)
		}
	}
	switch len(found) {
	case 0:
		return refuse("there is no such GPU, or its UUID is unknown; inspect shows those that are known")
	case 1:
		return found[0], nil
	}
	return refuse(fmt.Sprintf("that is the beginning of %s and %s: write more of it", found[0], found[1]))
}

// meant is which device a word means; false if it is no such word.
func meant(word string) (func(core.Device) bool, bool) {
	if n, err := strconv.Atoi(word); err == nil && n >= 0 {
		return func(d core.Device) bool { return d.Index == n }, true
	}
	if pci, err := core.ParsePCIAddress(word); err == nil {
		return func(d core.Device) bool { return d.PCI == pci }, true
	}
	if index, instance, ok := pair(word); ok { // as inspect shows a MIG instance, and a policy selects it
		return func(d core.Device) bool { return d.Profile != "" && d.Index == index && d.Instance == instance }, true
	}
	upper := strings.ToUpper(word)
	if !strings.HasPrefix(upper, "GPU-") && !strings.HasPrefix(upper, "MIG-") {
		return nil, false
	}
	if id, replica, ok := strings.Cut(upper, "::"); ok { // a share, as the orchestrators know it: its device is meant
		_, err := strconv.ParseUint(replica, 10, 32)
		return func(d core.Device) bool { return strings.ToUpper(string(d.ID)) == id }, err == nil
	}
	return func(d core.Device) bool { return strings.HasPrefix(strings.ToUpper(string(d.ID)), upper) }, true
}

// pair reads "0:1".
func pair(word string) (gpu, instance int, ok bool) {
	one, two, _ := strings.Cut(word, ":")
	m, errOne := strconv.ParseUint(one, 10, 16)
	n, errTwo := strconv.ParseUint(two, 10, 16)
	return int(m), int(n), errOne == nil && errTwo == nil //nolint:gosec // 16 bits
}

// devices are all that a GPU can be known by: those of the reading, those that can't be read, and those against
// which something stands.
func (w words) devices() []core.Device {
	devices := slices.Clone(w.state.Snapshot.Devices)
	for _, e := range w.state.Snapshot.Excluded {
		devices = append(devices, core.Device{ID: e.At.GPU, At: e.At, Index: e.Index, PCI: e.PCI})
	}
	for _, c := range w.state.Ledger.Conditions() {
		devices = append(devices, core.Device{ID: c.At.GPU, At: c.At, Index: -1})
	}
	return devices
}

// causeOf spells a cause as core.Condition.Cause does: "xid 95", "xid-95" and "95" are "XID_95".
func causeOf(word string) string {
	word = strings.ToUpper(strings.TrimSpace(word))
	if number := strings.TrimLeft(strings.TrimPrefix(word, "XID"), " -_"); number != "" {
		if n, err := strconv.ParseUint(number, 10, 64); err == nil {
			return fmt.Sprintf("XID_%d", n)
		}
	}
	return strings.NewReplacer(" ", "_", "-", "_").Replace(word)
}

// until reads a duration from now, or a time.
func (w words) until(word string) (time.Time, error) {
	word = strings.TrimSpace(word)
	if d, err := time.ParseDuration(word); err == nil {
		return w.now.Add(d), nil
	}
	t, err := time.Parse(time.RFC3339, word)
	if err != nil {
		return t, &core.ConfigError{Key: "until", Value: word, Remedy: "want a duration such as 4h, or " + timeForm}
	}
	return t, nil
}

// rehearsal is the fault to rehearse.
func (w words) rehearsal(args SimulateArgs) (core.Observation, error) {
	o := core.Observation{Simulated: true}
	var errs [2]error
	o.At, errs[0] = w.placement(args)
	switch strings.ToLower(strings.TrimSpace(args.Kind)) {
	case "", "xid":
		o.Kind = core.XID
		o.Code, errs[1] = xidCode(args.Code)
	case "event":
		o.Kind = core.Event
		o.Code, errs[1] = event(args.Code)
	default:
		errs[1] = &core.ConfigError{Key: "kind", Value: args.Kind, Remedy: "want xid or event"}
	}
	return o, errors.Join(errs[:]...)
}

func (w words) placement(args SimulateArgs) (core.Placement, error) {
	gpu, err := w.gpu(args.GPU)
	at := core.WholeGPU(gpu)
	var giErr, ciErr error
	at.GI, giErr = instance("gi", args.GI)
	at.CI, ciErr = instance("ci", args.CI)
	err = errors.Join(err, giErr, ciErr)
	switch {
	case err != nil:
	case at.GI == core.Whole && at.CI != core.Whole:
		err = &core.ConfigError{Key: "ci", Value: args.CI, Remedy: "a compute instance is one of a GPU instance: give gi too"}
	case at.GI != core.Whole && !slices.ContainsFunc(w.state.Snapshot.Devices, func(d core.Device) bool { return at.Covers(d.At) }):
		err = &core.ConfigError{Key: "gi", Value: args.GI, Remedy: fmt.Sprintf("there is no %s", at)}
	}
	return at, err
}

func instance(key, word string) (uint32, error) {
	word = strings.TrimSpace(word)
	if word == "" {
		return core.Whole, nil
	}
	n, err := strconv.ParseUint(word, 10, 32)
	if err != nil || n == math.MaxUint32 {
		return 0, &core.ConfigError{Key: key, Value: word, Remedy: "want the number of an instance, as nvidia-smi shows it"}
	}
	return uint32(n), nil
}

func xidCode(word string) (uint64, error) {
	number := strings.TrimPrefix(causeOf(word), "XID_")
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || n == 0 {
		return 0, &core.ConfigError{Key: "code", Value: word, Remedy: "want the number of an XID, such as 95"}
	}
	return n, nil
}

// event reads the type of an NVML event: a number (0x2000) or its name in nvml.h, also without "nvmlEventType".
func event(word string) (uint64, error) {
	const prefix = "nvmlEventType"
	word = strings.TrimSpace(word)
	n, err := strconv.ParseUint(word, 0, 64)
	var names []string
	for bit := range 64 {
		rule, ok := xid.Event(1 << bit)
		if !ok {
			continue
		}
		name := strings.TrimPrefix(rule.Name, prefix)
		if err == nil && n == rule.Code || strings.EqualFold(word, name) || strings.EqualFold(word, rule.Name) {
			return rule.Code, nil
		}
		names = append(names, name)
	}
	return 0, &core.ConfigError{Key: "code", Value: word, Remedy: "want one of " + strings.Join(names, ", ")}
}
