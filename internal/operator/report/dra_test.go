package report_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
)

// Operators see through which API a device is offered, its names and taints in the slices, and which claims hold it since when.
func TestDRA(t *testing.T) {
	c := core.DefaultConfig()
	c.API = inventory.DRA
	state := core.NewState(c).Read(c, time.Now(), coretest.GPUs(2))
	at := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	taint := report.Taint{Key: "gpu.nvidia.com/xid", Value: "79", Effect: "NoSchedule", Since: at}
	d := report.DRA{
		Driver: "gpu.nvidia.com", Node: "node-1", Registered: true, APIReachable: true, Slices: 1, Published: 3, Problem: "Kubernetes' API: connection refused",
		Generation: 7, LastWrite: at, LastError: "429 Too Many Requests", LastErrorAt: at.Add(time.Minute),
		Claims: []report.Claim{
			{Namespace: "team", Name: "train", UID: "u1", State: "complete", Since: at, Devices: []report.ClaimDevice{{ID: coretest.GPU(0), Device: "gpu-a"}, {ID: "GPU-gone", Device: "gpu-gone", AdminAccess: true}}},
			{Namespace: "team", Name: "next", UID: "u2", State: "started", Outdated: true, Devices: []report.ClaimDevice{{ID: coretest.GPU(1)}}},
		},
	}
	r := report.DescribeState(state, c).WithDRA(d, []report.SliceDevice{
		{ID: coretest.GPU(0), Name: "gpu-a", Taints: []report.Taint{taint}},
		{ID: coretest.GPU(1), Name: "gpu-b-s0", Taints: []report.Taint{taint}}, {ID: coretest.GPU(1), Name: "gpu-b-s1", Taints: []report.Taint{taint}},
		{Name: "gpu-gone", Taints: []report.Taint{taint}},
	})
	var text bytes.Buffer
	check.NoError(t, r.WriteTable(&text))
	_, got, _ := strings.Cut(text.String(), "DRA: ")
	want := `driver gpu.nvidia.com, node node-1: registered with the kubelet; 1 slice with 3 devices published, generation 7, last written 2026-11-22T10:00:00Z, not up to date: Kubernetes' API: connection refused
last error of Kubernetes' API at 2026-11-22T10:01:00Z: 429 Too Many Requests
taints (GPU 0, 1): gpu.nvidia.com/xid=79:NoSchedule
claim team/train: GPU 0, gpu-gone (admin access), prepared since 2026-11-22T10:00:00Z
claim team/next: GPU 1, being prepared, before the node was started
`
	if diff := cmp.Diff(want, got[:min(len(got), len(want))]); diff != "" {
		t.Error(diff)
	}
	if b := r.Devices[1]; b.API != "dra" || len(b.SliceDevices) != 2 || len(b.Taints) != 1 {
		t.Errorf("%+v", b)
	}
	d.Registered, d.Registration = false, "refused by the kubelet: unsupported version"
	if state := d.State(); !strings.HasPrefix(state, "not registered with the kubelet: refused by the kubelet: unsupported version; 1 slice") {
		t.Error(state)
	}
}

// Without DRA nothing of it is in a report.
func TestWithoutDRA(t *testing.T) {
	for _, api := range []inventory.API{"", inventory.DevicePlugin, inventory.Nomad} {
		c := core.DefaultConfig()
		c.API = api
		text, err := json.Marshal(report.DescribeState(core.NewState(c).Read(c, time.Now(), coretest.GPUs(1)), c))
		check.NoError(t, err)
		for _, key := range []string{`"dra"`, `"api"`, `"sliceDevices"`, `"taints"`} {
			if bytes.Contains(text, []byte(key)) {
				t.Errorf("%q: %s in %s", api, key, text)
			}
		}
	}
}
