package kubestatus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// Driver is the driver as the kubelet sees it; *dra.Adapter is one. Its methods are safe for concurrent use.
type Driver interface {
	Alive(context.Context) error // nil if its socket answers
	Ready() error                // nil if the kubelet has registered it
	Stats() dra.Stats
	Prepared() []prepared.Claim
}

// Slices are the published ones; *publisher.Publisher has them. Its methods are safe for concurrent use.
type Slices interface {
	Published() publisher.Status
	Ready() error // nil if they were complete, and nothing but a server that does not answer keeps them from being it now
}

// DRA is a driver with its slices as the HTTP server and the report show them. Its methods are safe for concurrent use.
type DRA struct {
	Name    string // of the driver
	Node    string
	BootID  string // claims of another boot hold nothing
	Driver  Driver
	Slices  Slices
	Plugins DevicePlugins // of the same process: for GPUs that have not moved, and endpoints without devices

	Durations prometheus.Collector // of the kubelet's calls

	Devices func() []kubeapi.Device // that the slices are to have; nil = not known yet
	Refused func() string           // why containers of the node never get a device; "" = they may
}

var (
	registered    = set.Gauge("dra_registered", "1 while the kubelet has the DRA driver registered.")
	registrations = set.Counter("dra_registrations_total", "Registrations of the DRA driver that the kubelet confirmed.")
	refusals      = set.Counter("dra_registration_errors_total", "Registrations of the DRA driver that the kubelet refused.")
	claimDuration = set.Histogram("dra_request_duration_seconds", "Duration of the kubelet's calls, for each claim.", "method")
	errorsTotal   = set.Counter("dra_request_errors_total", "Claims for which a call of the kubelet failed.", "method")
	claims        = set.Gauge("dra_prepared_claims", "Resource claims that are prepared, or being prepared, in this boot of the node.")
	streams       = set.Gauge("dra_health_streams", "Health streams that the kubelet has open.")
	sliceCount    = set.Gauge("dra_slices", "ResourceSlices of this node in Kubernetes' API.")
	deviceCount   = set.Gauge("dra_slice_devices", "Devices in the ResourceSlices of this node.")
	upToDate      = set.Gauge("dra_slices_up_to_date", "1 while the ResourceSlices have the devices and taints that they should have.")
	reachable     = set.Gauge("dra_api_reachable", "1 while Kubernetes' API answers.")
	writes        = set.Counter("dra_slice_writes_total", "Writes of ResourceSlices, by verb and result.", "verb", "result")
)

// The methods of the kubelet's calls.
const (
	prepareMethod   = "NodePrepareResources"
	unprepareMethod = "NodeUnprepareResources"
)

// NewClaimDurations returns the durations that a driver reports.
func NewClaimDurations() metrics.Durations {
	return metrics.NewDurations(claimDuration, prepareMethod, unprepareMethod)
}

// Describe implements prometheus.Collector.
func (DRA) Describe(ch chan<- *prometheus.Desc) { set.Describe(ch) }

// Collect implements prometheus.Collector.
func (v DRA) Collect(ch chan<- prometheus.Metric) {
	v.Plugins.Collect(ch)
	p := metric.NewSamples(ch)
	v.Durations.Collect(ch)
	s, published := v.Driver.Stats(), v.Slices.Published()
	p.AddBool(registered, s.Registered)
	p.Add(registrations, float64(s.Registrations))
	p.Add(refusals, float64(s.RegistrationErrors))
	p.Add(errorsTotal, float64(s.PrepareErrors), prepareMethod)
	p.Add(errorsTotal, float64(s.UnprepareErrors), unprepareMethod)
	p.Add(claims, float64(s.Claims))
	p.Add(streams, float64(s.HealthStreams))
	p.Add(sliceCount, float64(published.Slices))
	p.Add(deviceCount, float64(published.Devices))
	p.AddBool(upToDate, v.problem() == "")
	p.AddBool(reachable, published.Reachable)
	for _, w := range published.Writes {
		p.Add(writes, float64(w.Count), w.Verb, w.Result)
	}
}

// Resources implements status.Adapter.
func (v DRA) Resources() []string { return v.Plugins.Resources() }

// ResourceOf implements status.Adapter: the name by which pods request a unit without a claim.
func (v DRA) ResourceOf(u inventory.Unit) string { return v.Plugins.ResourceOf(u) }

