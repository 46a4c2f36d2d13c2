// Package prepared keeps on disk what a DRA driver has prepared: one file for each claim. Unprepare gets only the name and UID of a
// claim, and works from these files without API server, driver or GPU.
package prepared

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Version is the version of the format. A file of a later version is read, too: what this one has keeps its meaning.
const Version = 1

// State is how far the preparation of a claim is.
type State string

// The states of a claim.
const (
	Started  State = "started"  // the kubelet has no answer so far; the device is held
	Complete State = "complete" // what containers need is on disk
)

// Claim is a prepared claim. Its JSON encoding is the format of the file: names in it do not change, and unknown fields are kept out of
// the way of later versions.
type Claim struct {
	Version   int    `json:"version"`
	BootID    string `json:"bootID"` // of another boot: the claim holds no device any more
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	State     State  `json:"state"`

	Since time.Time `json:"since,omitzero"` // Complete, by the wall clock

	Pod     *Pod     `json:"pod,omitempty"` // whose memory is limited; nil = no result has a limit that was set, or is to be
	Results []Result `json:"results"`

	Unknown map[string]json.RawMessage `json:"-"` // fields of a later version, which stay in the file
}

// Pod is the pod of a claim, in its namespace.
type Pod struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// Result is one device of a claim.
type Result struct {
	Request string `json:"request"` // without the name of the subrequest; "" = of all requests
	Pool    string `json:"pool"`
	Device  string `json:"device"` // its name in the slice
	ShareID string `json:"shareID,omitempty"`
	Admin   bool   `json:"adminAccess,omitempty"` // holds nothing

	Unit      inventory.UnitID `json:"unit"`
	At        gpu.Placement    `json:"at"`
	Exclusive bool             `json:"exclusive,omitempty"`
	Sharing   string           `json:"sharing,omitempty"`   // of a device that is not exclusive: "time-slicing", "mps"
	Shares    int              `json:"shares,omitempty"`    // of such a device that the claim has; 0 = 1
	Memory    uint64           `json:"memory,omitempty"`    // bytes to which the pod is limited for this result; 0 = it is not
	MustLimit bool             `json:"mustLimit,omitempty"` // of Memory: without the limit there is no answer (inventory.LimitRequired)
	MPS       *MPS             `json:"mps,omitempty"`       // the container is a client of an MPS control daemon
	CDI       []string         `json:"cdi"`                 // qualified names
	Published json.RawMessage  `json:"published,omitempty"` // the device as it was in the slice: kubeapi.Device without taints
}

// MPS is what a client of an MPS control daemon gets.
type MPS struct {
	Pool string   `json:"pool"`          // whose daemon it is
	Env  []string `json:"env,omitempty"` // limits: "NAME=value"
}

// Holds reports whether the claim holds devices in this boot of the node. One of which that is not known, because the ID of the boot could not
// be read, does.
func (c Claim) Holds(bootID string) bool {
	return c.BootID == bootID || c.BootID == "" || bootID == ""
}

// Holders returns the claim as a holder of each of its devices. Admin access holds nothing.
func (c Claim) Holders() (all []holders.Holder) {
	work := holders.Work{Orchestrator: holders.Kubernetes, Namespace: c.Namespace, ID: c.UID, Claim: c.Name}
	for i := range c.Results {
		if r := &c.Results[i]; !r.Admin {
			h := r.Holder()
			h.Work = work
			all = append(all, h)
		}
	}
	return all
}

// Limited is the pod of a claim as work, and to how many bytes the claim limits it on each GPU: all its results of a GPU together. Without limits there is none.
func (c Claim) Limited() (pod holders.Work, bytes map[gpu.DeviceID]uint64) {
	if c.Pod == nil {
		return pod, nil
	}
	bytes = map[gpu.DeviceID]uint64{}
	for i := range c.Results {
		if r := &c.Results[i]; r.Memory > 0 {
			bytes[r.At.GPU] += r.Memory
		}
	}
	return holders.Work{Orchestrator: holders.Kubernetes, Namespace: c.Namespace, Name: c.Pod.Name, ID: c.Pod.UID, Claim: c.Name}, bytes
}

// Holder returns what has the result, without its work. A share that is a device of its own has its unit; one of a device that several claims
// may have has not: the scheduler counts these.
func (r Result) Holder() holders.Holder {
	device, _ := r.Unit.Split()
	h := holders.Holder{API: inventory.DRA, Device: device, At: r.At, Shares: r.Shares}
	if !r.Exclusive {
		h.Sharing = cmp.Or(r.Sharing, "not known")
	}
	if _, number, ok := strings.Cut(string(r.Unit), "::"); ok && strings.HasSuffix(r.Device, "-s"+number) {
		h.Unit = r.Unit
	}
	return h
}

// HasSpec reports whether the claim has a CDI specification of its own.
func (c Claim) HasSpec() bool {
	return slices.ContainsFunc(c.Results, func(r Result) bool { return r.MPS != nil })
}

// String returns the claim for messages: "claim NAMESPACE/NAME".
func (c Claim) String() string { return "claim " + c.Namespace + "/" + c.Name }

// fields is Claim without its methods.
type fields Claim

// MarshalJSON encodes the claim with its unknown fields.
func (c Claim) MarshalJSON() ([]byte, error) {
	text, err := json.Marshal(fields(c))
	if err != nil || len(c.Unknown) == 0 {
		return text, err
	}
	all := maps.Clone(c.Unknown)
	if err := json.Unmarshal(text, &all); err != nil { // what is known replaces what is not
		return nil, err
	}
	return json.Marshal(all)
}

// UnmarshalJSON decodes a claim and keeps what it does not know.
func (c *Claim) UnmarshalJSON(text []byte) error {
	var known fields
	if err := json.Unmarshal(text, &known); err != nil {
		return err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return err
	}
	for _, name := range []string{"version", "bootID", "namespace", "name", "uid", "state", "since", "pod", "results", "checksum"} {
		delete(all, name)
	}
	*c = Claim(known)
	if len(all) > 0 {
		c.Unknown = all
	}
	return nil
}
