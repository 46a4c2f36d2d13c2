package explain

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// explainer answers from one input.
type explainer struct {
	Input
	inv *inventory.Allocatable
}

// devices describes the devices that match, in canonical order, and those that could not be read last.
func (x explainer) devices(match func(gpu.Device) bool) []Device {
	units := map[gpu.DeviceID]inventory.Unit{}
	for u := range x.inv.Devices() {
		units[u.Device.ID] = u
	}
	all := []Device{}
	for _, d := range x.State.Decisions() {
		if match(d.Device) {
			u := units[d.Device.ID]
			all = append(all, x.describe(d, u))
		}
	}
	for _, e := range x.State.Snapshot.Excluded {
		if d := (gpu.Device{ID: e.At.GPU, At: e.At, Index: e.Index, PCI: e.PCI}); match(d) {
			all = append(all, Device{ID: string(e.At.GPU), Index: strconv.Itoa(e.Index), PCI: e.PCI, Outcome: inventory.NotOffered, Reason: e.Reason, By: "the driver"})
		}
	}
	return all
}

func (x explainer) describe(d inventory.Decision, u inventory.Unit) Device {
	one := Device{
		ID: string(d.Device.ID), Index: d.Device.CurrentIndex().String(), PCI: d.Device.PCI, Model: d.Device.Model, Outcome: d.Outcome, Reason: d.Reason,
		By: deciderText(d.By), HeldBy: x.holders(d.Device.ID),
	}
	for _, o := range d.Others {
		one.Others = append(one.Others, Other{deciderText(o.Decider), o.Why})
	}
	switch {
	case d.Outcome == inventory.Offered:
		one.Pool, one.Sharing, one.Injection = d.Pool, d.Sharing.Description(), d.Injection.Name
		one.PoolBy, one.SharingBy, one.InjectionBy = deciderText(d.PoolBy), deciderText(d.SharingBy), deciderText(d.InjectionBy)
		one.MemoryLimit, one.LimitedBy = u.Memory, x.inv.LimitWays(u)
		one.Schedulable, one.Health = u.Health.Schedulable(), u.Health.String()
	case d.Outcome == inventory.Represented && d.Device.Profile == "":
		one.Reason, one.By = "its MIG instances are offered", deciderText(d.MIGBy)
	case d.Outcome == inventory.Represented:
		one.Reason, one.By = "its GPU is offered, not the MIG instances", deciderText(d.MIGBy)
	}
	return one
}

// deciderText is a decider in words: "rule policy.yaml:5: policy.rules[1].select".
func deciderText(d inventory.Decider) string {
	text := map[inventory.DeciderKind]string{
		inventory.ByDefault: "default", inventory.ByExclude: "the list of excluded devices", inventory.ByNumber: "the numbers of devices",
		inventory.ByInclude: "include", inventory.ByRule: "rule", inventory.ByName: "name", inventory.BySharing: "sharing",
		inventory.ByMIGStrategy: "the MIG strategy", inventory.BySetting: "the agent's setting",
	}[d.Kind]
	if d.Kind == inventory.ByInclude && d.At == "" {
		return "no include selects it"
	}
	return strings.TrimSpace(text + " " + d.At)
}

// holders are the work that has a device, one line each.
func (x explainer) holders(id gpu.DeviceID) (names []string) {
	d, _ := x.Use.Device(id)
	for _, o := range d.Owners() {
		names = append(names, o.Short())
	}
	return names
}

// DeviceMatcher returns the predicate for the devices that an argument names: a UUID or the beginning of one, the ID of a unit, a PCI
// address, an index ("3"; "0:1" for a MIG instance). It returns false if the argument has none of the forms.
func DeviceMatcher(arg string) (func(gpu.Device) bool, bool) {
	if n, err := strconv.Atoi(arg); err == nil && n >= 0 {
		return func(d gpu.Device) bool { return d.Index == n }, true
	}
	if pci, err := gpu.ParsePCIAddress(arg); err == nil {
		return func(d gpu.Device) bool { return d.PCI == pci }, true
	}
	if index, instance, ok := parseInstanceIndex(arg); ok {
		return func(d gpu.Device) bool { return d.Profile != "" && d.Index == index && d.Instance == instance }, true
	}
	upper := strings.ToUpper(arg)
	if !strings.HasPrefix(upper, "GPU-") && !strings.HasPrefix(upper, "MIG-") {
		return nil, false
	}
	if id, replica, ok := strings.Cut(upper, "::"); ok { // the ID of a unit of a shared device
		_, err := strconv.ParseUint(replica, 10, 32)
		return func(d gpu.Device) bool { return strings.ToUpper(string(d.ID)) == id }, err == nil
	}
	return func(d gpu.Device) bool { return strings.HasPrefix(strings.ToUpper(string(d.ID)), upper) }, true
}

// parseInstanceIndex parses "0:1", as inspect shows a MIG instance and a policy selects it.
func parseInstanceIndex(arg string) (index, instance int, ok bool) {
	one, two, _ := strings.Cut(arg, ":")
	m, errOne := strconv.ParseUint(one, 10, 16)
	n, errTwo := strconv.ParseUint(two, 10, 16)
	return int(m), int(n), errOne == nil && errTwo == nil //nolint:gosec // 16 bits
}

