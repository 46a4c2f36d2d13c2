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
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// argParser parses the arguments of commands against a state and a time. Its errors are *setting.Error, one for each
// argument that is wrong, joined.
type argParser struct {
	state core.State
	now   time.Time
}

const timeExample = "a time such as 2026-11-20T10:31:00Z"

func (p argParser) command(device, cause, verifiedAt string) (health.Command, error) {
	id, err := p.physicalGPU(device)
	c := health.Command{GPU: id, Cause: parseCause(cause)}
	if verifiedAt = strings.TrimSpace(verifiedAt); verifiedAt != "" {
		var timeErr error
		if c.VerifiedAt, timeErr = time.Parse(time.RFC3339, verifiedAt); timeErr != nil {
			err = errors.Join(err, &setting.Error{Key: "verified-at", Value: verifiedAt, Remedy: "want " + timeExample})
		}
	}
	return c, err
}

// physicalGPU returns the one physical GPU that an argument matches.
func (p argParser) physicalGPU(arg string) (gpu.DeviceID, error) {
	arg = strings.TrimSpace(arg)
	fail := func(remedy string) (gpu.DeviceID, error) {
		return "", &setting.Error{Key: "gpu", Value: arg, Remedy: remedy}
	}
	matches, ok := explain.DeviceMatcher(arg)
	if !ok {
		return fail("want a UUID or the beginning of one, a PCI address or an index, as inspect shows them")
	}
	var found []gpu.DeviceID
	for _, d := range p.devices() {
		if d.At.GPU != "" && matches(d) && !slices.Contains(found, d.At.GPU) {
			found = append(found, d.At.GPU)
		}
	}
	switch len(found) {
	case 0:
		return fail("no such GPU, or its UUID is unknown: inspect lists those that are known")
	case 1:
		return found[0], nil
	}
	return fail(fmt.Sprintf("it is the beginning of %s and %s: write more of the UUID", found[0], found[1]))
}

// devices are all that identify a GPU: enumerated devices, excluded ones and those of conditions.
func (p argParser) devices() []gpu.Device {
	devices := slices.Clone(p.state.Snapshot.Devices)
	for _, e := range p.state.Snapshot.Excluded {
		devices = append(devices, gpu.Device{ID: e.At.GPU, At: e.At, Index: e.Index, PCI: e.PCI})
	}
	for _, c := range p.state.Ledger.Conditions() {
		devices = append(devices, gpu.Device{ID: c.At.GPU, At: c.At, Index: -1})
	}
	return devices
}

// parseCause returns a cause as health.Condition.Cause writes it: "xid 95", "xid-95" and "95" are "XID_95".
func parseCause(arg string) string {
	arg = strings.ToUpper(strings.TrimSpace(arg))
	if number := strings.TrimLeft(strings.TrimPrefix(arg, "XID"), " -_"); number != "" {
		if n, err := strconv.ParseUint(number, 10, 64); err == nil {
			return fmt.Sprintf("XID_%d", n)
		}
	}
	return strings.NewReplacer(" ", "_", "-", "_").Replace(arg)
}

// until parses a duration from now, or a time.
func (p argParser) until(key, arg string) (time.Time, error) {
	arg = strings.TrimSpace(arg)
	if d, err := time.ParseDuration(arg); err == nil {
		return p.now.Add(d), nil
	}
	t, err := time.Parse(time.RFC3339, arg)
	if err != nil {
		return t, &setting.Error{Key: key, Value: arg, Remedy: "want a duration such as 4h, or " + timeExample}
	}
	return t, nil
}

func (p argParser) simulatedFault(args SimulateArgs) (health.Observation, error) {
	o := health.Observation{Simulated: true}
	var errs [2]error
	o.At, errs[0] = p.placement(args)
	switch strings.ToLower(strings.TrimSpace(args.Kind)) {
	case "", "xid":
		o.Kind = health.XID
		o.Code, errs[1] = parseXID(args.Code)
	case "event":
		o.Kind = health.Event
		o.Code, errs[1] = parseEvent(args.Code)
	default:
		errs[1] = &setting.Error{Key: "kind", Value: args.Kind, Remedy: "want xid or event"}
	}
	return o, errors.Join(errs[:]...)
}

func (p argParser) placement(args SimulateArgs) (gpu.Placement, error) {
	id, err := p.physicalGPU(args.GPU)
	at := gpu.WholeGPU(id)
	var giErr, ciErr error
	at.GI, giErr = parseInstanceID("gi", args.GI)
	at.CI, ciErr = parseInstanceID("ci", args.CI)
	err = errors.Join(err, giErr, ciErr)
	switch {
	case err != nil:
	case at.GI == gpu.Whole && at.CI != gpu.Whole:
		err = &setting.Error{Key: "ci", Value: args.CI, Remedy: "a compute instance belongs to a GPU instance: give gi too"}
	case at.GI != gpu.Whole && !slices.ContainsFunc(p.state.Snapshot.Devices, func(d gpu.Device) bool { return at.Covers(d.At) }):
		err = &setting.Error{Key: "gi", Value: args.GI, Remedy: fmt.Sprintf("there is no %s", at)}
	}
	return at, err
}

func parseInstanceID(key, arg string) (uint32, error) {
	arg = strings.TrimSpace(arg)
	if arg == "" {
		return gpu.Whole, nil
	}
	n, err := strconv.ParseUint(arg, 10, 32)
	if err != nil || n == math.MaxUint32 {
		return 0, &setting.Error{Key: key, Value: arg, Remedy: "want the ID of an instance, as nvidia-smi shows it"}
	}
	return uint32(n), nil
}

func parseXID(arg string) (uint64, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(parseCause(arg), "XID_"), 10, 32)
	if err != nil || n == 0 {
		return 0, &setting.Error{Key: "code", Value: arg, Remedy: "want the number of an XID, such as 95"}
	}
	return n, nil
}

// parseEvent parses the type of an NVML event: a number (0x2000) or its name in nvml.h, with or without "nvmlEventType".
func parseEvent(arg string) (uint64, error) {
	const prefix = "nvmlEventType"
	arg = strings.TrimSpace(arg)
	n, err := strconv.ParseUint(arg, 0, 64)
	var names []string
	for bit := range 64 {
		rule, ok := xid.Event(1 << bit)
		if !ok {
			continue
		}
		name := strings.TrimPrefix(rule.Name, prefix)
		if err == nil && n == rule.Code || strings.EqualFold(arg, name) || strings.EqualFold(arg, rule.Name) {
			return rule.Code, nil
		}
		names = append(names, name)
	}
	return 0, &setting.Error{Key: "code", Value: arg, Remedy: "want one of " + strings.Join(names, ", ")}
}
