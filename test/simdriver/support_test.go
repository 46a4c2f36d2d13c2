package simdriver_test

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestMain runs a named scene instead of the tests if a test started this binary as a child process.
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
	return of(d.DeviceGetHandleByIndex(index)).get(d.t, "handle by index")
}

// set is an event set in which some GPUs are registered.
func (d driver) set(mask uint64, indices ...int) nvml.EventSet {
	d.t.Helper()
	set := of(d.EventSetCreate()).get(d.t, "create event set")
	for _, i := range indices {
		want(d.t, "register", d.gpu(i).RegisterEvents(mask, set), nvml.SUCCESS)
	}
	return set
}

// calls is how often a function of NVML was called.
func (d driver) calls(name string) uint64 {
	d.t.Helper()
	calls, err := d.m.Calls()
	ok(d.t, err)
	return calls[name]
}

// entered waits until a function of NVML was called n times.
func (d driver) entered(name string, n uint64) {
	d.t.Helper()
	until(d.t, func() bool { return d.calls(name) >= n })
}

// result is what a call of NVML returned.
type result[T any] struct {
	value T
	code  nvml.Return
}

func of[T any](value T, code nvml.Return) result[T] { return result[T]{value, code} }

// of2 is of for a call with two values, which are left out.
func of2[A, B any](_ A, _ B, code nvml.Return) result[any] { return result[any]{code: code} }

// get is the value of a call, which must succeed.
func (r result[T]) get(t testing.TB, what string) T {
	t.Helper()
	want(t, what, r.code, nvml.SUCCESS)
	return r.value
}

// is checks the value of a call, which must succeed.
func (r result[T]) is(t testing.TB, what string, expected T) {
	t.Helper()
	want(t, what, r.code, nvml.SUCCESS)
	same[any](t, what, r.value, expected)
}

// returns checks the code of a call.
func (r result[T]) returns(t testing.TB, what string, expected nvml.Return) {
	t.Helper()
	want(t, what, r.code, expected)
}

// begin makes a call in another goroutine; the channel has its code when it returns.
func begin(call func() nvml.Return) <-chan nvml.Return {
	done := make(chan nvml.Return, 1)
	go func() { done <- call() }()
	return done
}

// beginWait waits for an event of a set in another goroutine.
func beginWait(set nvml.EventSet, ms uint32) <-chan nvml.Return {
	return begin(func() nvml.Return { return of(set.Wait(ms)).code })
}

func want(t testing.TB, what string, got, expected nvml.Return) {
	t.Helper()
	if got != expected {
		t.Fatalf("%s: %v (%d), want %v", what, got, got, expected)
	}
}

func ok(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func same[T comparable](t testing.TB, what string, got, expected T) {
	t.Helper()
	if got != expected {
		t.Errorf("%s: %v, want %v", what, got, expected)
	}
}

// until polls a condition for 5 s at most.
func until(t testing.TB, condition func() bool) {
	t.Helper()
	deadline := time.After(5 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("timeout")
		}
	}
}

// field is the value and the code of one field of a GPU.
func field(t testing.TB, dev nvml.Device, id uint32) result[byte] {
	t.Helper()
	v := []nvml.FieldValue{{FieldId: id}}
	want(t, "field values", dev.GetFieldValues(v), nvml.SUCCESS)
	return of(v[0].Value[0], nvml.Return(v[0].NvmlReturn))
}

// violations returns the recorded misuse and removes it, so that it does not fail the test.
func violations(t testing.TB, m *simdriver.Machine) []string {
	t.Helper()
	all, err := m.Violations()
	ok(t, err)
	ok(t, m.ForgiveViolations())
	return all
}

// child is a process that runs a scene with the library under the machine's root.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func libraryPath(m *simdriver.Machine) string {
	return filepath.Join(m.Root, "usr/lib/x86_64-linux-gnu", simdriver.LibraryName)
}

func sceneCommand(t testing.TB, m *simdriver.Machine, name string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	ok(t, err)
	cmd := exec.CommandContext(t.Context(), self, libraryPath(m))
	cmd.Env = append(os.Environ(), "SIMDRIVER_SCENE="+name)
	return cmd
}

// scene runs a scene to its end, and returns its output and exit code.
func scene(t testing.TB, m *simdriver.Machine, name string) (string, int) {
	t.Helper()
	out, err := sceneCommand(t, m, name).CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	} else if err != nil {
		return string(out), exit.ExitCode()
	}
	return string(out), 0
}

// start starts a scene with more variables in its environment.
func start(t testing.TB, m *simdriver.Machine, name string, env ...string) *child {
	t.Helper()
	c := &child{t: t, cmd: sceneCommand(t, m, name)}
	c.cmd.Env = append(c.cmd.Env, env...)
	var err error
	c.in, err = c.cmd.StdinPipe()
	ok(t, err)
	out, err := c.cmd.StdoutPipe()
	ok(t, err)
	c.out = bufio.NewReader(out)
	ok(t, c.cmd.Start())
	return c
}

// read reads a line of the output.
func (c *child) read() string {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	ok(c.t, err)
	return strings.TrimSpace(line)
}

// ask writes an empty line and reads one.
func (c *child) ask() string {
	c.t.Helper()
	_, err := io.WriteString(c.in, "\n")
	ok(c.t, err)
	return c.read()
}

// end closes the input, and waits for the end of the process.
func (c *child) end() {
	c.t.Helper()
	ok(c.t, c.in.Close())
	ok(c.t, c.cmd.Wait())
}
