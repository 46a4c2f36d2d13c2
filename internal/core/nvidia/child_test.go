package nvidia

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A process keeps the library that it has loaded first, so a test that depends on the library runs in a process of its own: this
// test binary again, with the name of a scenario.
const (
	childRoot     = "TANDEM_TEST_DRIVER_ROOT"
	childScenario = "TANDEM_TEST_SCENE"
)

var scenarios = map[string]func(*simdriver.Machine) error{"use all": useAll}

func TestMain(m *testing.M) {
	root := os.Getenv(childRoot)
	if root == "" {
		os.Exit(m.Run())
	}
	machine, err := simdriver.Open(root)
	if err == nil {
		err = scenarios[os.Getenv(childScenario)](machine)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runScenario runs a scenario in a process of its own.
func runScenario(t *testing.T, root, scenario string, env ...string) (output string, err error) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self)
	cmd.Env = append(os.Environ(), childRoot+"="+root, childScenario+"="+scenario, "SIMDRIVER_MACHINE="+root)
	cmd.Env = append(cmd.Env, env...)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// install makes a machine for a child process, with a library file of its own.
func install(t *testing.T, name string) *simdriver.Machine {
	t.Helper()
	text, err := simdriver.Text(name)
	must(t, err)
	m, err := simdriver.InstallText(t.Context(), t.TempDir(), text)
	if errors.Is(err, simdriver.ErrNoCompiler) {
		t.Skip("SKIPPED: ", err)
	}
	must(t, err)
	return m
}

// outcome is the result of Open.
type outcome string

const (
	opens  outcome = "opened"
	absent outcome = "no driver"
	exits  outcome = "new process needed"
	fails  outcome = "failed"
)

// tryOpen opens the driver twice: the error must be the same both times.
func tryOpen(m *simdriver.Machine, root string, want outcome, texts ...string) error {
	var text string
	for range 2 {
		r := roots(m)
		r.Driver = root
		s, err := Open(Options{Roots: r})
		got := opens
		switch {
		case err == nil:
			err = useSession(s)
		case errors.Is(err, gpu.ErrDriverStale):
			got = exits
		case errors.Is(err, gpu.ErrNoDriver):
			got = absent
		case errors.Is(err, gpu.ErrDriverLost):
			got = "driver lost before it was opened"
		default:
			got = fails
		}
		if got != want || got == opens && err != nil {
			return fmt.Errorf("%s: %w; want: %s", got, err, want)
		}
		if err == nil {
			continue
		}
		for _, part := range texts {
			if !strings.Contains(err.Error(), part) {
				return fmt.Errorf("%w: lacks %q", err, part)
			}
		}
		if text == "" {
			text = err.Error()
		}
		if text != err.Error() || strings.Contains(text, "\n") {
			return fmt.Errorf("%q, then %w", text, err)
		}
	}
	return nil
}

func useSession(s *Session) error {
	snap, err := s.Snapshot()
	if err == nil && len(snap.Devices) != 1 {
		err = fmt.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	if _, probeErr := s.Probe(); err == nil {
		err = probeErr
	}
	return errors.Join(err, s.Close())
}

// runSteps runs the steps until one fails, and reports its number.
func runSteps(all ...func() error) error {
	for i, step := range all {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}
