//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// agent is a Nomad agent with nomad-gpu in its plugin folder.
type agent struct {
	owner   *testing.T // the test that the agent lives as long as; its steps are shorter
	name    string     // of its log
	member  string     // name of its node, if there are several; "" = there is one
	port    int        // of its own HTTP API, likewise
	argv    []string
	process *process
}

// nomadAPI is the address of the server's HTTP API; there is one at a time.
const nomadAPI = "http://127.0.0.1:4646"

// launchNomad starts an agent that is server and client in one and keeps nothing, with a nomad-gpu block that holds
// the given configuration.
func launchNomad(t *testing.T, name, config string) *agent {
	t.Helper()
	return newAgent(t, name, nomadConfig(t, name, os.Getenv("E2E_BIN"), config), "-dev")
}

// launchClient starts a server, and a client that keeps its state over a restart. More files may configure it.
func launchClient(t *testing.T, name, config string, files ...string) *agent {
	t.Helper()
	launchServer(t, name+"-server")
	options := []string{"-config=" + clientConfig(t, "nomad-client", clientPort)}
	for _, file := range files {
		options = append(options, "-config="+file)
	}
	return newAgent(t, name, nomadConfig(t, name, os.Getenv("E2E_BIN"), config), options...)
}

// launchServer starts a server without a client. More files may configure it; if they have access control, $NOMAD_TOKEN becomes its first token.
func launchServer(t *testing.T, name string, files ...string) {
	t.Helper()
	argv := []string{"nomad", "agent"}
	for _, file := range append([]string{render(t, "nomad-server.hcl", map[string]string{"STATE": stateDir()})}, files...) {
		argv = append(argv, "-config="+file)
	}
	server := start(t, name, nil, argv...)
	await(t, "a leader", 60*time.Second, func() error {
		leader, err := fetch(nomadAPI + "/v1/status/leader")
		if err == nil && leader == `""` {
			err = errors.New("there is none")
		}
		return errors.Join(err, server.alive())
	})
	if token := os.Getenv(nomadToken); token != "" {
		if err := send(http.MethodPost, nomadAPI+"/v1/acl/bootstrap", map[string]string{"BootstrapSecret": token}); err != nil {
			t.Fatal(err)
		}
	}
}

// nomadToken is the variable with the token of a test's Nomad that has access control, as Nomad's commands have it.
const nomadToken = "NOMAD_TOKEN"

// nomadOperator adds that token to requests.
type nomadOperator struct{ http.RoundTripper }

// RoundTrip makes a request.
func (o nomadOperator) RoundTrip(r *http.Request) (*http.Response, error) {
	if token := os.Getenv(nomadToken); token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("X-Nomad-Token", token)
	}
	return o.RoundTripper.RoundTrip(r)
}

// clientPort is that of the HTTP API of a client beside a server; the ports of more clients follow.
const clientPort = 5646

// nomadConfig writes the file that every agent has, with this folder of plugins.
func nomadConfig(t *testing.T, name, plugins, config string) string {
	t.Helper()
	return renderIn(t, configDir(name), "nomad.hcl", map[string]string{"PLUGINS": plugins, "CONFIG": config})
}

// clientConfig writes the file of a client that keeps its state.
func clientConfig(t *testing.T, node string, port int) string {
	t.Helper()
	return renderIn(t, configDir(node), "nomad-client.hcl", map[string]string{"STATE": stateDir(), "NODE": node, "PORT": strconv.Itoa(port)})
}

func configDir(name string) string { return filepath.Join(stateDir(), name+"-config") }

func newAgent(t *testing.T, name, file string, options ...string) *agent {
	t.Helper()
	a := &agent{owner: t, name: name, argv: slices.Concat([]string{"nomad", "agent", "-config=" + file}, options)}
	a.start()
	return a
}

func (a *agent) start() {
	// The agent's AWS fingerprint stops it where a bundle is named; TMPDIR holds its sockets and allocations.
	a.process = start(a.owner, a.name, []string{"AWS_CA_BUNDLE=", "TMPDIR=" + stateDir()}, a.argv...)
}

// onMachine is the configuration of nomad-gpu on a machine that changes in seconds, with a folder of stateDir for its
// history, and more settings.
func onMachine(m *simdriver.Machine, history, more string) string {
	return `
    driver_root        = "` + m.Root + `"
    dev_root           = "` + m.Root + `"
    sysfs_root         = "` + m.Root + `/sys"
    procfs_root        = "` + m.Root + `/proc"
    state_dir          = "` + filepath.Join(stateDir(), history) + `"
    fingerprint_period = "5s"` + hasty + "\n    " + more
}

// gpuUse is one device as the Nomad node shows it.
type gpuUse struct {
	ID                string
	Healthy           bool
	HealthDescription string
	Locality          struct{ PciBusID string }
}

// group is one device group of the Nomad node.
type group struct {
	Vendor, Type, Name string
	Instances          []gpuUse
}

type node struct {
	ID, Name, Status, SchedulingEligibility string

	NodeResources struct{ Devices []group }
}

// node returns the agent's node.
func (a *agent) node() (node, error) {
	var list []struct{ ID, Name string }
	if err := a.get("/v1/nodes", &list); err != nil {
		return node{}, err
	}
	if a.member != "" {
		list = slices.DeleteFunc(list, func(n struct{ ID, Name string }) bool { return n.Name != a.member })
	}
	if len(list) != 1 {
		return node{}, fmt.Errorf("%d nodes", len(list))
	}
	var n node
	err := a.get("/v1/node/"+list[0].ID, &n)
	return n, err
}

// gpus returns every device of the node, in order of id.
func (n node) gpus() []gpuUse {
	var all []gpuUse
	for _, g := range n.NodeResources.Devices {
		all = append(all, g.Instances...)
	}
	slices.SortFunc(all, func(x, y gpuUse) int { return strings.Compare(x.ID, y.ID) })
	return all
}

func (n node) healthy() int {
	count := 0
	for _, g := range n.gpus() {
		if g.Healthy {
			count++
		}
	}
	return count
}

// awaitReady waits until the node is ready.
func (a *agent) awaitReady(t *testing.T) {
	t.Helper()
	await(t, "the Nomad node", 60*time.Second, func() error {
		n, err := a.node()
		if err == nil && n.Status != "ready" {
			err = fmt.Errorf("it is %s", n.Status)
		}
		return errors.Join(err, a.process.alive())
	})
}

// awaitGPUs waits until the node has this many devices and healthy ones among them, and returns them all.
func (a *agent) awaitGPUs(t *testing.T, all, healthy int) []gpuUse {
	t.Helper()
	var gpus []gpuUse
	await(t, fmt.Sprintf("%d devices of which %d healthy", all, healthy), 60*time.Second, func() error {
		n, err := a.node()
		if gpus = n.gpus(); err == nil && (len(gpus) != all || n.healthy() != healthy) {
			err = fmt.Errorf("the node shows %+v", gpus)
		}
		return errors.Join(err, a.process.alive())
	})
	t.Logf("Nomad node: %d devices, %d healthy", all, healthy)
	return gpus
}

func (a *agent) get(path string, into any) error { return fetchJSON(nomadAPI+path, into) }
