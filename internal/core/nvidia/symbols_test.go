package nvidia

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// useAll makes every call about a machine and prints the result.
func useAll(machine *simdriver.Machine) error {
	s, err := Open(Options{Roots: roots(machine)})
	if err != nil {
		return err
	}
	snap, err := s.Snapshot()
	if err != nil {
		return err
	}
	for _, e := range snap.Excluded {
		fmt.Println("excluded", e.Index, e.Reason)
	}
	if _, err := s.Probe(); err != nil {
		return err
	}
	if _, err := s.Usage(); err != nil {
		return err
	}
	if _, err := s.Wait(0); err != nil {
		return err
	}
	if err := machine.XID(5, 94, simdriver.At{GI: 9, CI: 0}); err != nil {
		return err
	}
	obs, err := s.Wait(0)
	for _, o := range obs {
		fmt.Println("event", o.At.GI == 9, o.At.GI == gpu.Whole)
	}
	if err != nil {
		return err
	}
	fmt.Println("devices", len(snap.Devices))
	return s.Close()
}

// without installs a machine whose library lacks functions. Their names are overwritten in the library, which needs no
// compiler: dlsym finds the hash of the old name, and then another name.
func without(t *testing.T, names ...string) string {
	t.Helper()
	text, err := simdriver.Text("a100-mig")
	must(t, err)
	m, err := simdriver.InstallText(t.Context(), t.TempDir(), text)
	if errors.Is(err, simdriver.ErrNoCompiler) {
		t.Skip("SKIPPED: ", err)
	}
	must(t, err)
	library, err := os.ReadFile(m.Library)
	must(t, err)
	for _, name := range names {
		whole := []byte("\x00" + name + "\x00")
		if !bytes.Contains(library, whole) {
			t.Fatalf("the simulated driver has no %s", name)
		}
		library = bytes.ReplaceAll(library, whole, append([]byte("\x00x"), whole[2:]...))
	}
	must(t, os.Remove(m.Library)) // it may be hard-linked to that of other tests
	must(t, os.WriteFile(m.Library, library, 0o755))
	return m.Root
}

func child(t *testing.T, root string) (output string, err error) {
	t.Helper()
	return runScenario(t, root, "use all")
}

// If any one function is missing, Open succeeds, or its error names the function; the process never ends.
func TestEachFunctionMissing(t *testing.T) {
	if testing.Short() {
		t.Skip("a process per function")
	}
	identity := []string{"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetMigDeviceHandleByIndex"}
	for _, call := range allCalls() {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			out, err := child(t, without(t, functionsOf(call)...))
			switch {
			case slices.Contains(mandatory, call):
				if err == nil || !strings.Contains(out, "lacks "+call) {
					t.Errorf("%v: %s", err, out)
				}
			case err != nil:
				t.Errorf("%v: %s", err, out)
			case slices.Contains(identity, call):
				if !strings.Contains(out, "excluded 5 "+call+": not in this driver") {
					t.Error(out)
				}
			case call == "nvmlDeviceGetMigMode", call == "nvmlDeviceGetMaxMigDeviceCount":
				if !strings.Contains(out, "devices 8\n") {
					t.Error(out)
				}
			case !strings.Contains(out, "devices 20\n"):
				t.Error(out)
			}
		})
	}
}

// With the mandatory functions only, eight GPUs are read.
func TestOldestDriver(t *testing.T) {
	var names []string
	for _, call := range allCalls() {
		versions := functionsOf(call)
		if !slices.Contains(mandatory, call) {
			names = append(names, versions...)
		} else if call != "nvmlInit" {
			names = append(names, versions[:len(versions)-1]...) // the oldest version of each remains
		}
	}
	slices.Sort(names)
	out, err := child(t, without(t, slices.Compact(names)...))
	if err != nil || !strings.Contains(out, "devices 8\n") {
		t.Errorf("%v: %s", err, out)
	}
}

// The older event wait does not report the MIG instance of an event: it concerns the whole GPU then.
func TestEventsWithoutAttribution(t *testing.T) {
	out, err := child(t, without(t, eventWaitV2))
	if err != nil || !strings.Contains(out, "event false true\n") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = child(t, without(t))
	if err != nil || !strings.Contains(out, "event true false\n") {
		t.Errorf("with it: %v: %s", err, out)
	}
}

func TestNoLibrary(t *testing.T) {
	root := t.TempDir()
	_, err := Open(Options{Roots: core.Roots{Driver: root}})
	_, again := Open(Options{Roots: core.Roots{Driver: root}})
	if !errors.Is(err, gpu.ErrNoDriver) || err.Error() != again.Error() || strings.Contains(err.Error(), "\n") {
		t.Fatalf("%v, then %v", err, again)
	}
	for _, folder := range libraryFolders {
		if !strings.Contains(err.Error(), filepath.Join(root, folder)) {
			t.Errorf("%v does not list %s", err, folder)
		}
	}
}

// A library that exists and can't be loaded is not gpu.ErrNoDriver, and the error has the reason.
func TestBrokenLibrary(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "lib64", libraryName)
	must(t, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte("not a library"), 0o644))
	_, err := findLibrary(root) // Open uses the library that this process has loaded
	if err == nil || errors.Is(err, gpu.ErrNoDriver) || !strings.Contains(err.Error(), file) || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
}
