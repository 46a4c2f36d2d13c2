//go:build matrix

package upgrade

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/test/binaries"
)

// xid is that of a fault which only a reset clears.
const xid = 95

// faults are the slots of the GPU with the XID and of the one that is lost, for each agent. The indices after that one move.
var faults = map[string]struct{ faulty, lost int }{nomadGPU: {1, 2}, k8sGPU: {5, 6}}

// views are what each orchestrator has, by agent and device ID.
type views map[string]map[string]offer

var record = flag.Bool("record", false, "write results.json, from which docs/compatibility.md has its table")

// TestUpgrade starts the agents of each former state, lets a GPU of each fail and another one vanish, ends them, and starts today's
// on what they have left; then one of each, the former ones, and today's again.
func TestUpgrade(t *testing.T) {
	today := filepath.Dir(binaries.Path(t, nomadGPU))
	var results []result
	for _, s := range states(t) {
		r := result{Name: s.Name, Date: time.Now().UTC().Format(time.DateOnly), Passed: true}
		for _, end := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			passed := t.Run(s.Name+"/"+end.String(), func(t *testing.T) {
				former, err := s.build(t)
				if err != nil {
					t.Skip(err)
				}
				r.Ran++
				n := newNode(t, s)
				before := n.recordFaults(s, former, end)
				n.checkToday(today, before)
				n.checkMixed(s, former, today, before)
				n.checkFormer(s, former, before)
				n.checkToday(today, before)
				if s.has("handed-out") && !n.handedOut() {
					t.Error("the record of a pod's GPU is gone")
				}
			})
			r.Passed = r.Passed && passed
		}
		results = append(results, r)
	}
	if *record {
		text, err := json.MarshalIndent(results, "", "  ")
		if err = errors.Join(err, os.WriteFile("results.json", append(text, '\n'), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
}

// result is what the runs of one state gave.
type result struct {
	Name   string `json:"name"`
	Date   string `json:"date"`
	Ran    int    `json:"ran"` // none without the commit
	Passed bool   `json:"passed"`
}

// recordFaults lets the agents of a state record faults, and returns what each orchestrator has when they are ended.
func (n *node) recordFaults(s state, bin string, end syscall.Signal) views {
	n.Helper()
	agents := n.startBoth(s, bin)
	for _, a := range agents {
		a.awaitView("only healthy devices", func(seen map[string]offer) bool { return len(seen) == n.devices && unhealthy(seen) == 0 })
	}
	_, err := agents[k8sGPU].kubelet.Allocate(n.Context(), resource, n.uuids[held])
	n.must(err)
	n.pods.Hold("default/train", resource, n.uuids[held])
	if s.has("handed-out") {
		n.await("the record of a pod's GPU", n.handedOut)
	}
	for _, f := range faults {
		n.must(n.machine.XID(f.faulty, xid))
	}
	for program, a := range agents {
		faulty := n.uuids[faults[program].faulty]
		a.awaitView("a GPU with an XID", func(seen map[string]offer) bool { return isUnhealthy(seen, faulty) })
	}
	for _, f := range faults {
		n.must(n.machine.Remove(f.lost))
	}
	before := views{}
	for program, a := range agents {
		faulty, lost := n.uuids[faults[program].faulty], n.uuids[faults[program].lost]
		before[program] = a.awaitView("a lost GPU", func(seen map[string]offer) bool { return isUnhealthy(seen, lost) })
		n.await("the history of "+program, func() bool { return n.recorded(program, faulty, lost) })
		before[program] = a.view()
	}
	for _, a := range agents {
		a.end(end)
	}
	return before
}

// checkToday starts today's agents: from their first list on the orchestrators have the same devices with the same names and
// health, and the causes are known.
func (n *node) checkToday(bin string, want views) {
	n.Helper()
	began := time.Now()
	for program, a := range n.startBoth(state{}, bin) {
		a.checkViews(want[program])
		all := a.inspect(bin)
		if d := all[n.uuids[faults[program].faulty]]; d.State != "unhealthy" || d.Cause != "XID_95" {
			n.Errorf("%s: the GPU with the XID is %+v", program, d)
		}
		if d := all[n.uuids[faults[program].lost]]; d.State != "lost" {
			n.Errorf("%s: the lost GPU is %+v", program, d)
		}
		if program == k8sGPU {
			n.checkCDI(began)
		}
		a.end(syscall.SIGTERM)
	}
}

// checkMixed starts a former and one of today's agents: the agents of a node are not upgraded at the same moment.
func (n *node) checkMixed(s state, former, today string, want views) {
	n.Helper()
	for program := range faults {
		for other := range faults {
			if other == program {
				continue
			}
			agents := []*agent{n.start(s, former, program), n.start(state{}, today, other)}
			for _, a := range agents {
				a.checkViews(want[a.program])
			}
			for _, a := range agents {
				a.end(syscall.SIGTERM)
			}
		}
	}
}

// checkFormer starts the agents of a state on what today's have written.
func (n *node) checkFormer(s state, bin string, want views) {
	n.Helper()
	for program, a := range n.startBoth(s, bin) {
		a.checkViews(want[program])
		a.end(syscall.SIGTERM)
	}
}

// checkViews waits until the orchestrator has what it should have, and compares the first lists.
func (a *agent) checkViews(want map[string]offer) {
	a.Helper()
	seen := a.awaitView("the devices of before", func(seen map[string]offer) bool { return len(seen) >= len(want) })
	for _, got := range []map[string]offer{a.first(), seen} {
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(offer{})); diff != "" {
			a.Errorf("%s: before (-) and now (+):\n%s", a.program, diff)
		}
	}
}

// checkCDI checks that the only specification was written by the agent that runs, and defines the GPUs of k8s-gpu.
func (n *node) checkCDI(began time.Time) {
	n.Helper()
	entries, err := os.ReadDir(n.path("cdi"))
	n.must(err)
	if len(entries) != 1 {
		n.Fatalf("specifications: %v, want one", entries)
	}
	text, err := os.ReadFile(filepath.Join(n.path("cdi"), entries[0].Name()))
	var file struct{ Devices []struct{ Name string } }
	n.must(err, json.Unmarshal(text, &file))
	info, err := entries[0].Info()
	if n.must(err); info.ModTime().Before(began) {
		n.Errorf("%s is that of before", entries[0].Name())
	}
	defined := map[string]bool{}
	for _, d := range file.Devices {
		defined[d.Name] = true
	}
	for slot, id := range n.uuids {
		if slot > 3 && slot != faults[k8sGPU].lost && !defined[id] {
			n.Errorf("%s does not define GPU %d", entries[0].Name(), slot)
		}
	}
}

func isUnhealthy(seen map[string]offer, id string) bool {
	o, ok := seen[id]
	return ok && !o.healthy
}

func unhealthy(seen map[string]offer) (count int) {
	for _, o := range seen {
		if !o.healthy {
			count++
		}
	}
	return count
}
