//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	ownersGPUs = 8               // works at a time, each with one GPU
	ownersIn   = 5 * time.Second // in which the owner of a GPU is shown and not shown any more
)

// ownersRounds is how often ownersGPUs works begin and end: 125 rounds are 1,000 works.
func ownersRounds(t *testing.T) int {
	t.Helper()
	text := os.Getenv("E2E_OWNER_ROUNDS")
	if text == "" {
		return 4
	}
	rounds, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return rounds
}

// ownersTest is one orchestrator with one agent whose devices get and lose owners. The agent withholds occupied devices, so that a wrong
// finding shows.
type ownersTest struct {
	m      *simdriver.Machine
	socket string // of the agent
	jobs   string // folder of the job files

	begin func(t *testing.T, round int)                             // starts ownersGPUs works, each of which sleeps for marker(round) seconds
	end   func(t *testing.T, round int)                             // ends them
	owner func(w work) report.Owner                                 // that a work is to have, "" = any
	gone  func() error                                              // nil = the orchestrator has recorded the end of all works
	took  struct{ owner, process, gone, ownerGone []time.Duration } // since the process began or ended
}

// work is a process that has a GPU.
type work struct {
	pid  int
	env  map[string]string
	gpu  string
	seen time.Time // when the test found it
}

// marker is the time for which the works of a round sleep, by which the test finds their processes.
func marker(round int) string { return strconv.Itoa(1_000_000 + round) }

// TestOwnersOfJobs has Nomad start and end jobs, by exec and raw_exec, and nomad-gpu show them with their names.
func TestOwnersOfJobs(t *testing.T) {
	m := install(t, "h100x8")
	jobs := filepath.Join(stateDir(), "jobs")
	nomad := launchNomad(t, "nomad", onMachine(m, "nomad-history", fmt.Sprintf("occupancy = \"withhold\"\n    nomad_address = %q\n    hpc_job_mapping_dir = %q", nomadAPI, jobs)))
	nomad.awaitReady(t)
	nomad.awaitGPUs(t, 8, 8)
	name := func(round int) string { return fmt.Sprintf("train-%d", round) }
	o := &ownersTest{
		m: m, socket: control.Path(filepath.Join(stateDir(), "nomad-history"), "nomad-gpu"), jobs: jobs,
		begin: func(t *testing.T, round int) {
			nomad.submit(t, "owners.nomad.hcl", "name="+name(round), "seconds="+marker(round), "driver="+[]string{"exec", "raw_exec"}[round%2])
		},
		end:  func(t *testing.T, round int) { nomad.remove(t, name(round)) },
		gone: func() error { return nil }, // the owner is to be gone after the process has ended
		owner: func(w work) report.Owner {
			return report.Owner{Orchestrator: "nomad", Namespace: "default", Name: w.env["NOMAD_JOB_ID"], Container: "sleep", ID: w.env["NOMAD_ALLOC_ID"]}
		},
	}
	o.run(t)
	step(t, "nomad-gpu is killed", func(t *testing.T) {
		round := 1_000
		works := o.start(t, round)
		nomad.killPlugin(t)
		began := time.Now()
		for _, w := range works {
			w.seen = began
			o.awaitOwner(t, w, 20*time.Second)
		}
		t.Logf("owners are shown %v after another nomad-gpu has started", time.Since(began).Round(time.Millisecond))
		o.stop(t, round, works)
	})
}

// TestOwnersOfPods has kubelet start and end pods, and k8s-gpu show them with their names.
func TestOwnersOfPods(t *testing.T) {
	m := install(t, "h100x8")
	c := startClusterOn(t, containerd2WithPodGroups, pluginImage(t))
	component, err := os.ReadFile("../../deploy/owners/kustomization.yaml")
	if err != nil {
		t.Fatal(err)
	}
	jobs := filepath.Join(stateDir(), "jobs")
	text := strings.NewReplacer("value: report", "value: withhold", "path: /var/log/pods", "path: "+logDir()+"/pods").Replace(string(component))
	write(t, "parts/owners/kustomization.yaml", []byte(text))
	render(t, "parts/jobs/kustomization.yaml", map[string]string{"JOBS": jobs})
	c.deployPlugin(t, m.Root, "k8s-history", "parts/owners", "parts/jobs")
	c.awaitGPUs(t, 8, 8)
	name := func(round, i int) string { return fmt.Sprintf("train-%d-%d", round, i) }
	o := &ownersTest{
		m: m, socket: control.Path(filepath.Join(stateDir(), "k8s-history"), "k8s-gpu"), jobs: jobs,
		begin: func(t *testing.T, round int) {
			var pods []string
			for i := range ownersGPUs {
				path := render(t, "pod.yaml", map[string]string{"NAME": name(round, i), "RESOURCE": gpuResource, "COUNT": "1"})
				text, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				pods = append(pods, strings.ReplaceAll(string(text), "sleep 1000000", "sleep "+marker(round)))
			}
			must(t, "kubectl", "apply", "-f", write(t, "pods.yaml", []byte(strings.Join(pods, "\n---\n"))))
		},
		end: func(t *testing.T, round int) {
			var pods []string
			for i := range ownersGPUs {
				pods = append(pods, name(round, i))
			}
			must(t, append([]string{"kubectl", "delete", "pod", "--wait=false", "--now"}, pods...)...)
		},
		gone: func() error {
			held, err := c.held()
			if err == nil && len(held) > 0 {
				err = fmt.Errorf("kubelet lists %v", held)
			}
			return err
		},
		owner: func(w work) report.Owner {
			return report.Owner{Orchestrator: "kubernetes", Namespace: "default", Name: w.env["HOSTNAME"], Container: "gpus"}
		},
	}
	o.run(t)
}

