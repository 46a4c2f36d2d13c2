package kubestatus

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// driver, slicesOf and plugin are what a test sets.
type driver struct {
	ready  error
	stats  dra.Stats
	claims []prepared.Claim
}

func (d driver) Alive(context.Context) error         { return nil }
func (d driver) Ready() error                        { return d.ready }
func (d driver) Stats() dra.Stats                    { return d.stats }
func (d driver) Prepared() []prepared.Claim          { return d.claims }
func (s slicesOf) Published() publisher.Status       { return s.status }
func (s slicesOf) Ready() error                      { return s.ready }
func (p plugin) Alive(context.Context) error         { return nil }
func (p plugin) Ready() error                        { return p.err }
func (p plugin) Stats() []deviceplugin.ResourceStats { return p.stats }

type slicesOf struct {
	status publisher.Status
	ready  error
}

type plugin struct {
	err   error
	stats []deviceplugin.ResourceStats
}

// plugins are device plugins with endpoints.
func plugins(err error, endpoints ...string) DevicePlugins {
	p := plugin{err: err}
	for _, name := range endpoints {
		p.stats = append(p.stats, deviceplugin.ResourceStats{Resource: name})
	}
	return DevicePlugins{Plugins: p}
}

// The agent is ready when the kubelet has the driver, and whoever schedules has its devices; endpoints of device plugins count if there are
// any. A node without a GPU is idle.
func TestReady(t *testing.T) {
	published := slicesOf{status: publisher.Status{Slices: 1, Devices: 8}}
	notOffered := plugins(errors.New("the devices are not offered yet")) // they are, by the driver
	for name, c := range map[string]struct {
		view DRA
		idle bool
		text string
		err  string
	}{
		"not registered":   {DRA{Driver: driver{ready: errors.New("the kubelet has not asked")}, Slices: published, Plugins: notOffered}, false, "", "DRA driver x: the kubelet has not asked"},
		"no CDI":           {DRA{Driver: driver{}, Slices: published, Plugins: notOffered, Refused: func() string { return "old runtime" }}, false, "", "no device takes new work, because containers of this node would get none: old runtime"},
		"not published":    {DRA{Driver: driver{}, Slices: slicesOf{ready: errors.New("forbidden")}, Plugins: notOffered}, false, "", "ResourceSlices: forbidden"},
		"ready":            {DRA{Driver: driver{}, Slices: published, Plugins: notOffered}, false, "8 devices in 1 ResourceSlices", ""},
		"empty endpoint":   {DRA{Driver: driver{}, Slices: published, Plugins: plugins(nil, "nvidia.com/gpu")}, false, "; offered to the kubelet: nvidia.com/gpu", ""},
		"endpoint refused": {DRA{Driver: driver{}, Slices: published, Plugins: plugins(errors.New("nvidia.com/gpu: refused"), "nvidia.com/gpu")}, false, "", "nvidia.com/gpu: refused"},
		"no GPU":           {DRA{Driver: driver{}, Slices: slicesOf{status: publisher.Status{Slices: 1}}, Plugins: plugins(&deviceplugin.IdleError{Reason: "no GPU"})}, true, "; no GPU", ""},
	} {
		v := c.view
		v.Name = "x"
		if v.Refused == nil {
			v.Refused = func() string { return "" }
		}
		text, idle, err := v.Ready()
		if idle != c.idle || !strings.Contains(text, c.text) || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%s: %q, %v, %v", name, text, idle, err)
		}
	}
}

// The report has the claims with their devices, and finds the device of a name in a slice, also of a share.
func TestDescribe(t *testing.T) {
	at := time.Unix(1, 0)
	name := strings.ToLower(string(coretest.GPU(0)))
	v := DRA{
		Name: "x", Node: "node-1", BootID: "now", Refused: func() string { return "" }, Slices: slicesOf{status: publisher.Status{Reachable: true, Slices: 1, Devices: 3}},
		Driver: driver{stats: dra.Stats{Registered: true}, claims: []prepared.Claim{
			{Namespace: "team", Name: "train", BootID: "now", State: prepared.Complete, Since: at, Results: []prepared.Result{{Device: name, Unit: inventory.UnitID(coretest.GPU(0)) + "::1", Request: "gpu"}}},
			{Namespace: "team", Name: "old", BootID: "before"},
		}},
		Devices: func() []kubeapi.Device {
			return []kubeapi.Device{
				{Name: name, Taints: []kubeapi.DeviceTaint{{Key: "gpu.nvidia.com/xid", Value: "79", Effect: kubeapi.NoSchedule, TimeAdded: at}}},
				{Name: strings.ToLower(string(coretest.GPU(1))) + "-s1"}, {Name: "gone"},
			}
		},
	}
	r := v.Extend(report.Report{Devices: []report.Device{{ID: coretest.GPU(0)}, {ID: coretest.GPU(1)}}})
	if d := r.Devices[0]; len(d.Taints) != 1 || d.Taints[0].String() != "gpu.nvidia.com/xid=79:NoSchedule" || d.SliceDevices[0] != name {
		t.Errorf("%+v", d)
	}
	if d := r.Devices[1]; len(d.SliceDevices) != 1 || !strings.HasSuffix(d.SliceDevices[0], "-s1") || d.Taints != nil {
		t.Errorf("%+v", d)
	}
	c := r.DRA.Claims
	if len(c) != 2 || c[0].Devices[0].ID != coretest.GPU(0) || c[0].Outdated || !c[1].Outdated || r.DRA.Problem != "" || !r.DRA.Registered {
		t.Errorf("%+v", r.DRA)
	}
}
