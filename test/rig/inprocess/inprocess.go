// Package inprocess has what tests need that run a monitor of a simulated machine in their own process, with or without adapters.
package inprocess

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Roots are the folders of a simulated machine.
func Roots(m *simdriver.Machine) core.Roots {
	return core.Roots{Driver: m.Root, Dev: m.Root, Sys: m.Root + "/sys", Proc: m.Root + "/proc"}
}

// Read reads a machine once. A process can have one machine at a time.
func Read(t testing.TB, m *simdriver.Machine) gpu.Snapshot {
	t.Helper()
	s, err := nvidia.Open(nvidia.Options{Roots: Roots(m)})
	check.NoError(t, err)
	snapshot, err := s.Snapshot()
	check.NoError(t, errors.Join(err, s.Close()))
	return snapshot
}

// Monitor makes a monitor that logs nothing. Each session of the driver is passed to use, which returns what the monitor gets.
func Monitor(cfg core.Config, o nvidia.Options, use func(*nvidia.Session) monitor.Session) *monitor.Monitor {
	o.Roots = cfg.Roots
	return monitor.New(func() (monitor.Session, error) {
		s, err := nvidia.Open(o)
		if err != nil {
			return nil, err // not a nil *Session in an interface
		}
		return use(s), nil
	}, cfg, slog.New(slog.DiscardHandler), nil)
}

// Run runs a monitor in a goroutine of running.
func Run(ctx context.Context, t testing.TB, m *monitor.Monitor, running *sync.WaitGroup) {
	running.Go(func() {
		if err := m.Run(ctx); err != nil {
			t.Error("monitor:", err)
		}
	})
}

// startKubelet starts a kubelet without plugins, whose pods hold no device, and returns it with the socket of its pod-resources API.
func startKubelet(t testing.TB) (k *kubelettest.Kubelet, podResources string) {
	t.Helper()
	dir := coretest.ShortDir(t)
	k = kubelettest.New(dir)
	check.NoError(t, k.Start())
	t.Cleanup(k.Stop)
	podResources = filepath.Join(dir, "pod-resources", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(podResources)
	check.NoError(t, err)
	t.Cleanup(pods.Close)
	return k, podResources
}

// Nomad serves a source to Nomad.
func Nomad(ctx context.Context, t testing.TB, src nomadadapter.Source) device.DevicePlugin {
	t.Helper()
	source := func(context.Context, nomadadapter.Settings, *slog.Logger) nomadadapter.Source { return src }
	return nomadtest.Serve(t, nomadadapter.New(ctx, "2.0.0", source, hclog.NewNullLogger()))
}
