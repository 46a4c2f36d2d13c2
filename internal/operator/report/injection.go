package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// describeInjections merges the pools with the same injection, in the order of the first device of each.
func describeInjections(inv *inventory.Allocatable) []Injection {
	type way struct {
		inventory.Injection
		byIndex bool
	}
	all := []Injection{}
	var seen []way
	for u := range inv.Devices() {
		one := way{u.Injection, inv.ByIndex(u.API)}
		n := slices.Index(seen, one)
		if n < 0 {
			n = len(seen)
			seen = append(seen, one)
			ids := "uuid"
			if one.byIndex {
				ids = "index"
			}
			all = append(all, Injection{
				Configured: u.Injection.Name, Runtime: u.Injection.Runtime, Nodes: u.Injection.Nodes, Libraries: u.Injection.Libraries,
				CDI: inv.UsesCDI(u.Injection), IDs: ids,
			})
		}
		if !slices.Contains(all[n].Pools, u.Pool) {
			all[n].Pools = append(all[n].Pools, u.Pool)
		}
	}
	return all
}

// CDINotWritten is the Reason of a specification that an agent which has just started has not written so far.
const CDINotWritten = "not written yet"

// describeCDI returns nil if no unit needs a specification.
func describeCDI(inv *inventory.Allocatable) *CDI {
	c := inv.CDI()
	switch {
	case !inv.NeedsCDI():
		return nil
	case c == nil:
		return &CDI{Reason: CDINotWritten}
	}
	d := &CDI{
		Usable: c.Usable, Reason: c.Reason, Problem: c.Problem, Folder: c.Folder, Kind: c.Kind, Defined: len(c.Defined),
		Others: slices.Clone(c.Others), NoMemoryLimits: c.NoLimits,
	}
	for _, u := range c.Undefined {
		d.Undefined = append(d.Undefined, Undefined{u.Device, u.Reason})
	}
	return d
}

// writeInjection writes how containers get their devices, and the state of the CDI specifications, if these are needed.
func (r Report) writeInjection(w io.Writer) {
	if r.CDI == nil {
		return
	}
	for _, i := range r.Injections {
		fmt.Fprintf(w, "injection: %s\n", i)
	}
	state := "not usable"
	switch auto := slices.ContainsFunc(r.Injections, func(i Injection) bool { return i.Configured == "auto" }); {
	case r.CDI.Usable && auto:
		state = "usable"
	case r.CDI.Usable: // and used as it is: warnings have what is against it
		state = "written"
	}
	fmt.Fprintf(w, "CDI: %s", state)
	if r.CDI.Kind != "" {
		fmt.Fprintf(w, ", %d devices of %s in %s", r.CDI.Defined, r.CDI.Kind, cmp.Or(r.CDI.Folder, "no folder"))
	}
	text := r.CDI.Reason
	if !strings.Contains(text, r.CDI.Problem) { // the problem often is the reason
		text += ": " + r.CDI.Problem
	}
	if text != "" {
		fmt.Fprintf(w, ": %s", text)
	}
	fmt.Fprintln(w)
	r.writeOnce(w, "CDI: not defined", func(d Device) string {
		if i := slices.IndexFunc(r.CDI.Undefined, func(u Undefined) bool { return u.ID == d.ID }); i >= 0 {
			return strings.ReplaceAll(r.CDI.Undefined[i].Reason, "device "+strconv.Quote(string(d.ID)), "it") // so that it is one text for all
		}
		return ""
	})
}

// String describes the injection in one line: "gpu: auto: NVIDIA's container runtime, CDI".
func (i Injection) String() string {
	text := strings.Join(i.Pools, ", ") + ": "
	if i.Configured != "" {
		text += i.Configured + ": "
	}
	return text + inventory.Injection{Runtime: i.Runtime, Nodes: i.Nodes, Libraries: i.Libraries}.Ways(i.CDI)
}
