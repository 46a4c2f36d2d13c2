//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// agent is a Nomad agent with nomad-gpu in its plugin folder.
type agent struct {
	owner   *testing.T // the test that the agent lives as long as; its steps are shorter
	name    string
	argv    []string
	process *process
}

// nomadAPI is the address of the server's HTTP API; there is one at a time.
const nomadAPI = "http://127.0.0.1:4646"

// launchNomad starts an agent that is server and client in one and keeps nothing, with a nomad-gpu block that holds
// the given configuration.
func launchNomad(t *testing.T, name, config string) *agent {
	t.Helper()
	return newAgent(t, name, config, "-dev")
}

// launchClient starts a server, and a client that knows after a restart what it knew.
func launchClient(t *testing.T, name, config string) *agent {
	t.Helper()
	state := map[string]string{"STATE": stateDir()}
	server := start(t, name+"-server", nil, "nomad", "agent", "-config="+render(t, "nomad-server.hcl", state))
	await(t, "a leader", 60*time.Second, func() error {
		leader, err := fetch(nomadAPI + "/v1/status/leader")
		if err == nil && leader == `""` {
			err = errors.New("there is none")
		}
		return errors.Join(err, server.alive())
	})
	return newAgent(t, name, config, "-config="+render(t, "nomad-client.hcl", state))
}

func newAgent(t *testing.T, name, config, mode string) *agent {
	t.Helper()
	file := render(t, "nomad.hcl", map[string]string{"PLUGINS": os.Getenv("E2E_BIN"), "CONFIG": config})
	a := &agent{owner: t, name: name, argv: []string{"nomad", "agent", mode, "-config=" + file}}
	a.start()
	return a
}

func (a *agent) start() {
	// The agent's AWS fingerprint stops it where a bundle is named; TMPDIR holds its sockets and allocations.
	a.process = start(a.owner, a.name, []string{"AWS_CA_BUNDLE=", "TMPDIR=" + stateDir()}, a.argv...)
}

// onMachine is the configuration of nomad-gpu on a machine that changes in seconds.
func onMachine(m *simdriver.Machine) string {
	return `
    driver_root        = "` + m.Root + `"
    dev_root           = "` + m.Root + `"
    sysfs_root         = "` + m.Root + `/sys"
    procfs_root        = "` + m.Root + `/proc"
    state_dir          = "` + stateDir() + `/nomad-history"
    fingerprint_period = "5s"` + hasty
}

// gpu is one device as the Nomad node shows it.
type gpu struct {
	ID                string
	Healthy           bool
	HealthDescription string
	Locality          struct{ PciBusID string }
}

// group is one device group of the Nomad node.
type group struct {
	Vendor, Type, Name string
	Instances          []gpu
}

type node struct {
	Status        string
	NodeResources struct{ Devices []group }
}

// node gives the agent's only node.
func (a *agent) node() (node, error) {
	var list []struct{ ID string }
	if err := a.get("/v1/nodes", &list); err != nil {
		return node{}, err
	}
	if len(list) != 1 {
		return node{}, fmt.Errorf("%d nodes", len(list))
	}
	var n node
	err := a.get("/v1/node/"+list[0].ID, &n)
	return n, err
}

