//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// agent is a Nomad agent, server and client in one, with nomad-gpu in its plugin folder.
type agent struct{ process *process }

// nomadAPI is the address of the agent's HTTP API; there is one agent at a time.
const nomadAPI = "http://127.0.0.1:4646"

// launchNomad starts an agent whose nomad-gpu block holds the given configuration.
func launchNomad(t *testing.T, name, config string) *agent {
	t.Helper()
	file := render(t, "nomad.hcl", map[string]string{"PLUGINS": os.Getenv("E2E_BIN"), "CONFIG": config})
	// The agent's AWS fingerprint stops it where a bundle is named; TMPDIR holds its sockets and allocations.
	env := []string{"AWS_CA_BUNDLE=", "TMPDIR=" + stateDir()}
	return &agent{start(t, name, env, "nomad", "agent", "-dev", "-config="+file)}
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
		Events []struct{ DisplayMessage string }
	}
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

// plugin gives the process id of the agent's running device plugin, or 0.
func (a *agent) plugin() int {
	for pid, parent := range running("nomad-gpu") {
		if parent == a.process.cmd.Process.Pid {
			return pid
		}
	}
	return 0
}

// killPlugin kills the plugin and waits until the agent has started another.
func (a *agent) killPlugin(t *testing.T) {
	t.Helper()
	old := a.plugin()
	if old == 0 {
		t.Fatal("the agent runs no nomad-gpu")
	}
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, "another nomad-gpu", 30*time.Second, func() error {
		if pid := a.plugin(); pid == 0 || pid == old {
			return fmt.Errorf("its process is %d, it was %d", pid, old)
		}
		return a.process.alive()
	})
}

// firstFingerprint gives how long the agent waited for the first fingerprint of its device plugins.
func (a *agent) firstFingerprint(t *testing.T) time.Duration {
	t.Helper()
	var at [2]time.Time
	for line := range strings.Lines(readLog(t, a.process.name)) {
		for i, event := range []string{"waiting on plugin manager", "finished plugin manager"} {
			if strings.Contains(line, event+" initial fingerprint: plugin-type=device") {
				at[i], _ = time.Parse("2006-01-02T15:04:05.000Z0700", strings.Fields(line)[0])
			}
		}
	}
	if at[0].IsZero() || at[1].Before(at[0]) {
		t.Fatalf("the agent's log shows no first fingerprint: %v", at)
	}
	return at[1].Sub(at[0])
}

func (a *agent) get(path string, into any) error { return fetchJSON(nomadAPI+path, into) }
