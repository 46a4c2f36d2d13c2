package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// requests returns a request for the units of each pool.
func (x explainer) requests(units []inventory.Unit) (all []Request) {
	for _, u := range units {
		i := slices.IndexFunc(all, func(r Request) bool { return r.Pool == u.Pool })
		if i < 0 {
			i = len(all)
			all = append(all, Request{Pool: u.Pool, Name: x.Adapter.Name(u)})
		}
		all[i].chosen = append(all[i].chosen, u)
	}
	for i := range all {
		x.reserve(&all[i], 0)
	}
	return all
}

// count returns a request for n units of a pool, the units that are asked for among them.
func (x explainer) count(q question, n int) Request {
	r := Request{Pool: q.pool, Count: n}
	var available, required []inventory.UnitID
	for _, u := range q.units {
		required = append(required, u.ID)
	}
	for u := range x.inv.Units() {
		if u.Pool != q.pool {
			continue
		}
		r.Name = x.Adapter.Name(u)
		why := x.unavailable(u)
		if why == "" {
			available = append(available, u.ID)
		} else if u.Replica == 0 {
			r.NotChosen = append(r.NotChosen, notChosen(u.Device, why))
		}
	}
	r.Available = len(available)
	p := x.inv.ExplainPreference(available, required, n)
	if x.Adapter.Listed {
		p = x.listed(available, required, n)
	}
	r.Method = p.Method
	for _, pair := range p.Pairs {
		r.Pairs = append(r.Pairs, Pair{pair.A, pair.B, pair.NVLinks, pair.Bandwidth, pair.NVSwitch, pathName(pair.Path), pair.SameNUMA})
	}
	for _, o := range p.Others {
		if u := x.deviceUnit(o.Device); u.ID != "" {
			r.NotChosen = append(r.NotChosen, notChosen(u.Device, o.Why))
		}
	}
	for _, id := range p.Units {
		u, _ := x.inv.Unit(id)
		r.chosen = append(r.chosen, u)
	}
	if missing := n - len(p.Units); missing > 0 {
		r.Refused = fmt.Sprintf("%d of %d devices of pool %s are available now: the orchestrator does not place the request here", len(p.Units), n, q.pool)
		r.Units = p.Units
		return r
	}
	for _, u := range q.units {
		if why := x.unavailable(u); why != "" {
			r.Refused, r.Units = fmt.Sprintf("%s is not available: %s", u.ID, why), p.Units
			return r
		}
	}
	x.reserve(&r, n)
	if !x.Use.HoldersKnown {
		r.Notes = append(r.Notes, "not all work that holds devices is known here: a healthy device of which none is known is taken for available")
	}
	return r
}

func notChosen(d gpu.Device, why string) NotChosen {
	return NotChosen{d.ID, d.CurrentIndex().String(), why}
}

// unavailable returns why a unit can't be given now; "" if it can.
func (x explainer) unavailable(u inventory.Unit) string {
	if !u.Health.Schedulable() {
		return u.Health.String()
	}
	if why := x.otherAPI(u); why != "" {
		return why
	}
	d, _ := x.Use.Device(u.Device.ID)
	claims := 0
	for _, h := range d.Holders {
		if h.Unit == "" {
			claims++
		}
		if h.Unit == u.ID || claimed(claims, u) {
			return "held by " + strings.Join(x.holders(u.Device.ID), ", ")
		}
	}
	return ""
}

func (x explainer) deviceUnit(id gpu.DeviceID) inventory.Unit {
	for u := range x.inv.Devices() {
		if u.Device.ID == id {
			return u
		}
	}
	return inventory.Unit{}
}

// reserve adds what the agent responds to a request for the chosen units.
func (x explainer) reserve(r *Request, n int) {
	for _, u := range r.chosen {
		r.Units = append(r.Units, u.ID)
	}
	plan, err := x.inv.Reserve(r.Units...)
	if err != nil {
		r.Refused = err.Error()
		return
	}
	if len(plan.Units) == 0 {
		return
	}
	r.Injection, r.Limit = x.injection(plan), plan.Memory
	response := x.Adapter.Respond(plan)
	r.Response = &response
	r.Notes = x.Adapter.Notes(x.inv, r.chosen, n)
}

// injection describes how a container gets the devices of a plan, and why: "auto, by the agent's setting: ...".
func (x explainer) injection(plan inventory.Plan) string {
	by := "default"
	for _, d := range x.State.Decisions() {
		if d.Device.ID == plan.Units[0].Device.ID {
			by = deciderText(d.InjectionBy)
		}
	}
	i := plan.Injection
	text := i.Ways(len(plan.CDI) > 0)
	if i.Name != "" {
		text = i.Name + " (" + text + ")"
	}
	text += ", by " + by
	if c := x.inv.CDI(); i.CDI == inventory.CDIAuto && c != nil {
		with := map[bool]string{true: "; auto uses CDI: ", false: "; auto does not use CDI: "}[c.Usable]
		text += with + c.Reason
	}
	return text
}

// pathName is the name of a PCIe path in the output of nvidia-smi topo -m.
func pathName(p gpu.PCIePath) string {
	return map[gpu.PCIePath]string{
		gpu.PathSystem: "SYS", gpu.PathNUMA: "NODE", gpu.PathHostBridge: "PHB", gpu.PathMultiSwitch: "PXB", gpu.PathSingleSwitch: "PIX", gpu.PathBoard: "board",
	}[p]
}
