package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/allocationfile"
	"github.com/tandem-gpu/tandem/internal/sources"
)

// agentName names the agent's files in the state directory.
const agentName = "k8s-gpu"

// shared is what the lives of a process share.
type shared struct {
	config *configStatus
	past   *past
	asked  <-chan os.Signal // to quiesce and to resume; what is asked between two lives waits for the next
}

// live is one life of the agent: it lasts until ctx ends. Of the settings that come from offers it takes over what
// they say about the offer.
func (a *shared) live(ctx context.Context, s settings, offers <-chan settings, log *slog.Logger) error {
	from := sources.Open(s.Health, s.Core, s.MPSMount, agentName, log)
	machine := monitor.New(opener(s), s.Core, log, a.past.on(from.Store(), from.Boot))
	machine.SetDriverProbe(func() string { return nvidia.DriverFingerprint(s.Core.Roots) })
	machine.AwaitLog() // from.Follow reports it
	adapter := kubeadapter.New(machine, kubeadapter.Options{
		KubeletSocket: s.KubeletSocket, DevRoot: s.DevRoot, MPSRoot: s.MPSRoot, Log: log,
		Reserved: machine.Reserved, Offered: a.past.resources(), Watchdog: machine.Watchdog(),
		PodResourcesSocket: s.PodResourcesSocket, AllocationStore: a.past.grantsOn(grantStore(s, log)),
	})
	socket := control.NewSocket(socketPath(s))
	status := &status{
		machine: asOffered{machine, adapter}, adapter: adapter, cfg: s.Core, from: from, config: a.config,
		socket: socket, port: &port{address: s.HTTPAddress},
	}
	log.Info("k8s-gpu "+versionText(), "kubelet", s.KubeletSocket, "driver-root", s.Core.Roots.Driver,
		"mig-strategy", s.Core.MIG, "health-mode", s.Core.Health.Mode)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { from.Host().Run(ctx, machine); return nil })
	group.Go(func() error {
		from.Host().AwaitFirst(ctx)
		return machine.Run(ctx)
	})
	group.Go(func() error { return adapter.Run(ctx) })
	group.Go(func() error { from.Follow(ctx, machine); return nil })
	group.Go(func() error { adopt(ctx, machine, offers); return nil })
	group.Go(func() error {
		socket.Serve(ctx, status.machine, control.Options{
			Config: s.Core, Simulation: s.Health.Simulation, Warnings: status.notes, Endpoints: status.endpoints, Log: log,
		})
		return nil
	})
	group.Go(func() error { control.Follow(ctx, a.asked, machine, log); return nil })
	group.Go(func() error { return machine.Watchdog().Watch(ctx, log, monitor.TaskName) })
	group.Go(func() error { status.port.serve(ctx, status.handler(), log); return nil })
	err := group.Wait()
	a.past.offers(adapter.Offered())
	if errors.Is(err, core.ErrDriverStale) {
		return fmt.Errorf("%w; a new process is needed, and the DaemonSet starts one", err)
	}
	log.Info("stopped")
	return err
}

// asOffered is the machine as the kubelet is told of it: operators see what is withheld, and why.
type asOffered struct {
	*monitor.Monitor
	adapter *kubeadapter.Adapter
}

// State implements control.Agent.
func (m asOffered) State() core.State {
	s := m.Monitor.State()
	s.Inventory = m.adapter.Withhold(s.Inventory)
	return s
}

// grantStore keeps which device IDs were handed out; nil without a state directory.
func grantStore(s settings, log *slog.Logger) kubeadapter.AllocationStore {
	if s.Health.StateDir == "" {
		return nil // not a nil *File: that would be a GrantStore
	}
	return allocationfile.Open(s.Health.StateDir, agentName, log)
}

// adopt has the machine offer what the latest settings say, until ctx ends.
func adopt(ctx context.Context, machine *monitor.Monitor, offers <-chan settings) {
	for {
		select {
		case s := <-offers:
			_ = machine.ApplyPolicy(ctx, s.Core) // it fails when ctx ends, and with it the life
		case <-ctx.Done():
			return
		}
	}
}

func socketPath(s settings) string { return control.Path(s.Health.StateDir, agentName) }

// opener returns how a session is opened: beneath the mounted driver root, else where NVIDIA's
// container runtime puts the library.
func opener(s settings) func() (monitor.Session, error) {
	return func() (monitor.Session, error) {
		session, err := nvidia.Open(nvidia.Options{Roots: s.Core.Roots})
		if s.FallbackDriver && errors.Is(err, core.ErrNoDriver) {
			roots := s.Core.Roots
			roots.Driver = ""
			other, otherErr := nvidia.Open(nvidia.Options{Roots: roots})
			if !errors.Is(otherErr, core.ErrNoDriver) || errors.Is(otherErr, core.ErrUnloaded) && !errors.Is(err, core.ErrUnloaded) {
				session, err = other, otherErr
			}
		}
		if err != nil {
			return nil, err // not session: a nil *Session would be a Session
		}
		return session, nil
	}
}
