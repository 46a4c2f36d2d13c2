//go:build e2e

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// run has works begin and end, then a process that has no reservation.
func (o *ownersTest) run(t *testing.T) {
	var before report.Debug
	rounds := roundsOf(ownersRounds, 2)
	for round := range rounds {
		works := o.start(t, round)
		o.stop(t, round, works)
		if round == 0 {
			before = o.debug(t)
		}
	}
	after := o.debug(t)
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
				works = append(works, w)
			}
		}
		if len(works) != ownersGPUs {
			return fmt.Errorf("there are %d", len(works))
		}
		return nil
	})
	for _, w := range works {
		o.awaitOwner(t, w, ownersIn) // only the orchestrator has it: no process uses the GPU yet
	}
	for i, w := range works {
		if err := o.m.UseProcess(slotOf(t, o.m, w.gpu), w.pid, 64); err != nil {
			t.Fatal(err)
		}
		works[i].seen = time.Now()
	}
	for _, w := range works {
		o.awaitProcess(t, w)
	}
	await(t, "the job files", 30*time.Second, func() error {
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
	for _, w := range works {
		if err := o.m.EndProcess(w.pid); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "the orchestrator to record the end", 60*time.Second, o.gone)
	await(t, "the devices to be free", ownersIn, func() error {
		for _, d := range o.report(t).Devices {
			if len(d.Owners) > 0 || len(d.Processes) > 0 || !d.HeldSince.IsZero() || !d.IdleSince.IsZero() {
				return fmt.Errorf("%s has %+v, processes %+v", d.ID, d.Owners, d.Processes)
			}
		}
		return nil
	})
	await(t, "the job files to be removed", 30*time.Second, func() error {
		files, _ := filepath.Glob(o.jobs + "/[0-9]*")
		if len(files) > 0 {
			return fmt.Errorf("there are %q", files)
		}
		return nil
	})
}

// awaitOwner waits until the GPU of a work has its owner and no other.
func (o *ownersTest) awaitOwner(t *testing.T, w work, limit time.Duration) {
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
}

// awaitProcess waits until the process of a work is shown with its owner.
func (o *ownersTest) awaitProcess(t *testing.T, w work) {
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
	await(t, "the GPU to be free", 30*time.Second, func() error {
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
func (o *ownersTest) report(t *testing.T) report.Report {
	t.Helper()
	r, err := control.Report(t.Context(), o.socket)
	if err != nil {
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
	var text bytes.Buffer
	err := control.Debug(t.Context(), o.socket, &text, true)
	if err := errors.Join(err, json.Unmarshal(text.Bytes(), &d)); err != nil {
		t.Fatal(err)
	}
	return d
}