// gpus gives every device of the node, in order of id.
func (n node) gpus() []gpu {
	var all []gpu
	for _, g := range n.NodeResources.Devices {
		all = append(all, g.Instances...)
	}
	slices.SortFunc(all, func(x, y gpu) int { return strings.Compare(x.ID, y.ID) })
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

// awaitGPUs waits until the node has this many devices and healthy ones among them, and gives them all.
func (a *agent) awaitGPUs(t *testing.T, all, healthy int) []gpu {
	t.Helper()
	var gpus []gpu
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

// allocation is what of an allocation the test looks at.
type allocation struct {
	ID, ClientStatus   string
	AllocatedResources struct {
		Tasks map[string]struct {
			Devices []struct{ DeviceIDs []string }
		}
	}
	TaskStates map[string]struct {
		StartedAt time.Time
		Restarts  int
		Events    []struct{ DisplayMessage string }
	}
}

// identity gives what stays while the allocation's tasks run.
func (alloc allocation) identity() string {
	text := alloc.ID + " " + alloc.ClientStatus
	for name, task := range alloc.TaskStates {
		text += fmt.Sprintf(", task %s since %v, restarted %d times", name, task.StartedAt, task.Restarts)
	}
	return fmt.Sprintf("%s, devices %s", text, alloc.devices())
}

func (a *agent) submit(t *testing.T, file string, vars ...string) {
	t.Helper()
	argv := []string{"nomad", "job", "run", "-address=" + nomadAPI, "-detach"}
	for _, v := range vars {
		argv = append(argv, "-var", v)
	}
	must(t, append(argv, filepath.Join("testdata", file))...)
}

// allocation gives the job's only allocation.
func (a *agent) allocation(job string) (allocation, error) {
	var list []allocation
	if err := a.get("/v1/job/"+job+"/allocations", &list); err != nil {
		return allocation{}, err
	}
	if len(list) != 1 {
		return allocation{}, fmt.Errorf("its allocations are %+v", list)
	}
	var alloc allocation
	err := a.get("/v1/allocation/"+list[0].ID, &alloc)
	return alloc, err
}

// devices gives the ids that Nomad's scheduler chose, in order.
func (alloc allocation) devices() []string {
	var ids []string
	for _, task := range alloc.AllocatedResources.Tasks {
		for _, device := range task.Devices {
			ids = append(ids, device.DeviceIDs...)
		}
	}
	slices.Sort(ids)
	return ids
}

// checkRunning fails unless the job's first allocation still runs and holds ids.
func (a *agent) checkRunning(t *testing.T, job string, ids []string) {
	t.Helper()
	alloc, err := a.allocation(job)
	if err != nil || alloc.ClientStatus != "running" || !slices.Equal(alloc.devices(), ids) {
		t.Errorf("job %s: %+v, error %v; want it running on %q", job, alloc, err, ids)
	}
}

// runJob runs the job gpus.nomad.hcl under a name of its own, waits for the wanted status of its
// allocation, checks that its task printed the devices that Nomad chose, and gives them and what it printed.
func (a *agent) runJob(t *testing.T, name, status string, vars ...string) (ids []string, said string) {
	t.Helper()
	a.submit(t, "gpus.nomad.hcl", append(vars, "name="+name)...)
	var alloc allocation
	await(t, "job "+name+" to be "+status, 60*time.Second, func() (err error) {
		if alloc, err = a.allocation(name); err == nil && alloc.ClientStatus != status {
			err = fmt.Errorf("it is %s: %+v", alloc.ClientStatus, alloc.TaskStates)
		}
		return err
	})
	await(t, "the log of job "+name, 30*time.Second, func() (err error) {
		said, err = fetch(nomadAPI + "/v1/client/fs/logs/" + alloc.ID + "?task=gpus&type=stdout&plain=true")
		if err == nil && said == "" {
			err = errors.New("it is empty")
		}
		return err
	})
	said = strings.TrimSpace(said)
	t.Logf("job %s says: %s", name, said)
	for _, id := range alloc.devices() {
		if !strings.Contains(said, id) {
			t.Errorf("Nomad gave %s, the task says %q", id, said)
		}
	}
	return alloc.devices(), said
}

// awaitBlocked waits until the scheduler has found no place for the job.
func (a *agent) awaitBlocked(t *testing.T, job string) {
	t.Helper()
	var why string
	await(t, "job "+job+" to be blocked", 60*time.Second, func() error {
		var evals []struct {
			Status         string
			FailedTGAllocs map[string]struct{ ConstraintFiltered map[string]int }
		}
		if err := a.get("/v1/job/"+job+"/evaluations", &evals); err != nil {
			return err
		}
		blocked := false
		for _, eval := range evals {
			blocked = blocked || eval.Status == "blocked"
			for _, failed := range eval.FailedTGAllocs {
				why = fmt.Sprint(failed.ConstraintFiltered)
			}
		}
		if !blocked || why == "" {
			return fmt.Errorf("its evaluations are %+v", evals)
		}
		return nil
	})
	t.Logf("job %s is blocked, nodes filtered: %s", job, why)
}

// awaitComplete waits until the job is done, on so many devices.
func (a *agent) awaitComplete(t *testing.T, job string, count int) {
	t.Helper()
	await(t, "job "+job+" to complete", 60*time.Second, func() error {
		alloc, err := a.allocation(job)
		if err == nil && (alloc.ClientStatus != "complete" || len(alloc.devices()) != count) {
			err = fmt.Errorf("it is %s on %q", alloc.ClientStatus, alloc.devices())
		}
		return err
	})
}

func (a *agent) get(path string, into any) error { return fetchJSON(nomadAPI+path, into) }
