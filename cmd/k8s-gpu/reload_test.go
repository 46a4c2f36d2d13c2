package main

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// configFile is a configuration file that changes as NVIDIA's config-manager changes it: another one takes its
// place.
type configFile struct {
	*testing.T
	path string
}

func newConfigFile(t *testing.T, text string) configFile {
	c := configFile{t, filepath.Join(t.TempDir(), "config.yaml")}
	c.write(text)
	return c
}

func (c configFile) write(text string) {
	c.Helper()
	if err := os.WriteFile(c.path+".new", []byte(text), 0o600); err != nil {
		c.Fatal(err)
	}
	if err := os.Rename(c.path+".new", c.path); err != nil {
		c.Fatal(err)
	}
}

const header = "version: v1\n"

// reload changes the file, sends HUP and waits for what the agent says to that, for the nth time.
func (a *testAgent) reload(c configFile, text, says string) {
	a.Helper()
	c.write(text)
	before := a.times(says)
	a.signal(syscall.SIGHUP)
	a.await(says, func() bool { return a.times(says) > before })
}

const (
	restarts    = "configuration reloaded: agent restarts in this process"
	adopted     = "configuration reloaded: policy applied"
	unchanged   = "configuration reloaded: nothing changed"
	notReloaded = "configuration not reloaded: the old one stays"
)

// own are the agent's sockets in the kubelet's folder.
func own(t *testing.T, k *kubelettest.Kubelet) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(filepath.Dir(k.Socket()), "tandem-*"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// Another offer ends no life: the driver stays open and the endpoints that there are stay registered, whatever
// becomes of their units.
func TestReloadRenamesResources(t *testing.T) {
	t.Parallel()
	m, k, dir, c := simdriver.StartParallel(t, "a100-mig"), startKubelet(t), shortDir(t), newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir="+dir)...)
	a.awaitReady("offered to the kubelet: nvidia.com/gpu\n")
	a.awaitHealthy(k, 8)
	old := own(t, k)
	has := func(resource string, some bool) {
		t.Helper()
		if err := k.Await(a.ctx, "devices of "+resource, func() bool { n, _ := k.Capacity(resource); return n > 0 == some }); err != nil {
			t.Error(err)
		}
	}

	a.reload(c, header+"flags: {migStrategy: mixed}", adopted+`" changed="flags.migStrategy from .*none.* to .*mixed`)
	a.awaitReady("nvidia.com/mig-")
	mixed := k.Registrations()
	for _, r := range mixed {
		has(r.Resource, true)
	}
	for _, path := range old {
		if !slices.Contains(own(t, k), path) {
			t.Errorf("%s is not there any more", path)
		}
	}
	says(t, dir, "MIG 1g.10gb", "inspect")

	a.reload(c, header, adopted)
	a.awaitHealthy(k, 8)
	for _, r := range mixed { // what is no longer offered is an empty list: the kubelet would keep a number
		has(r.Resource, r.Resource == gpuResource)
	}
	a.reload(c, header+"flags: {migStrategy: mixed}", adopted)
	for _, r := range mixed {
		has(r.Resource, true)
	}
	if now := k.Registrations(); len(now) != len(mixed) || a.times("msg=listening") != 1 {
		t.Errorf("registered again: %v, were %v", now, mixed)
	}
	a.endsWith(syscall.SIGTERM, k, dir, false)
}

// awaitMany waits until the log has so many matches.
func (a *testAgent) awaitMany(pattern string, n int) {
	a.Helper()
	a.await(strconv.Itoa(n)+" times "+pattern, func() bool { return a.times(pattern) >= n })
}

// A bad file changes nothing: the same sockets, the same stream, and everybody who asks is told.
func TestBadConfigurationChangesNothing(t *testing.T) {
	m, k, dir := simdriver.Start(t, "h100x8"), startKubelet(t), shortDir(t)
	c := newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir="+dir)...)
	a.awaitHealthy(k, 8)
	a.said("msg=registered")
	a.awaitReady("offered")
	sockets, lists := own(t, k), len(k.Lists(gpuResource))

	bad := header + "flags:\n  migStrategy: some\n  migStratgy: mixed\nhealth: {recoveryDwell: soon}\n"
	a.reload(c, bad, notReloaded)
	for _, problem := range []string{`config.yaml:3: flags.migStrategy`, `config.yaml:4: flags.migStratgy = .*mixed.*: unknown key`, `config.yaml:5: health.recoveryDwell`} {
		a.said(`level=ERROR msg="configuration not reloaded" problem=".*` + problem)
	}
	if code, text := a.get("/readyz"); code != http.StatusOK || !strings.Contains(text, "offered to the kubelet") || !strings.Contains(text, "config.yaml:3") {
		t.Errorf("/readyz: %d %s", code, text)
	}
	if _, page := a.get("/inventory"); !strings.Contains(page, "configuration not reloaded at") {
		t.Errorf("/inventory has no note:\n%s", page)
	}
	a.metrics("tandem_config_last_reload_successful 0")
	says(t, dir, "configuration not reloaded at", "inspect", "--config-file="+c.path)
	says(t, dir, "not used by the running agent", "inspect", "--config-file="+c.path)
	if out, err := ask(t, shortDir(t), "inspect", "--config-file="+c.path); err == nil || !strings.Contains(out, "config.yaml:3") {
		t.Errorf("inspect without an agent takes a bad file: %v\n%s", err, out)
	}

	if err := os.Remove(c.path); err != nil {
		t.Fatal(err)
	}
	a.signal(syscall.SIGHUP)
	a.said(`problem="configuration file: open .*config.yaml: no such file`)

	if _, err := k.Allocate(a.ctx, gpuResource, m.UUID(0)); err != nil {
		t.Error(err)
	}
	a.reload(c, header, unchanged)
	a.metrics("tandem_config_last_reload_successful 1")
	if _, text := a.get("/readyz"); strings.Contains(text, "not reloaded") {
		t.Errorf("/readyz: %s", text)
	}
	if now := own(t, k); !slices.Equal(now, sockets) || len(k.Registrations()) != 1 || len(k.Lists(gpuResource)) != lists {
		t.Errorf("sockets %v, were %v; %d registrations, %d lists, were %d", now, sockets, len(k.Registrations()), len(k.Lists(gpuResource)), lists)
	}
}

// Another way to say the same is no change.
func TestReloadOfTheSameDisturbsNobody(t *testing.T) {
	m, k, c := simdriver.Start(t, "t4"), startKubelet(t), newConfigFile(t, header+"health: {recoveryDwell: 60s}")
	a := start(t, append(on(m.Root, k), "--config-file="+c.path)...)
	a.awaitHealthy(k, 1)
	a.said("msg=registered")
	a.reload(c, header+"# nothing\nflags: {gfd: {oneshot: true}}\nhealth:\n  recoveryDwell: 1m\n  healthMode: enforce\n", unchanged)
	a.signal(syscall.SIGHUP)
	a.signal(syscall.SIGHUP)
	a.awaitMany(unchanged, 2)
	if n := len(k.Registrations()); n != 1 {
		t.Errorf("%d registrations", n)
	}
}

// What an old life knew, the new one knows: also without a disk, also of a driver that hangs, and on a kubelet
// that takes the end of the old stream for that of the new one.
func TestReloadHealsNothing(t *testing.T) {
	t.Parallel()
	m, k, c := simdriver.StartParallel(t, "h100x8"), startKubelet(t), newConfigFile(t, header)
	k.Behave(kubelettest.Behaviour{OneClientPerResource: true})
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir=", "--health-period=200ms", "--call-deadline=500ms", "--recovery-dwell=200ms", "--health-settle=1h", "--rescan=1s")...)
	a.awaitHealthy(k, 8)
	a.said("msg=registered")
	if err := m.XID(2, 95); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	if err := m.Hang(simdriver.GPU(5), "*"); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 6)
	lists := len(k.Lists(gpuResource))

	a.reload(c, header+"flags: {plugin: {passDeviceSpecs: true}}", restarts)
	a.awaitMany("msg=registered", 2)
	a.awaitHealthy(k, 6)
	for _, list := range k.Lists(gpuResource)[lists:] {
		for _, d := range list {
			if id := d.GetID(); d.GetHealth() == v1beta1.Healthy && (id == m.UUID(2) || id == m.UUID(5)) {
				t.Errorf("%s is offered as healthy by the new life", id)
			}
		}
	}
	if r, err := k.Allocate(a.ctx, gpuResource, m.UUID(0)); err != nil || len(r.GetDevices()) == 0 {
		t.Errorf("no device nodes: %v, %v", r, err)
	}
	if err := m.Heal(); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	if n := len(k.Registrations()); n != 2 {
		t.Errorf("%d registrations", n)
	}
}

