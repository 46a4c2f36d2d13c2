package simdriver_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestMain runs a named scene instead of the tests when a test started this
// binary as a child process.
func TestMain(m *testing.M) {
	if name := os.Getenv("SIMDRIVER_SCENE"); name != "" {
		os.Exit(scenes[name](os.Args[len(os.Args)-1]))
	}
	os.Exit(m.Run())
}

// driver is an initialised NVML on one machine; it is shut down when the test ends.
type driver struct {
	nvml.Interface
	t testing.TB
	m *simdriver.Machine
}

func open(t testing.TB, machine string) driver {
	t.Helper()
	return initialise(t, simdriver.Start(t, machine))
}

func initialise(t testing.TB, m *simdriver.Machine) driver {
	t.Helper()
	d := driver{nvml.New(nvml.WithLibraryPath(m.Library)), t, m}
	want(t, "init", d.Init(), nvml.SUCCESS)
	t.Cleanup(func() { want(t, "shutdown", d.Shutdown(), nvml.SUCCESS) })
	return d
}

func (d driver) gpu(index int) nvml.Device {
	d.t.Helper()
	dev, ret := d.DeviceGetHandleByIndex(index)
	want(d.t, "handle by index", ret, nvml.SUCCESS)
	return dev
}

func (d driver) set(mask uint64, indices ...int) nvml.EventSet {
	d.t.Helper()
	set, ret := d.EventSetCreate()
	want(d.t, "create event set", ret, nvml.SUCCESS)
	for _, i := range indices {
		want(d.t, "register", d.gpu(i).RegisterEvents(mask, set), nvml.SUCCESS)
	}
	return set
}

func want(t testing.TB, what string, got, expected nvml.Return) {
	t.Helper()
	if got != expected {
		t.Fatalf("%s: %v (%d), want %v", what, got, got, expected)
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func same[T comparable](t testing.TB, what string, got, expected T) {
	t.Helper()
	if got != expected {
		t.Errorf("%s: %v, want %v", what, got, expected)
	}
}

// violations takes the recorded misuse, so that the end of the test finds none.
func violations(t testing.TB, m *simdriver.Machine) []string {
	t.Helper()
	all, err := m.Violations()
	ok(t, err)
	ok(t, m.ForgiveViolations())
	return all
}

// A reboot is another boot id, and resets the GPUs.
func TestReboot(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	boot := func() string {
		text, err := os.ReadFile(filepath.Join(m.Root, "proc/sys/kernel/random/boot_id"))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	before := boot()
	if err := m.Set(3, "recovery_action", "1"); err != nil {
		t.Fatal(err)
	}
	if err := m.Reboot(); err != nil {
		t.Fatal(err)
	}
	if action, err := m.Get(3, "recovery_action"); err != nil || action != "0" || boot() == before {
		t.Errorf("recovery action %q, boot id %q, was %q, error %v", action, boot(), before, err)
	}
}
