package main

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// maintain takes what is asked of a machine by signal, until ctx ends: SIGUSR1 to leave the driver alone,
// SIGUSR2 to take it up again. What is asked between two lives waits for the next.
func maintain(ctx context.Context, asked <-chan os.Signal, machine *monitor.Monitor, log *slog.Logger) {
	for {
		select {
		case s := <-asked:
			if s == syscall.SIGUSR1 {
				quiesce(ctx, machine, log)
			} else {
				resume(ctx, machine, log)
			}
		case <-ctx.Done():
			return
		}
	}
}

func quiesce(ctx context.Context, machine *monitor.Monitor, log *slog.Logger) {
	if err := machine.Quiesce(ctx, time.Time{}); err != nil && ctx.Err() == nil {
		log.Error("SIGUSR1", "error", err)
	}
}

func resume(ctx context.Context, machine *monitor.Monitor, log *slog.Logger) {
	if err := machine.Resume(ctx); err != nil && ctx.Err() == nil {
		log.Warn("SIGUSR2", "error", err)
	}
}
