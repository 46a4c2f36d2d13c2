package agents

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
)

// With go-plugin's cookie nomad-gpu is a plugin whatever the arguments, and its first byte on stdout is the handshake's.
func TestHandshake(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{nil, {"help"}, {"inspect", "--json"}, {"nonsense", "-x"}} {
		cmd := exec.Command(binaries.Path(t, nomadGPU), args...)
		cmd.Env = append(os.Environ(), base.Handshake.MagicCookieKey+"="+base.Handshake.MagicCookieValue,
			"PLUGIN_PROTOCOL_VERSIONS=2", "TMPDIR="+coretest.ShortDir(t), "NOMAD_LOG_LEVEL=trace", "GRPC_GO_LOG_SEVERITY_LEVEL=info")
		stdout, err := cmd.StdoutPipe()
		check.NoError(t, err, cmd.Start())
		line := make([]byte, 256)
		n, err := stdout.Read(line)
		check.NoError(t, err)
		if got := string(line[:n]); !strings.HasPrefix(got, "1|2|unix|") || !strings.HasSuffix(got, "|grpc|\n") {
			t.Errorf("%q: stdout begins with %q", args, got)
		}
		check.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
	}
}

// Nothing is on disk before Nomad asks for devices: most processes only check the configuration, and end.
func TestConfigurationLeavesNoFile(t *testing.T) {
	t.Parallel()
	a := newAgent(t, nomadGPU, "t4", nil)
	a.launch()
	for range 2 {
		a.configure()
	}
	a.stop()
	if _, err := os.Stat(a.state); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want nothing", a.state, err)
	}
}

// Nomad may set a configuration as often as it likes, the same or another. The streams stay, the devices change, and nothing of
// the former configurations remains.
func TestManyConfigurations(t *testing.T) {
	t.Parallel()
	a := newAgent(t, nomadGPU, "h100x8", nil)
	a.startHealthy()
	setTwice := func(ignored ...string) {
		t.Helper()
		a.settings["ignored_gpu_ids"] = ignored
		a.configure()
		a.configure()
		a.healthy(8-len(ignored), 8-len(ignored))
	}
	size := func(list string) int { return len(entries(t, fmt.Sprintf("/proc/%d/%s", a.cmd.Process.Pid, list))) }
	setTwice(a.driver.UUID(3))
	setTwice()
	threads, files := size("task"), size("fd")
	for range 4 {
		setTwice(a.driver.UUID(3))
		setTwice()
	}
	const slack = 4 // the runtime makes threads; a file may be a history that is being written
	a.await("as many files and threads as before", func() bool { return size("fd") <= files+slack && size("task") <= threads+slack })
	a.stop()
}

// SIGHUP makes the devices be read, long before the next reading.
func TestHangupReadsTheMachine(t *testing.T) {
	t.Parallel()
	a := newAgent(t, nomadGPU, "h100x8", map[string]any{"fingerprint_period": "1h", "health_period": "1h"})
	a.startHealthy()
	const call = "nvmlDeviceGetCount"
	time.Sleep(time.Second) // readings after the start
	before := a.calls(call)
	a.signal(syscall.SIGHUP)
	a.await("another reading", func() bool { return a.calls(call) > before })
}