// run has works begin and end, then a process that has no reservation.
func (o *ownersTest) run(t *testing.T) {
	var before report.Debug
	rounds := ownersRounds(t)
	for round := range rounds {
		works := o.start(t, round)
		o.stop(t, round, works)
		if round == 0 {
			before = o.debug(t)
		}
	}
	after := o.debug(t)
	t.Logf("%d works: owner shown after %s, process with its owner after %s, end recorded after %s, owner gone after %s; goroutines %d, then %d, descriptors %d, then %d, heap %d kB, then %d kB",
		rounds*ownersGPUs, summary(o.took.owner), summary(o.took.process), summary(o.took.gone), summary(o.took.ownerGone), before.Goroutines, after.Goroutines,
		before.FileDescriptors, after.FileDescriptors, before.HeapBytes>>10, after.HeapBytes>>10)
	if after.Goroutines > before.Goroutines+5 || after.FileDescriptors > before.FileDescriptors+5 {
		t.Errorf("goroutines %d, then %d; descriptors %d, then %d", before.Goroutines, after.Goroutines, before.FileDescriptors, after.FileDescriptors)
	}
	step(t, "a process without a reservation", func(t *testing.T) { o.withoutReservation(t) })
	checkDriver(t, o.m)
}

// start starts the works of a round, and waits until each GPU has its owner, and each process.
func (o *ownersTest) start(t *testing.T, round int) []work {
	t.Helper()
	o.begin(t, round)
	var works []work
	await(t, "the processes of the works", 60*time.Second, func() error {
		for _, w := range processesOf(marker(round)) {
			if !slices.ContainsFunc(works, func(other work) bool { return other.pid == w.pid }) {
				if err := o.m.UseProcess(slotOf(t, o.m, w.gpu), w.pid, 64); err != nil {
					t.Fatal(err)
				}
				works = append(works, w)
			}
		}
		if len(works) != ownersGPUs {
			return fmt.Errorf("there are %d", len(works))
		}
		return nil
	})
	for _, w := range works {
		o.took.owner = append(o.took.owner, o.awaitOwner(t, w, ownersIn))
	}
	for _, w := range works {
		o.took.process = append(o.took.process, o.awaitProcess(t, w))
	}
	await(t, "the job files", time.Second, func() error {
		if files, _ := filepath.Glob(o.jobs + "/[0-9]*"); len(files) != ownersGPUs {
			return fmt.Errorf("there are %q", files)
		}
		return nil
	})
	return works
}

// stop ends the works of a round, and waits until nothing is left of them.
func (o *ownersTest) stop(t *testing.T, round int, works []work) {
	t.Helper()
	o.end(t, round)
	await(t, "the end of the processes", 60*time.Second, func() error {
		if left := processesOf(marker(round)); len(left) > 0 {
			return fmt.Errorf("%d run", len(left))
		}
		return nil
	})
	ended := time.Now()
	for _, w := range works {
		if err := o.m.EndProcess(w.pid); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "the orchestrator to record the end", 60*time.Second, o.gone)
	recorded := time.Now()
	o.took.gone = append(o.took.gone, recorded.Sub(ended))
	await(t, "the devices to be free", ownersIn, func() error {
		for _, d := range o.report(t).Devices {
			if len(d.Owners) > 0 || len(d.Processes) > 0 || !d.HeldSince.IsZero() || !d.IdleSince.IsZero() {
				return fmt.Errorf("%s has %+v, processes %+v", d.ID, d.Owners, d.Processes)
			}
		}
		return nil
	})
	o.took.ownerGone = append(o.took.ownerGone, time.Since(ended))
	await(t, "the job files to be removed", time.Second, func() error {
		files, _ := filepath.Glob(o.jobs + "/[0-9]*")
		if len(files) > 0 {
			return fmt.Errorf("there are %q", files)
		}
		return nil
	})
}

// awaitOwner waits until the GPU of a work has its owner and no other, and returns how long after the begin of the work it had.
func (o *ownersTest) awaitOwner(t *testing.T, w work, limit time.Duration) time.Duration {
	t.Helper()
	want := o.owner(w)
	await(t, "the owner of "+w.gpu, time.Until(w.seen.Add(limit)), func() error {
		d := o.device(t, w.gpu)
		if len(d.Owners) == 1 && want.ID == "" && want.Orchestrator == "kubernetes" {
			want.ID = d.Owners[0].ID
		}
		if len(d.Owners) != 1 || d.Owners[0] != want || want.ID == "" || d.HeldSince.IsZero() {
			return fmt.Errorf("it has %+v, want %+v", d.Owners, want)
		}
		return nil
	})
	return time.Since(w.seen)
}

