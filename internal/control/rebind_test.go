package control_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

func rebind(ctx context.Context, path string, out *bytes.Buffer) error {
	return control.Rebind(ctx, path, out)
}

// A GPU is removed. The rule selects the same GPU until the command rebind.
func TestRebind(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(3), func(o *control.Options) {
		o.Config.Policy.Rules = []inventory.Rule{{
			Select:  inventory.Selector{At: "policy.yaml:3: rules[0].select", Indices: []gpu.DeviceIndex{{GPU: 1, Instance: -1}}},
			Reserve: "display",
		}}
	})
	const at = "policy.yaml:3: rules[0].select: index 1 is bound to "
	contains(t, r.output(rebind), "as the driver lists them now", at+string(coretest.GPU(1))+": unchanged")
	s := coretest.GPUs(3)
	s.Devices = s.Devices[1:]
	for i := range s.Devices {
		s.Devices[i].Index = i
	}
	r.machine.Set(s)
	r.await("the policy warning", func() bool { return len(r.monitor.Current().OutdatedBindings()) > 0 })
	inspected := r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Inspect(ctx, path, nil, out, false)
	})
	contains(t, inspected, "policy warning: "+at+string(coretest.GPU(1))+"; by the present order", "run the command rebind",
		"binding: "+at+string(coretest.GPU(1)), "1 (policy: 2)")
	contains(t, r.output(rebind), at+string(coretest.GPU(2))+", previously to "+string(coretest.GPU(1)))
	if f := r.monitor.Current().OutdatedBindings(); len(f) != 0 {
		t.Errorf("drift after rebind: %q", f)
	}
	contains(t, r.log.String(), "policy position rebound by operator", "uid=")
	r.machine.FailSession(gpu.ErrDriverLost)
	r.await("the loss of the driver", func() bool { return r.monitor.Current().Driver().State != gpu.DriverReady })
	refused, ok := errors.AsType[*control.RefusedError](rebind(t.Context(), r.path, &bytes.Buffer{}))
	if !ok || refused.Status != http.StatusConflict || !strings.Contains(refused.Text, "present order of devices is unknown") {
		t.Errorf("without a driver: %v", refused)
	}
}
