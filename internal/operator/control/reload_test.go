package control_test

import (
	"os"
	"os/signal"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/operator/control"
)

// Reload has the process of the agent get the signal.
func TestReload(t *testing.T) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, control.ReloadSignal)
	defer signal.Stop(signals)
	r := start(t, coretest.GPUs(1))
	contains(t, r.output(control.Reload), "reads its configuration again", "inspect")
	<-signals
	contains(t, r.log.String(), "configuration is read again for an operator", "uid=")
}
