// Package shadow compares what an agent would offer and answer with what another plugin for the same GPUs does on the same node.
package shadow

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// Kind is what differs.
type Kind string

// The kinds, in the order in which differences are listed.
const (
	KindHealth    Kind = "health"    // a device that takes no work, or is degraded, for one of the two only
	KindResource  Kind = "resource"  // a resource, or device group, that only one of the two offers
	KindDevice    Kind = "device"    // a device that only one of the two offers
	KindTopology  Kind = "topology"  // NUMA node or PCI address of a device
	KindAttribute Kind = "attribute" // of a device group
	KindAnswer    Kind = "answer"    // what a container has, and what it would get
)

var kinds = []Kind{KindHealth, KindResource, KindDevice, KindTopology, KindAttribute, KindAnswer}

// Device is a device that one side offers.
type Device struct {
	ID      string
	Healthy bool   // it takes new work
	Remark  string // about its health, one line; "" = healthy without remarks
	Place   string // "NUMA node 1", "PCI 0000:17:00.0"; "" = unknown, or not reported
}

// Offer is a resource of Kubernetes, or a device group of Nomad.
type Offer struct {
	Name       string            // "nvidia.com/gpu", "nvidia/gpu/NVIDIA H100"
	Devices    []Device          // in any order
	Attributes map[string]string // with units; nil = not compared
}

// Difference is one thing that is not the same for both. It is comparable.
type Difference struct {
	Kind   Kind   `json:"kind"`
	Offer  string `json:"offer"`            // resource or device group
	Device string `json:"device,omitempty"` // ID
	Work   string `json:"work,omitempty"`   // "namespace/pod container"
	Field  string `json:"field,omitempty"`  // an attribute or a variable
	Here   string `json:"here"`             // of this agent
	There  string `json:"there"`            // of the other plugin
}

// String is the difference in one line.
func (d Difference) String() string {
	subject := strings.Join(slices.DeleteFunc([]string{d.Offer, d.Device, d.Work, d.Field}, func(s string) bool { return s == "" }), " ")
	return fmt.Sprintf("%-9s %s: here %s; there %s", d.Kind, subject, d.Here, d.There)
}

// Report is one comparison. Its JSON is an interface for scripts: keys are added, never changed.
type Report struct {
	Time        time.Time    `json:"time"`
	Other       string       `json:"other"`        // where the other plugin's side is from
	Here        int          `json:"here"`         // number of devices that this agent would offer, healthy or not
	There       int          `json:"there"`        // the same of the other plugin, as far as it is known
	Same        bool         `json:"same"`         // there is no difference
	Differences []Difference `json:"differences"`  // sorted
	NotCompared []string     `json:"not_compared"` // what could not be compared, and why
}

// NewReport returns a report of differences, sorted and each once.
func NewReport(other string, here, there []Offer, differences []Difference, notCompared []string) Report {
	differences = slices.Clone(differences)
	slices.SortFunc(differences, Difference.compare)
	differences = slices.Compact(differences)
	slices.Sort(notCompared)
	return Report{
		Time: time.Now().UTC().Truncate(time.Second), Other: other, Here: count(here), There: count(there), Same: len(differences) == 0,
		Differences: append([]Difference{}, differences...), NotCompared: append([]string{}, slices.Compact(notCompared)...),
	}
}

func count(offers []Offer) (n int) {
	for _, o := range offers {
		n += len(o.Devices)
	}
	return n
}

func (d Difference) compare(o Difference) int {
	return cmp.Or(cmp.Compare(slices.Index(kinds, d.Kind), slices.Index(kinds, o.Kind)), cmp.Compare(d.Offer, o.Offer), cmp.Compare(d.Device, o.Device),
		cmp.Compare(d.Work, o.Work), cmp.Compare(d.Field, o.Field), cmp.Compare(d.Here, o.Here), cmp.Compare(d.There, o.There))
}

// Compare compares the offers of both sides. onlyHealthy: the other side lists devices that take work only.
func Compare(here, there []Offer, onlyHealthy bool) (all []Difference) {
	theirs := map[string]Offer{}
	for _, o := range there {
		theirs[o.Name] = o
	}
	for _, o := range here {
		other, both := theirs[o.Name]
		delete(theirs, o.Name)
		if !both {
			all = append(all, Difference{Kind: KindResource, Offer: o.Name, Here: devices(len(o.Devices)), There: notOffered})
			continue
		}
		all = append(all, compareDevices(o, other, onlyHealthy)...)
		all = append(all, compareAttributes(o, other)...)
	}
	for _, o := range theirs {
		all = append(all, Difference{Kind: KindResource, Offer: o.Name, Here: notOffered, There: devices(len(o.Devices))})
	}
	return all
}

func devices(n int) string { return report.Noun(n, "device") }

func compareDevices(o, other Offer, onlyHealthy bool) (all []Difference) {
	theirs := map[string]Device{}
	for _, d := range other.Devices {
		theirs[d.ID] = d
	}
	for _, d := range o.Devices {
		there, both := theirs[d.ID]
		delete(theirs, d.ID)
		difference := Difference{Offer: o.Name, Device: d.ID}
		switch {
		case !both && onlyHealthy && !d.Healthy: // both give it no work
			continue
		case !both && onlyHealthy:
			difference.Kind, difference.Here, difference.There = KindHealth, d.health(), "not allocatable: unhealthy, or not offered"
		case !both:
			difference.Kind, difference.Here, difference.There = KindDevice, "offered, "+d.health(), notOffered
		case d.Healthy != there.Healthy || (d.Remark == "") != (there.Remark == "") && d.Healthy:
			difference.Kind, difference.Here, difference.There = KindHealth, d.health(), there.health()
		}
		if difference.Kind != "" {
			all = append(all, difference)
		}
		if both && d.Place != there.Place {
			all = append(all, Difference{Kind: KindTopology, Offer: o.Name, Device: d.ID, Here: place(d), There: place(there)})
		}
	}
	for _, d := range theirs {
		all = append(all, Difference{Kind: KindDevice, Offer: o.Name, Device: d.ID, Here: notOffered, There: "offered, " + d.health()})
	}
	return all
}

func (d Device) health() string {
	switch {
	case d.Remark != "":
		return d.Remark
	case d.Healthy:
		return "healthy"
	}
	return "unhealthy"
}

func place(d Device) string { return cmp.Or(d.Place, "none") }

func compareAttributes(o, other Offer) (all []Difference) {
	if o.Attributes == nil || other.Attributes == nil {
		return nil
	}
	names := maps.Clone(o.Attributes)
	maps.Copy(names, other.Attributes)
	for name := range names {
		here, there := o.Attributes[name], other.Attributes[name]
		if here != there {
			all = append(all, Difference{Kind: KindAttribute, Offer: o.Name, Field: name, Here: cmp.Or(here, "none"), There: cmp.Or(there, "none")})
		}
	}
	return all
}