// awaitProcess waits until the process of a work is shown with its owner.
func (o *ownersTest) awaitProcess(t *testing.T, w work) time.Duration {
	t.Helper()
	await(t, "the process of "+w.gpu, time.Until(w.seen.Add(ownersIn)), func() error {
		d := o.device(t, w.gpu)
		if len(d.Processes) != 1 || len(d.Owners) != 1 {
			return fmt.Errorf("it has %+v, owners %+v", d.Processes, d.Owners)
		}
		p, owner := d.Processes[0], d.Owners[0]
		if p.PID != w.pid || p.Owner == nil || p.Owner.ID != owner.ID || p.Owner.Name != owner.Name || p.Name == "" || p.Unreserved {
			return fmt.Errorf("it is %+v of %+v, want that of %+v", p, p.Owner, owner)
		}
		return nil
	})
	return time.Since(w.seen)
}

// withoutReservation has a process of the test use a GPU, which gets no new work until that has ended.
func (o *ownersTest) withoutReservation(t *testing.T) {
	id := o.m.UUID(3)
	cmd := exec.CommandContext(t.Context(), "sleep", "1000000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := o.m.UseProcess(3, cmd.Process.Pid, 512); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	await(t, "the GPU to be withheld", 30*time.Second, func() error {
		d := o.device(t, id)
		if want := fmt.Sprintf("pid %d (sleep)", cmd.Process.Pid); d.Schedulable || !strings.Contains(d.Health, want) || len(d.Owners) > 0 || !d.Processes[0].Unreserved {
			return fmt.Errorf("%s, processes %+v", d.Health, d.Processes)
		}
		return nil
	})
	t.Logf("withheld after %v: %s", time.Since(began).Round(time.Millisecond), o.device(t, id).Health)
	if err := errors.Join(cmd.Process.Kill(), o.m.EndProcess(cmd.Process.Pid)); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	began = time.Now()
	await(t, "the GPU to be free", 5*time.Second, func() error {
		if d := o.device(t, id); !d.Schedulable {
			return errors.New(d.Health)
		}
		return nil
	})
	t.Logf("free after %v", time.Since(began).Round(time.Millisecond))
}

// device is a device in the report of the agent.
func (o *ownersTest) device(t *testing.T, id string) report.Device {
	t.Helper()
	r := o.report(t)
	i := slices.IndexFunc(r.Devices, func(d report.Device) bool { return string(d.ID) == id })
	if i < 0 {
		return report.Device{}
	}
	return r.Devices[i]
}

// report reads the report of the agent; one without devices while it does not answer. No process of a work may make a device occupied.
func (o *ownersTest) report(t *testing.T) (r report.Report) {
	t.Helper()
	if o.get("/v1/report", &r) != nil {
		return report.Report{}
	}
	for _, d := range r.Devices {
		if !d.Schedulable && slices.ContainsFunc(d.Processes, func(p report.Process) bool { return p.Owner != nil }) {
			t.Errorf("%s is withheld: %s", d.ID, d.Health)
		}
	}
	return r
}

func (o *ownersTest) debug(t *testing.T) (d report.Debug) {
	t.Helper()
	if err := o.get("/v1/debug", &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// get makes one request to the agent's socket.
func (o *ownersTest) get(path string, into any) error {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", o.socket)
	}}
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://agent"+path, http.NoBody)
	if err != nil {
		return err
	}
	answer, err := (&http.Client{Transport: transport, Timeout: commandLimit}).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	return json.NewDecoder(answer.Body).Decode(into)
}

// processesOf returns the processes that sleep for so many seconds and have a GPU.
func processesOf(seconds string) []work {
	var works []work
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		text, _ := os.ReadFile(file) // gone meanwhile: an empty line
		if !strings.HasSuffix(string(text), "sleep\x00"+seconds+"\x00") {
			continue
		}
		w := work{env: map[string]string{}, seen: time.Now()}
		w.pid, _ = strconv.Atoi(filepath.Base(filepath.Dir(file)))
		environ, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "environ"))
		for pair := range strings.SplitSeq(string(environ), "\x00") {
			key, value, _ := strings.Cut(pair, "=")
			w.env[key] = value
		}
		if w.gpu = w.env["NVIDIA_VISIBLE_DEVICES"]; w.gpu != "" {
			works = append(works, w)
		}
	}
	return works
}

// summary is the median and the maximum of times.
func summary(times []time.Duration) string {
	slices.Sort(times)
	return fmt.Sprintf("%v (at most %v)", times[len(times)/2].Round(10*time.Millisecond), times[len(times)-1].Round(10*time.Millisecond))
}
