package control

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// Signals for Quiesce and Resume, for use where the control socket can't be reached.
const (
	QuiesceSignal = syscall.SIGUSR1
	ResumeSignal  = syscall.SIGUSR2
)

// Follow executes the commands of the two signals above until ctx ends, and ignores other signals. The caller has
// registered the channel with signal.Notify.
func Follow(ctx context.Context, signals <-chan os.Signal, a Agent, log *slog.Logger) {
	for {
		select {
		case s := <-signals:
			switch s {
			case QuiesceSignal:
				saveErr, err := quiesce(ctx, a, time.Time{})
				logSignal(log, "quiesce", saveErr, err)
			case ResumeSignal:
				saveErr, err := resume(ctx, a)
				logSignal(log, "resume", saveErr, err)
			}
		case <-ctx.Done():
			return
		}
	}
}

func logSignal(log *slog.Logger, command string, saveErr, err error) {
	if err != nil {
		log.Warn("command by signal failed", "command", command, "error", err)
		return
	}
	log.Warn("command by signal executed", append(newPersistence(saveErr).attrs(), "command", command)...)
}
