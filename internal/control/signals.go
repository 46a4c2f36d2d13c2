package control

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// Quiesce and Resume by signal, where nobody can reach the agent's socket.
const (
	QuiesceSignal = syscall.SIGUSR1
	ResumeSignal  = syscall.SIGUSR2
)

// Follow obeys signals, which the caller has asked for, until ctx ends. Others than the two above it ignores.
func Follow(ctx context.Context, signals <-chan os.Signal, a Agent, log *slog.Logger) {
	for {
		select {
		case s := <-signals:
			switch s {
			case QuiesceSignal:
				notKept, err := quiesce(ctx, a, time.Time{})
				signalled(log, "quiesce", notKept, err)
			case ResumeSignal:
				notKept, err := resume(ctx, a)
				signalled(log, "resume", notKept, err)
			}
		case <-ctx.Done():
			return
		}
	}
}

func signalled(log *slog.Logger, order string, notKept, err error) {
	if err != nil {
		log.Warn("signal not obeyed", "order", order, "error", err)
		return
	}
	args := []any{"order", order, "kept", notKept == nil}
	if notKept != nil {
		args = append(args, "reason", notKept)
	}
	log.Warn("signal obeyed", args...)
}
