package nvidia

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A process keeps the library that it has loaded first, so whatever depends on the library needs a process of
// its own: this test binary again, which plays a scene on a machine and says how it went.
const (
	childRoot  = "TANDEM_TEST_DRIVER_ROOT"
	childScene = "TANDEM_TEST_SCENE"
)

var scenes = map[string]func(*simdriver.Machine) error{"use all": useAll}

func TestMain(m *testing.M) {
	root := os.Getenv(childRoot)
	if root == "" {
		os.Exit(m.Run())
	}
	machine, err := simdriver.Open(root)
	if err == nil {
		err = scenes[os.Getenv(childScene)](machine)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// play plays a scene in a process of its own.
func play(t *testing.T, root, scene string, env ...string) (output string, err error) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self)
	cmd.Env = append(os.Environ(), childRoot+"="+root, childScene+"="+scene, "SIMDRIVER_MACHINE="+root)
	cmd.Env = append(cmd.Env, env...)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// install lays a machine out for a child process; its library is a file of its own.
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

// outcome is what opening comes to.
type outcome string

const (
	opens  outcome = "it opens"
	absent outcome = "there is no driver"
	exits  outcome = "a new process is needed"
	fails  outcome = "it fails"
)

// opening opens the driver twice in a row: what it says must not change from one to the next.
func opening(m *simdriver.Machine, root string, want outcome, says ...string) error {
	var text string
	for range 2 {
		r := roots(m)
		r.Driver = root
		s, err := Open(Options{Roots: r})
		got := opens
		switch {
		case err == nil:
			err = useSession(s)
		case errors.Is(err, core.ErrDriverStale):
			got = exits
		case errors.Is(err, core.ErrNoDriver):
			got = absent
		case errors.Is(err, core.ErrDriverLost):
			got = "it says lost of what it never had"
		default:
			got = fails
		}
		if got != want || got == opens && err != nil {
			return fmt.Errorf("%s: %w; want: %s", got, err, want)
		}
		if err == nil {
			continue
		}
		for _, word := range says {
			if !strings.Contains(err.Error(), word) {
				return fmt.Errorf("%w: does not say %q", err, word)
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

// steps goes through them until one fails, which it names by its number.
func steps(all ...func() error) error {
	for i, step := range all {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}