// question is Args with the devices found.
type question struct {
	pool  string
	units []inventory.Unit      // one of each offered device that is asked for, or the unit asked for
	asked map[gpu.DeviceID]bool // the devices to describe: those asked for; without any, those of the pool
}

// resolve finds the devices and the pool.
func (x explainer) resolve(args Args) (question, error) {
	q := question{asked: map[gpu.DeviceID]bool{}}
	var errs []error
	for _, arg := range args.Devices {
		errs = append(errs, x.find(&q, strings.TrimSpace(arg)))
	}
	if args.Count < 0 {
		errs = append(errs, &setting.Error{Key: "count", Value: strconv.Itoa(args.Count), Remedy: "want a positive number of devices"})
	}
	if args.Pool != "" || args.Count > 0 {
		var err error
		if q.pool, err = x.pool(args.Pool, q.units); err != nil {
			errs = append(errs, err)
		}
	}
	for _, u := range q.units {
		if q.pool != "" && u.Pool != q.pool {
			errs = append(errs, &setting.Error{Key: "device", Value: string(u.ID), Remedy: fmt.Sprintf("it belongs to pool %s, not %s", u.Pool, q.pool)})
		}
	}
	for u := range x.inv.Devices() {
		if len(args.Devices) == 0 && u.Pool == q.pool {
			q.asked[u.Device.ID] = true
		}
	}
	return q, errors.Join(errs...)
}

// find adds the devices that an argument names. An index or PCI address of a GPU whose instances are offered means these.
func (x explainer) find(q *question, arg string) error {
	matches, ok := DeviceMatcher(arg)
	if !ok {
		return x.unknown(arg, "want a UUID or the beginning of one, the ID of a unit, a PCI address or an index, as inspect shows them")
	}
	found := false
	for _, d := range x.State.Snapshot.Devices {
		if matches(d) {
			q.asked[d.ID], found = true, true
		}
	}
	for _, e := range x.State.Snapshot.Excluded {
		if matches(gpu.Device{ID: e.At.GPU, Index: e.Index, PCI: e.PCI}) {
			q.asked[e.At.GPU], found = true, true
		}
	}
	if !found {
		return x.unknown(arg, "no such device")
	}
	_, _, isUnit := strings.Cut(arg, "::")
	last := gpu.DeviceID("")
	for u := range x.inv.Units() {
		if !matches(u.Device) || u.Health.Reason == health.ReasonWithdrawn {
			continue
		}
		if isUnit == strings.EqualFold(string(u.ID), arg) && (isUnit || u.Device.ID != last) && !slices.ContainsFunc(q.units, func(o inventory.Unit) bool { return o.ID == u.ID }) {
			q.units = append(q.units, u)
		}
		last = u.Device.ID
	}
	return nil
}

// unknown is the error for a device that is not found, with the name of which it is likely a misspelling.
func (x explainer) unknown(arg, problem string) error {
	short := arg[strings.LastIndexByte(arg, '/')+1:]
	for u := range x.inv.Devices() {
		if u.Pool == short {
			return &setting.Error{Key: "device", Value: arg, Remedy: "this is the name of a pool: want --pool=" + arg + " --count=N"}
		}
	}
	var names []string
	for _, d := range x.State.Snapshot.Devices {
		names = append(names, string(d.ID), d.CurrentIndex().String(), string(d.PCI))
	}
	if len(names) > 0 {
		if name, ok := document.Near(arg, names); ok {
			problem += ": did you mean " + name + "?"
		} else {
			problem += ": explain without arguments lists them"
		}
	}
	return &setting.Error{Key: "device", Value: arg, Remedy: problem}
}

// pool returns the pool of a request: the one that is named, that of the devices, the only one, or the default one.
func (x explainer) pool(named string, units []inventory.Unit) (string, error) {
	pools := map[string]bool{}
	for u := range x.inv.Devices() {
		pools[u.Pool] = true
	}
	names := slices.Sorted(maps.Keys(pools))
	switch short := named[strings.LastIndexByte(named, '/')+1:]; {
	case len(names) == 0:
		return "", &setting.Error{Key: "pool", Value: named, Remedy: "no device is offered: explain without arguments has the reasons"}
	case named != "" && !pools[short]:
		return "", &setting.Error{Key: "pool", Value: named, Remedy: fmt.Sprintf("no such pool: did you mean %s? (%s)", document.Nearest(short, names), strings.Join(names, ", "))}
	case named != "":
		return short, nil
	case len(units) > 0:
		return units[0].Pool, nil
	case len(names) == 1 || !pools[inventory.DefaultPool]:
		if len(names) > 1 {
			return "", &setting.Error{Key: "pool", Remedy: "several pools are offered: want one of " + strings.Join(names, ", ")}
		}
		return names[0], nil
	}
	return inventory.DefaultPool, nil
}