// Endpoints returns the kubelet's endpoints, for the debug view: the driver's first.
func (v DRA) Endpoints() []report.Endpoint {
	s := v.Driver.Stats()
	own := report.Endpoint{
		Resource: "driver " + v.Name, Status: cmp.Or(s.Reason, "registered"), Since: s.Since, Socket: s.Socket,
		Registrations: s.Registrations, Responses: s.HealthMessages, LastError: s.LastError, LastErrorAt: s.LastErrorAt,
	}
	return append([]report.Endpoint{own}, v.Plugins.Endpoints()...)
}

// Alive implements status.Adapter.
func (v DRA) Alive(ctx context.Context) error {
	return errors.Join(v.Driver.Alive(ctx), v.Plugins.Alive(ctx))
}

// Ready implements status.Adapter. The driver is ready when the kubelet has registered it and the slices are as they should be: without
// slices no pod comes to the node.
func (v DRA) Ready() (text string, idle bool, err error) {
	if err := v.Driver.Ready(); err != nil {
		return "", false, fmt.Errorf("DRA driver %s: %w", v.Name, err)
	}
	pluginText, pluginIdle, pluginErr := v.Plugins.Ready()
	plugins := len(v.Plugins.Endpoints()) > 0
	if pluginErr != nil && plugins {
		return "", false, pluginErr
	}
	if refused := v.refused(); refused != "" {
		return "", false, errors.New(refused)
	}
	if err := v.Slices.Ready(); err != nil {
		return "", false, fmt.Errorf("ResourceSlices: %w", err)
	}
	published := v.Slices.Published()
	text = fmt.Sprintf("DRA driver %s is registered with the kubelet; %d devices in %d ResourceSlices", v.Name, published.Devices, published.Slices)
	switch {
	case plugins:
		text += "; " + pluginText
	case pluginIdle && published.Devices == 0:
		return text + "; " + pluginText, true, nil
	}
	return text, false, nil
}

// problem is why the slices are not as they should be; "" if they are.
func (v DRA) problem() string {
	return cmp.Or(v.refused(), v.Slices.Published().Problem)
}

func (v DRA) refused() string {
	if why := v.Refused(); why != "" {
		return "no device takes new work, because containers of this node would get none: " + why
	}
	return ""
}

// Extend adds the driver to a report.
func (v DRA) Extend(r report.Report) report.Report {
	s, published := v.Driver.Stats(), v.Slices.Published()
	d := report.DRA{
		Driver: v.Name, Node: v.Node, Registered: s.Registered, Registration: s.Reason, HealthStreams: s.HealthStreams,
		APIReachable: published.Reachable, Slices: published.Slices, Published: published.Devices, Problem: v.problem(),
		Generation: published.Generation, LastWrite: published.LastWrite, LastError: published.LastError, LastErrorAt: published.LastErrorAt,
	}
	for _, c := range v.Driver.Prepared() {
		d.Claims = append(d.Claims, v.describeClaim(c))
	}
	var devices []report.SliceDevice
	for _, one := range v.Devices() {
		devices = append(devices, describeDevice(r, one))
	}
	return r.WithDRA(d, devices)
}

func (v DRA) describeClaim(c prepared.Claim) report.Claim {
	claim := report.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID, State: string(c.State), Since: c.Since, Outdated: !c.Holds(v.BootID), Devices: []report.ClaimDevice{}}
	for _, r := range c.Results {
		id, _ := r.Unit.Split()
		claim.Devices = append(claim.Devices, report.ClaimDevice{ID: id, Device: r.Device, Request: r.Request, ShareID: r.ShareID, AdminAccess: r.Admin})
	}
	return claim
}

// describeDevice finds the device of the report that a slice has under a name: its UUID in lower case, followed by "-sN" for a share.
func describeDevice(r report.Report, d kubeapi.Device) report.SliceDevice {
	one := report.SliceDevice{Name: d.Name}
	for _, x := range r.Devices {
		if rest, ok := strings.CutPrefix(d.Name, strings.ToLower(string(x.ID))); ok && (rest == "" || strings.HasPrefix(rest, "-s")) {
			one.ID = x.ID
		}
	}
	for _, t := range d.Taints {
		one.Taints = append(one.Taints, report.Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect), Since: t.TimeAdded})
	}
	return one
}
