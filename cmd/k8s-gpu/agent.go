package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/footprint"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// serve runs the agent until ctx ends.
func serve(ctx context.Context, s settings, log *slog.Logger) error {
	footprint.Reduce()
	machine := monitor.New(opener(s), s.core, log, nil)
	adapter := kubeadapter.New(machine, kubeadapter.Options{
		KubeletSocket: s.kubeletSocket, MIG: s.core.MIG, DevRoot: s.devRoot, Log: log,
	})
	log.Info("k8s-gpu "+versionText(), "kubelet", s.kubeletSocket, "driver-root", s.core.Roots.Driver, "mig-strategy", s.core.MIG)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return machine.Run(ctx) })
	group.Go(func() error { return adapter.Run(ctx) })
	if s.httpAddress != "" {
		status := &status{machine: machine, adapter: adapter, mig: s.core.MIG}
		group.Go(func() error { return listen(ctx, s.httpAddress, status.handler(), log) })
	}
	err := group.Wait()
	if errors.Is(err, core.ErrDriverStale) {
		return fmt.Errorf("%w; a new process is needed, and the DaemonSet starts one", err)
	}
	log.Info("stopped")
	return err
}

// opener returns how a session is opened: beneath the mounted driver root, else where NVIDIA's
// container runtime puts the library.
func opener(s settings) func() (monitor.Session, error) {
	return func() (monitor.Session, error) {
		session, err := nvidia.Open(nvidia.Options{Roots: s.core.Roots})
		if s.fallbackDriver && errors.Is(err, core.ErrNoDriver) {
			roots := s.core.Roots
			roots.Driver = ""
			if other, otherErr := nvidia.Open(nvidia.Options{Roots: roots}); !errors.Is(otherErr, core.ErrNoDriver) {
				session, err = other, otherErr
			}
		}
		if err != nil {
			return nil, err // not session: a nil *Session would be a Session
		}
		return session, nil
	}
}