// A process can't let go of the driver's library.
func TestAnotherDriverRootTakesAnotherProcess(t *testing.T) {
	t.Parallel()
	m, other, k, dir := simdriver.StartParallel(t, "t4"), simdriver.StartParallel(t, "t4"), startKubelet(t), shortDir(t)
	roots := func(m *simdriver.Machine) string { return header + "flags: {nvidiaDriverRoot: " + m.Root + "}" }
	c := newConfigFile(t, roots(m))
	args := append(slices.Clone(on(m.Root, k)[1:]), "--config-file="+c.path, "--state-dir="+dir, "--driver-root-ctr-path=/nowhere")
	a := start(t, args...)
	a.awaitHealthy(k, 1)
	a.reload(c, roots(other), "driver library changed")
	if code := a.ended(); code != 0 {
		t.Errorf("ended with %v", a.cmd.ProcessState)
	}
	if left := own(t, k); len(left) > 0 {
		t.Errorf("sockets left: %v", left)
	}
	next := start(t, args...)
	next.awaitHealthy(k, 1)
}

// However often the configuration changes, nothing piles up.
func TestReloadsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	m, k, c := simdriver.StartParallel(t, "t4"), startKubelet(t), newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path)...)
	a.awaitHealthy(k, 1)
	a.said("msg=registered")
	count := func(name string) int {
		_, page := a.get("/metrics")
		n, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line(page, name+" "), name)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	var goroutines, files int
	for n := range 4 {
		a.reload(c, header+"flags: {plugin: {passDeviceSpecs: "+strconv.FormatBool(n%2 == 0)+"}}", restarts)
		a.awaitMany("msg=listening", n+2)
		a.awaitMany("msg=registered", n+2)
		a.awaitHealthy(k, 1)
		if n == 0 {
			goroutines, files = count("go_goroutines"), count("process_open_fds")
		}
	}
	const some = 4 // connections and timers come and go
	a.await("as few goroutines and files as after the first reload", func() bool {
		return count("go_goroutines") <= goroutines+some && count("process_open_fds") <= files+some
	})
}

// The agent's command line and environment are what they were: a file that a variable names is read again, too.
func TestReloadReadsTheFileOfTheEnvironment(t *testing.T) {
	m, k, c := simdriver.Start(t, "t4"), startKubelet(t), newConfigFile(t, header)
	t.Setenv("CONFIG_FILE", c.path)
	a := start(t, on(m.Root, k)...)
	a.awaitHealthy(k, 1)
	a.reload(c, header+"health: {healthMode: observe}", restarts)
	a.awaitMany("health-mode=observe", 1)
	if out, err := exec.CommandContext(t.Context(), binary(t), "version").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
