//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// fleet is a Nomad server with two clients, each with a data directory, a plugin folder and a machine of its own.
type fleet struct {
	h100, l40s *agent
	machine    *simdriver.Machine // of h100
	other      *simdriver.Machine // of l40s
}

// startFleet starts a server, the client h100 with eight GPUs and more settings of its plugin, and the client l40s with six GPUs.
func startFleet(t *testing.T, settings string) *fleet {
	t.Helper()
	return startFleetWith(t, settings, 8)
}

// h100History is the state directory of the node with the H100s.
const h100History = "h100-history"

// startFleetWith is startFleet with settings by which the client h100 has so many of its GPUs. More files configure the server and the clients.
func startFleetWith(t *testing.T, settings string, gpus int, files ...string) *fleet {
	t.Helper()
	f := &fleet{machine: install(t, "h100x8"), other: installIn(t, filepath.Join(stateDir(), "l40s-node"), "l40s")}
	if err := errors.Join(f.other.Remove(7), f.other.Remove(6)); err != nil {
		t.Fatal(err)
	}
	launchServer(t, "nomad-server", files...)
	f.h100 = join(t, "h100", "node1", clientPort, onMachine(f.machine, h100History, settings), files...)
	f.l40s = join(t, "l40s", "node3", clientPort+1, onMachine(f.other, "l40s-history", ""), files...)
	f.h100.awaitReady(t)
	f.l40s.awaitReady(t)
	f.h100.awaitGPUs(t, gpus, gpus)
	f.l40s.awaitGPUs(t, 6, 6)
	return f
}

// join starts a client of the server, on a machine with this host name: node1 is also the first node of a Kubernetes beside it.
func join(t *testing.T, name, host string, port int, config string, files ...string) *agent {
	t.Helper()
	installPlugin(t, pluginOf(name), binary("nomad-gpu"))
	argv := []string{"unshare", "--uts", "--", "sh", "-c", `hostname "$0" && exec "$@"`, host, "nomad", "agent"}
	for _, file := range append([]string{nomadConfig(t, name, filepath.Dir(pluginOf(name)), config), clientConfig(t, name, port)}, files...) {
		argv = append(argv, "-config="+file)
	}
	a := &agent{owner: t, name: name, member: name, port: port, argv: argv}
	a.start()
	return a
}

// pluginOf is the file of a client's plugin.
func pluginOf(name string) string { return filepath.Join(stateDir(), name+"-plugins", "nomad-gpu") }

// installPlugin puts a file in a plugin's place, as docs/install.md has it.
func installPlugin(t *testing.T, target, source string) {
	t.Helper()
	must(t, "install", "-D", "-m", "0755", source, target)
}

// fleetJob is a job of testdata/fleet.nomad.hcl.
type fleetJob struct {
	name          string
	count, gpus   int    // of its group, of each task
	group, device string // more lines of the group and of the device
}

// submit submits the job.
func (j fleetJob) submit(t *testing.T) {
	t.Helper()
	must(t, "nomad", "job", "run", "-address="+nomadAPI, "-detach", render(t, "fleet.nomad.hcl", map[string]string{
		"NAME": j.name, "COUNT": fmt.Sprint(max(j.count, 1)), "DEVICES": fmt.Sprint(max(j.gpus, 1)), "GROUP": j.group, "DEVICE": j.device,
	}))
}

// running returns the running allocations of all jobs.
func (f *fleet) running() ([]allocation, error) {
	var all []allocation
	err := fetchJSON(nomadAPI+"/v1/allocations?resources=true", &all)
	return slices.DeleteFunc(all, func(a allocation) bool { return a.ClientStatus != "running" || a.DesiredStatus != "run" }), err
}

// on returns how many allocations of a job run on each node.
func (f *fleet) on(job string) (map[string]int, error) {
	all, err := f.running()
	nodes := map[string]int{}
	for _, alloc := range all {
		if alloc.JobID == job {
			nodes[alloc.NodeName]++
		}
	}
	return nodes, err
}

// awaitOn waits until so many allocations of a job run on the nodes, and returns how long that took.
func (f *fleet) awaitOn(t *testing.T, job string, want map[string]int) {
	t.Helper()
	began := time.Now()
	await(t, fmt.Sprintf("job %s to run on %v", job, want), 60*time.Second, func() error {
		got, err := f.on(job)
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("it runs on %v", got)
		}
		return err
	})
	t.Logf("job %s runs on %v after %v", job, want, time.Since(began).Round(10*time.Millisecond))
}

// awaitLoad waits until allocations with so many different GPUs run on each node.
func (f *fleet) awaitLoad(t *testing.T, want map[string]int) {
	t.Helper()
	began := time.Now()
	await(t, fmt.Sprintf("GPUs in use %v", want), 90*time.Second, func() error {
		got, err := f.load()
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("they are %v", got)
		}
		return errors.Join(err, f.h100.process.alive(), f.l40s.process.alive())
	})
	t.Logf("GPUs in use %v after %v", want, time.Since(began).Round(10*time.Millisecond))
	f.checkTasks(t)
}

