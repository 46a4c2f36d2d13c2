package control

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
)

// ReloadSignal has an agent read its configuration again. The command Reload has the agent send it to itself, for pods, which have no program
// that sends signals, and for nodes on which other processes have the agent's name.
const ReloadSignal = syscall.SIGHUP

// reloadResult is empty: the configuration is read after the answer, and perhaps by another run of the agent.
type reloadResult struct{}

func (reloadResult) log(log *slog.Logger, _ string, peer slog.Attr) {
	log.Info("configuration is read again for an operator", peer)
}

func (handler) reload(context.Context, struct{}) (reloadResult, error) {
	return reloadResult{}, syscall.Kill(os.Getpid(), ReloadSignal)
}

// Reload has the agent at path read its configuration again.
func Reload(ctx context.Context, path string, out io.Writer) error {
	if _, err := call[reloadResult](ctx, path, reloadURL, struct{}{}); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, "the agent reads its configuration again; a file with a problem changes nothing: inspect shows what is offered, and each problem")
	return err
}
