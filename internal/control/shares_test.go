package control_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// shared gives each device a hundred replicas.
func shared(o *control.Options) {
	o.Config.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 100}}}
}

// The ID of a unit, as the orchestrators show it, selects its GPU.
func TestUnitsSelectTheirGPU(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb", "3g.40gb"), shared)
	for _, arg := range []string{
		string(coretest.Instance(1, 1)) + "::7", string(coretest.Instance(1, 1)) + "::99", string(coretest.GPU(1)) + "::0",
		strings.ToLower(string(coretest.Instance(1, 0))) + "::1", " 1:0 ", "1:1", "1",
	} {
		r.xid(1, 95)
		out := r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
			return control.Clear(ctx, path, control.ClearArgs{GPU: arg}, out)
		})
		if !strings.HasPrefix(out, "GPU 1 XID_95 (") || !strings.HasSuffix(out, "): cleared\n") {
			t.Errorf("%q: %s", arg, out)
		}
	}
	for arg, remedy := range map[string]string{
		"GPU-00000000::1":               "no such GPU", // a prefix of several UUIDs
		string(coretest.GPU(7)) + "::1": "no such GPU",
		string(coretest.GPU(1)) + "::":  "want a UUID",
		string(coretest.GPU(1)) + "::a": "want a UUID",
		string(coretest.GPU(1)) + "::-": "want a UUID",
		"1:2":                           "no such GPU",
		"0:0":                           "no such GPU",
		"1:":                            "want a UUID",
		"1:0:0":                         "want a UUID",
	} {
		err := control.Clear(t.Context(), r.path, control.ClearArgs{GPU: arg}, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), `gpu = "`+arg+`": `) || !strings.Contains(err.Error(), remedy) {
			t.Errorf("%q: %v, want %q", arg, err, remedy)
		}
	}
}

// Reports count devices, not units.
func TestReportsCountDevices(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2), shared)
	contains(t, r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Quiesce(ctx, path, control.QuiesceArgs{}, out)
	}), "devices: 2 unknown")
	contains(t, r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Inspect(ctx, path, nil, out, false)
	}), "gpu.shared, time-slicing by 100")
	report, err := control.Dial(r.path).Report(t.Context())
	if err != nil || len(report.Devices) != 2 || report.Devices[1].ID != coretest.GPU(1) || report.Devices[1].Replicas != 100 {
		t.Errorf("%v: %d devices", err, len(report.Devices))
	}
}
