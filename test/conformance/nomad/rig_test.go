package nomad

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/client/devicemanager"
	"github.com/hashicorp/nomad/client/devicemanager/state"
	"github.com/hashicorp/nomad/helper/pluginutils/loader"
	"github.com/hashicorp/nomad/helper/pluginutils/singleton"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/nomad/structs/config"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
)

// timeout bounds the wait for an event that must occur.
const timeout = 30 * time.Second

var bin struct{ plugin, simctl string }

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "conformance")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
		build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=2.0.0", "-o", dir+"/",
			"./cmd/nomad-gpu", "./test/simdriver/cmd/simctl")
		build.Dir = "../../.."
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
			return 1
		}
		bin.plugin, bin.simctl = filepath.Join(dir, "nomad-gpu"), filepath.Join(dir, "simctl")
		return m.Run()
	}())
}

// manager is what the client uses of its device manager.
type manager interface {
	devicemanager.Manager
	WaitForFirstFingerprint(context.Context) <-chan struct{}
}

// agent is the part of a Nomad client that deals with device plugins.
type agent struct {
	dir     string // with the plugin, its output and its sockets
	logs    *buffer
	load    error
	catalog *loader.PluginLoader
	dm      manager

	mu      sync.Mutex
	updates [][]*structs.NodeDeviceResource
	state   *state.PluginState
}

// copyStderr in the environment makes a copy of the plugin's stderr in the agent's folder.
const copyStderr = "CONFORMANCE_COPY_STDERR"

// newAgent creates a plugin_dir and loads it, as an agent that starts. A nil configuration is a plugin block without one.
func newAgent(t testing.TB, configuration map[string]any, args ...string) *agent {
	t.Helper()
	a := &agent{dir: t.TempDir(), logs: &buffer{}}
	for _, d := range []string{"plugins", "tmp"} {
		must(t, os.Mkdir(filepath.Join(a.dir, d), 0o755))
	}
	// A script that records its process and becomes the plugin. The copy of stderr is made on request only: tee keeps the
	// plugin's stderr open a little longer than the plugin.
	script := fmt.Sprintf("#!/bin/bash\necho $$ >>%[1]s/launches\nexport TMPDIR=%[1]s/tmp\n"+
		"[ -z \"$%[3]s\" ] || exec %[2]s \"$@\" 2> >(exec tee -a %[1]s/stderr >&2)\nexec %[2]s \"$@\"\n", a.dir, bin.plugin, copyStderr)
	must(t, os.WriteFile(filepath.Join(a.dir, "plugins", "nomad-gpu"), []byte(script), 0o755))
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: a.logs})
	a.catalog, a.load = loader.NewPluginLoader(&loader.PluginLoaderConfig{
		Logger:            log,
		PluginDir:         filepath.Join(a.dir, "plugins"),
		Configs:           []*config.PluginConfig{{Name: "nomad-gpu", Args: args, Config: configuration}},
		SupportedVersions: loader.AgentSupportedApiVersions,
	})
	if a.load != nil {
		return a
	}
	a.dm = devicemanager.New(&devicemanager.Config{
		Logger:        log,
		Loader:        singleton.NewSingletonLoader(log, a.catalog),
		PluginConfig:  &base.AgentConfig{},
		StatsInterval: time.Second,
		Updater:       a.update,
		State:         a,
	})
	return a
}

// startAgent is newAgent on a machine, with a device manager that has sent its first fingerprint.
func startAgent(t testing.TB, m machine, more map[string]any) *agent {
	t.Helper()
	a := newAgent(t, m.config(more))
	if a.load != nil {
		t.Fatal(a.load)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent's log:\n%s", a.logs)
		}
	})
	a.dm.Run()
	t.Cleanup(a.dm.Shutdown)
	select {
	case <-a.dm.WaitForFirstFingerprint(t.Context()):
	case <-time.After(timeout):
		t.Fatal("no fingerprint")
	}
	return a
}

func (a *agent) update(devices []*structs.NodeDeviceResource) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.updates = append(a.updates, devices)
}

// GetDevicePluginState and PutDevicePluginState are the client's state.
func (a *agent) GetDevicePluginState() (*state.PluginState, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state, nil
}

func (a *agent) PutDevicePluginState(s *state.PluginState) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state = s
	return nil
}

// Updates returns the device groups that the node got so far.
func (a *agent) Updates() [][]*structs.NodeDeviceResource {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.updates
}

// until waits until a condition holds for the node's device groups, and returns them.
func (a *agent) until(t testing.TB, what string, holds func([]*structs.NodeDeviceResource) bool) []*structs.NodeDeviceResource {
	t.Helper()
	var last []*structs.NodeDeviceResource
	await(t, what, func() bool {
		all := a.Updates()
		if len(all) == 0 {
			return false
		}
		last = all[len(all)-1]
		return holds(last)
	})
	return last
}

// onMachine is startAgent on a new machine of that name, with n devices, all healthy.
func onMachine(t testing.TB, name string, more map[string]any, n int) (machine, *agent, []*structs.NodeDeviceResource) {
	t.Helper()
	m := install(t, name)
	a := startAgent(t, m, more)
	return m, a, a.devices(t, n, n)
}

// underPolicy is onMachine with a policy file.
func underPolicy(t testing.TB, name, policy string, n int) (machine, *agent, []*structs.NodeDeviceResource) {
	t.Helper()
	m := install(t, name)
	a := startAgent(t, m, m.policy(t, policy))
	return m, a, a.devices(t, n, n)
}

// devices waits until the node has n devices of which so many are healthy.
func (a *agent) devices(t testing.TB, n, healthy int) []*structs.NodeDeviceResource {
	t.Helper()
	return a.until(t, fmt.Sprintf("%d devices, %d healthy", n, healthy), func(groups []*structs.NodeDeviceResource) bool {
		all := instances(groups)
		unhealthy := slices.DeleteFunc(slices.Clone(all), func(d *structs.NodeDevice) bool { return d.Healthy })
		return len(all) == n && len(all)-len(unhealthy) == healthy
	})
}

func instances(groups []*structs.NodeDeviceResource) (all []*structs.NodeDevice) {
	for _, g := range groups {
		all = append(all, g.Instances...)
	}
	return all
}

func ids(groups []*structs.NodeDeviceResource) (all []string) {
	for _, d := range instances(groups) {
		all = append(all, d.ID)
	}
	return all
}

func (a *agent) reserve(g *structs.NodeDeviceResource, ids ...string) (*device.ContainerReservation, error) {
	return a.dm.Reserve(&structs.AllocatedDeviceResource{Vendor: g.Vendor, Type: g.Type, Name: g.Name, DeviceIDs: ids})
}

// launches returns the IDs of the processes started so far.
func (a *agent) launches(t testing.TB) (pids []int) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(a.dir, "launches"))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		var pid int
		if _, err := fmt.Sscan(line, &pid); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// must ends the test at an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	awaitEvery(t, 20*time.Millisecond, what, holds)
}

func awaitEvery(t testing.TB, interval time.Duration, what string, holds func() bool) {
	t.Helper()
	deadline := time.After(timeout)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("timeout: %s", what)
		}
	}
}

// buffer is a bytes.Buffer for concurrent use.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
