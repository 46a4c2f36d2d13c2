package agents

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// What k8s-gpu logs after a SIGHUP.
const (
	restarts    = "configuration reloaded: agent restarts in this process"
	applied     = "configuration reloaded: policy applied"
	unchanged   = "configuration reloaded: nothing changed"
	notReloaded = "configuration not reloaded: the old one stays"
)

const header = "version: v1\n"

// newAgentWithFile returns k8s-gpu with a configuration file.
func newAgentWithFile(t *testing.T, node, text string) *agent {
	t.Helper()
	a := newAgent(t, k8sGPU, node, nil)
	a.useFile(text)
	return a
}

func (a *agent) file() string { return filepath.Join(a.dir, "config.yaml") }

// useFile replaces the configuration file of the agent, as NVIDIA's config-manager does.
func (a *agent) useFile(text string) {
	a.Helper()
	key := "config_file"
	if a.program == nomadGPU {
		key = "policy_file"
	}
	a.settings[key] = a.file()
	a.must(os.WriteFile(a.file()+".new", []byte(text), 0o600), os.Rename(a.file()+".new", a.file()))
}

// reload replaces the file, sends SIGHUP and waits until the agent logs text once more.
func (a *agent) reload(file, text string) {
	a.Helper()
	a.useFile(file)
	before := a.times(text)
	a.signal(syscall.SIGHUP)
	a.logsTimes(text, before+1)
}

// registered waits until the kubelet has accepted so many registrations.
func (a *agent) registered(n int) {
	a.Helper()
	a.logsTimes("msg=registered", n)
}

// A changed policy is applied in place: the driver is not opened again and an unhealthy GPU stays unhealthy.
func TestPolicyIsReloaded(t *testing.T) {
	const shared = header + `policy:
  rules:
    - {select: {index: [0, 1]}, use: time-slicing, replicas: 4}
    - {select: {index: 7}, use: reserved}
`
	both(t, "h100x8", nil, func(a *agent) {
		kinds := func(gpus, shares int) {
			a.Helper()
			a.await(strconv.Itoa(gpus)+" GPUs and "+strconv.Itoa(shares)+" shares", func() bool {
				n := 0
				for id := range a.devices() {
					if strings.Contains(id, "::") {
						n++
					}
				}
				return n == shares && len(a.devices())-n == gpus
			})
		}
		reload := func(text string) {
			a.Helper()
			a.useFile(text)
			a.signal(syscall.SIGHUP)
		}
		a.useFile(header)
		a.startHealthy()
		a.xid(0, 95)
		a.healthy(8, 7)
		opened := a.calls("nvmlInit")
		reload(shared)
		kinds(5, 8)
		a.healthy(13, 9)
		if env, err := a.allocate(a.driver.UUID(1) + "::2"); err != nil || env[inventory.VisibleDevices] != a.driver.UUID(1) {
			a.Errorf("%v, %v", env, err)
		}
		if n := a.calls("nvmlInit"); n != opened {
			a.Errorf("the driver was opened %d times more", n-opened)
		}
		a.prints("reserved by config.yaml:5", "inspect")
		a.prints("the running agent answers, by its own configuration: --config-file has no effect", "inspect", "--config-file", a.file())
		a.useFile(header)
		a.prints("the agent reads its configuration again", "reload")
		held := map[string]int{k8sGPU: 1}[a.program] // a share that a pod may hold stays listed
		kinds(8, held)
		a.healthy(8+held, 7)
		a.stop()
	})
}

// Another MIG strategy is applied in place: the endpoints stay registered, whether or not they have units.
func TestReloadRenamesResources(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "a100-mig", header)
	a.start()
	a.ready(http.StatusOK, "offered to the kubelet: nvidia.com/gpu\n")
	a.healthy(8, 8)
	sockets := a.kubeletSockets()
	has := func(resource string, some bool) {
		t.Helper()
		a.await("devices of "+resource, func() bool { n, _ := a.kubelet.Capacity(resource); return n > 0 == some })
	}
	const mixed = header + "flags: {migStrategy: mixed}"
	a.reload(mixed, applied+`" changed="flags.migStrategy from \"none\" to \"mixed`)
	a.ready(http.StatusOK, "nvidia.com/mig-")
	resources := a.kubelet.Registrations()
	for _, r := range resources {
		has(r.Resource, true)
	}
	for _, path := range sockets {
		if !slices.Contains(a.kubeletSockets(), path) {
			t.Errorf("%s does not exist any more", path)
		}
	}
	a.prints("MIG 1g.10gb", "inspect")

	a.reload(header, applied)
	for _, r := range resources { // a resource without units is an empty list: without one the kubelet would keep its number
		has(r.Resource, r.Resource == resource)
	}
	a.reload(mixed, applied)
	for _, r := range resources {
		has(r.Resource, true)
	}
	if now := a.kubelet.Registrations(); len(now) != len(resources) || a.times("msg=listening") != 1 {
		t.Errorf("registered again: %v, were %v", now, resources)
	}
	a.stop()
}

// An invalid file changes nothing, neither sockets nor streams, and every view of the agent has the problems. A file with the same
// meaning changes nothing either.
func TestReloadThatChangesNothing(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "h100x8", header+"health: {recoveryDwell: 60s}")
	a.startHealthy()
	a.registered(1)
	a.ready(http.StatusOK, "offered")
	sockets, lists := a.kubeletSockets(), len(a.kubelet.Lists(resource))

	a.reload(header+"flags:\n  migStrategy: some\n  migStratgy: mixed\nhealth: {recoveryDwell: soon}\n", notReloaded)
	for _, problem := range []string{"config.yaml:3: flags.migStrategy", "config.yaml:4: flags.migStratgy", "config.yaml:5: health.recoveryDwell"} {
		a.logs("ERROR", "configuration not reloaded", problem)
	}
	a.ready(http.StatusOK, "config.yaml:3")
	a.ready(http.StatusOK, "offered to the kubelet")
	a.shows("/inventory", "configuration not reloaded at")
	a.metrics("tandem_config_last_reload_successful 0")
	a.prints("configuration not reloaded at", "inspect", "--config-file="+a.file())
	a.prints("not used by the running agent", "inspect", "--config-file="+a.file())
	a.must(os.Remove(a.file()))
	a.signal(syscall.SIGHUP)
	a.logs("ERROR", `problem="configuration file: open `, "config.yaml: no such file")

	a.allocates(0)
	a.reload(header+"# nothing\nflags: {gfd: {oneshot: true}}\nhealth:\n  recoveryDwell: 1m\n  healthMode: enforce\n", unchanged)
	a.metrics("tandem_config_last_reload_successful 1")
	if _, text := a.get("/readyz"); strings.Contains(text, "not reloaded") {
		t.Errorf("/readyz: %s", text)
	}
	a.signal(syscall.SIGHUP, syscall.SIGHUP)
	a.logsTimes(unchanged, 2)
	if now := a.kubeletSockets(); !slices.Equal(now, sockets) || len(a.kubelet.Registrations()) != 1 || len(a.kubelet.Lists(resource)) != lists {
		t.Errorf("sockets %v, were %v; %d registrations, %d lists, were %d", now, sockets, len(a.kubelet.Registrations()), len(a.kubelet.Lists(resource)), lists)
	}
}
