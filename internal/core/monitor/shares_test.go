package monitor_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// A device is logged and counted once, however many share it.
func TestSharesAreOneDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shares := func(n int) core.Config {
			cfg := core.DefaultConfig()
			cfg.Policy.Rules = []core.Rule{{Sharing: &core.Sharing{Mode: core.TimeSlicing, Replicas: n}}}
			return cfg
		}
		var log bytes.Buffer
		machine := coretest.NewMachine(coretest.GPUs(2))
		m := monitor.New(machine.Open, shares(100), slog.New(slog.NewTextHandler(&log, nil)), nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		said := func(what string, times int) {
			t.Helper()
			if n := strings.Count(log.String(), what); n != times {
				t.Errorf("%q %d times, want %d, in\n%s", what, n, times, log.String())
			}
		}
		synctest.Wait()
		if n := m.Current().Len(); n != 200 {
			t.Errorf("%d units", n)
		}
		said(`msg="device found"`, 2)
		said(`pool=gpu.shared sharing="time-slicing by 100"`, 2)
		machine.Raise(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: 95})
		synctest.Wait()
		said(`msg="device unhealthy" id=`+string(coretest.GPU(1))+" ", 1)
		if n := m.Stats().Transitions; len(n) != 2 || n[coretest.GPU(0)] != 0 || n[coretest.GPU(1)] != 1 {
			t.Errorf("transitions: %v", n)
		}
		if err := m.ApplyPolicy(ctx, shares(50)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		said(`msg="device offered anew"`, 2)
		said(`sharing="time-slicing by 50" was="gpu.shared time-slicing by 100"`, 2)
		said(`msg="device gone"`, 0)
		said("WITHDRAWN", 0)
		if n := m.Stats().Transitions; n[coretest.GPU(0)] != 0 || n[coretest.GPU(1)] != 1 {
			t.Errorf("transitions: %v", n)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