// checkTasks fails unless each running allocation has a process with the devices that Nomad chose, and no other task has any.
func (f *fleet) checkTasks(t *testing.T) {
	t.Helper()
	await(t, "the processes of all allocations", 30*time.Second, func() error {
		all, err := f.running()
		want, got := map[string]string{}, map[string]string{}
		for _, alloc := range all {
			want[alloc.ID] = strings.Join(alloc.devices(), ",")
		}
		for _, w := range sleepers() {
			if w.env["NOMAD_ALLOC_ID"] == "" {
				continue // a pod
			}
			gpus := strings.Split(w.gpu, ",")
			slices.Sort(gpus)
			got[w.env["NOMAD_ALLOC_ID"]] = strings.Join(gpus, ",")
		}
		if err == nil && !maps.Equal(want, got) {
			err = fmt.Errorf("they have %v, want %v", got, want)
		}
		return err
	})
}

// load returns how many different GPUs of each node running allocations have.
func (f *fleet) load() (map[string]int, error) {
	all, err := f.running()
	ids := map[string][]string{}
	for _, alloc := range all {
		ids[alloc.NodeName] = append(ids[alloc.NodeName], alloc.devices()...)
	}
	counts := map[string]int{}
	for node, used := range ids {
		slices.Sort(used)
		counts[node] = len(slices.Compact(used))
	}
	return counts, err
}

// TestNomadFleet has jobs placed by what the plugins publish, nodes drained, a client restarted, and its plugin upgraded, rolled back
// and broken under eight running jobs. The node offers its GPUs all the time.
func TestNomadFleet(t *testing.T) {
	f := startFleet(t, "")
	next := nextPlugin(t)
	step(t, "jobs are placed by what they ask of a device", f.place)
	step(t, "eight jobs run on one node", func(t *testing.T) {
		for i := range 8 {
			fleetJob{name: fmt.Sprintf("work-%d", i), device: prefers("NVIDIA H100 80GB HBM3")}.submit(t)
		}
		f.awaitLoad(t, map[string]int{"h100": 8})
	})
	step(t, "nodes are drained", f.drain)
	work, offers := f.hold(t), followNomad(t, f.h100)
	for _, s := range f.replaced(next) {
		step(t, s.name, func(t *testing.T) {
			began := time.Now()
			s.run(t)
			f.h100.awaitStatistics(t, 8)
			time.Sleep(nodeUpdate)
			shown := offers.periods(began, time.Now())
			if less := longest(shown, func(what string) bool { return what != "8 of 8" }); less > belowAtMost {
				t.Errorf("meanwhile the node showed %v", shown)
			}
			work.check(t)
		})
	}
	f.h100.checkContent(t)
	for _, s := range f.broken() {
		step(t, s.name, func(t *testing.T) {
			s.run(t)
			f.h100.awaitStatistics(t, 8)
			work.check(t)
		})
	}
	step(t, "work arrives while Nomad has given the plugin up", f.abandoned)
	f.l40s.checkContent(t)
	checkDriver(t, f.machine)
	checkDriver(t, f.other)
}

// statistics are those of the client, of each device by its ID.
func (a *agent) statistics() (map[string]deviceStatistics, error) {
	var host struct {
		DeviceStats []struct{ InstanceStats map[string]deviceStatistics }
	}
	err := fetchJSON(fmt.Sprintf("http://127.0.0.1:%d/v1/client/stats", a.port), &host)
	devices := map[string]deviceStatistics{}
	for _, group := range host.DeviceStats {
		maps.Copy(devices, group.InstanceStats)
	}
	return devices, err
}

type deviceStatistics struct {
	Stats struct {
		Attributes map[string]struct{ StringVal string }
	}
}

// awaitStatistics waits until the client has those of so many devices, which is after it has opened both streams of the plugin.
func (a *agent) awaitStatistics(t *testing.T, count int) {
	t.Helper()
	await(t, fmt.Sprintf("statistics of %d devices", count), 60*time.Second, func() error {
		devices, err := a.statistics()
		if err == nil && len(devices) != count {
			err = fmt.Errorf("they are of %d", len(devices))
		}
		return err
	})
}

// nodeUpdate is how long a client takes at most to send a changed node to its server.
const nodeUpdate = 10 * time.Second

// purge stops jobs and forgets them.
func (f *fleet) purge(t *testing.T, jobs ...string) {
	t.Helper()
	for _, job := range jobs {
		if err := send(http.MethodDelete, nomadAPI+"/v1/job/"+job+"?purge=true", nil); err != nil {
			t.Fatal(err)
		}
	}
}

// restart ends the client as HashiCorp's systemd unit does, and starts it anew.
func (a *agent) restart(t *testing.T) {
	t.Helper()
	a.process.stop(t, syscall.SIGINT)
	a.start()
}
