package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// DRA is how the agent offers devices by Kubernetes' Dynamic Resource Allocation.
type DRA struct {
	Driver        string `json:"driver"` // "gpu.nvidia.com"
	Node          string `json:"node"`
	Registered    bool   `json:"registered"`              // with the kubelet
	Registration  string `json:"registration,omitempty"`  // why not
	HealthStreams int    `json:"healthStreams,omitempty"` // that the kubelet reads

	APIReachable bool      `json:"apiReachable"`
	Slices       int       `json:"slices"`               // ResourceSlices of this node in Kubernetes' API
	Published    int       `json:"published"`            // devices in them
	Generation   int64     `json:"generation,omitempty"` // of their pool
	LastWrite    time.Time `json:"lastWrite,omitzero"`   // of a slice, by this process
	Problem      string    `json:"problem,omitempty"`    // why the slices are not as they should be
	LastError    string    `json:"lastError,omitempty"`  // of Kubernetes' API; stays after a success
	LastErrorAt  time.Time `json:"lastErrorAt,omitzero"`
	Claims       []Claim   `json:"claims"` // prepared ones
}

// Claim is a resource claim that is prepared on this node: a pod uses its devices.
type Claim struct {
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	UID       string        `json:"uid"`
	State     string        `json:"state"` // started, complete
	Since     time.Time     `json:"since,omitzero"`
	Outdated  bool          `json:"outdated,omitempty"` // of an earlier boot: it holds nothing
	Devices   []ClaimDevice `json:"devices"`
}

// ClaimDevice is a device of a claim.
type ClaimDevice struct {
	ID          gpu.DeviceID `json:"id"`
	Device      string       `json:"device"` // its name in the slice
	Request     string       `json:"request"`
	ShareID     string       `json:"shareID,omitempty"`
	AdminAccess bool         `json:"adminAccess,omitempty"`
}

// SliceDevice is a device in a ResourceSlice, as it is published or is to be.
type SliceDevice struct {
	ID     gpu.DeviceID // "" = of no device of the report: it has left the inventory, and a claim holds it
	Name   string
	Taints []Taint
}

// Taint is a taint of a device in a ResourceSlice.
type Taint struct {
	Key    string    `json:"key"`
	Value  string    `json:"value,omitempty"`
	Effect string    `json:"effect"`
	Since  time.Time `json:"since,omitzero"`
}

// String is the taint as kubectl writes taints: "gpu.nvidia.com/xid=79:NoSchedule".
func (t Taint) String() string {
	text := t.Key
	if t.Value != "" {
		text += "=" + t.Value
	}
	return text + ":" + t.Effect
}

// WithDRA returns the report with how its devices are offered, and the devices of the slices. The devices of r are changed.
func (r Report) WithDRA(d DRA, devices []SliceDevice) Report {
	if d.Claims == nil {
		d.Claims = []Claim{}
	}
	r.DRA = &d
	for _, s := range devices {
		for i := range r.Devices {
			if r.Devices[i].ID == s.ID {
				r.Devices[i].SliceDevices = append(r.Devices[i].SliceDevices, s.Name)
				r.Devices[i].addTaints(s.Taints)
			}
		}
	}
	return r
}

// addTaints adds taints that the device has not. Shares that are devices of their own have the same ones.
func (d *Device) addTaints(taints []Taint) {
	for _, t := range taints {
		if !slices.Contains(d.Taints, t) {
			d.Taints = append(d.Taints, t)
		}
	}
}

// State describes the registration and the slices in one line.
func (d DRA) State() string {
	registration := "registered with the kubelet"
	if !d.Registered {
		registration = "not registered with the kubelet: " + cmp.Or(d.Registration, "it has not asked for the driver")
	}
	published := fmt.Sprintf("%s with %s published", Noun(d.Slices, "slice"), Noun(d.Published, "device"))
	if d.Generation > 0 {
		published += fmt.Sprintf(", generation %d", d.Generation)
	}
	if !d.LastWrite.IsZero() {
		published += ", last written " + stamp(d.LastWrite)
	}
	if d.Problem != "" {
		published += ", not up to date: " + d.Problem
	}
	return registration + "; " + published
}

// writeDRA writes the state, the taints and the prepared claims.
func (r Report) writeDRA(w io.Writer) {
	if r.DRA == nil {
		return
	}
	fmt.Fprintf(w, "DRA: driver %s, node %s: %s\n", r.DRA.Driver, r.DRA.Node, r.DRA.State())
	if d := r.DRA; d.LastError != "" {
		fmt.Fprintf(w, "last error of Kubernetes' API at %s: %s\n", stamp(d.LastErrorAt), d.LastError)
	}
	r.writeOnce(w, "taints", func(d Device) string {
		var texts []string
		for _, t := range d.Taints {
			texts = append(texts, t.String())
		}
		return strings.Join(texts, ", ")
	})
	for _, c := range r.DRA.Claims {
		fmt.Fprintf(w, "claim %s/%s: %s\n", c.Namespace, c.Name, r.describeClaim(c))
	}
}

// describeClaim is what a claim holds, and since when: "GPU 0, GPU 1, prepared since 2026-11-22T10:00:00Z".
func (r Report) describeClaim(c Claim) string {
	var parts []string
	for _, d := range c.Devices {
		text := d.Device
		if i := slices.IndexFunc(r.Devices, func(x Device) bool { return x.ID == d.ID }); i >= 0 {
			text = "GPU " + r.Devices[i].CurrentIndex()
		}
		if d.AdminAccess {
			text += " (admin access)"
		}
		parts = append(parts, text)
	}
	state := map[bool]string{true: "prepared", false: "being prepared"}[c.State == "complete"]
	if !c.Since.IsZero() {
		state += " since " + stamp(c.Since)
	}
	if c.Outdated {
		state += ", before the node was started"
	}
	return strings.Join(append(parts, state), ", ")
}
