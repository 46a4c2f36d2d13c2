//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

const (
	fleetAddress = "127.0.0.1:9510"
	fleetToken   = "let-me-stop-it"
)

// decision is how long gpu-fleet takes to decide on something new, and to call the servers.
const decision = 3 * time.Second

// gpuFleet is the program with its configuration. It runs on the machine of the test, outside of the clusters.
type gpuFleet struct {
	owner    *testing.T // the test that the process lives as long as
	clusters []map[string]any
	ledger   map[string]any
	process  *process
}

// settings are those of a policy that acts at once and has no budget; a test sets what it is about.
func settings(more map[string]any) map[string]any {
	all := map[string]any{
		"delay": "0s", "max_gpus": 64, "max_nodes": 1000, "max_percent": 0, "cool_down": "0s", "attempts": 10, "quorum_nodes": 1000, "quorum_time": "10m",
	}
	maps.Copy(all, more)
	return all
}

// configure writes the configuration, with one mode for all clusters.
func (g *gpuFleet) configure(t *testing.T, mode string, policy map[string]any) {
	t.Helper()
	var clusters []map[string]any
	for _, c := range g.clusters {
		c = maps.Clone(c)
		c["mode"] = mode
		clusters = append(clusters, c)
	}
	write(t, "gpu-fleet/token", []byte(fleetToken))
	write(t, "gpu-fleet/gpu-fleet.yaml", encode(t, map[string]any{
		"clusters": clusters, "ledger": g.ledger, "policy": policy, "listen": fleetAddress, "token_file": filepath.Join(stateDir(), "gpu-fleet", "token"),
	}))
}

func fleetConfigFile() string { return filepath.Join(stateDir(), "gpu-fleet", "gpu-fleet.yaml") }

// start starts the program, and waits until it leads and has read all clusters.
func (g *gpuFleet) start(t *testing.T) {
	t.Helper()
	g.process = start(g.owner, "gpu-fleet", nil, binary("gpu-fleet"), "--config="+fleetConfigFile())
	began := time.Now()
	g.await(t, "gpu-fleet to lead, and to have read all clusters", 60*time.Second, func(d report.Document) error {
		var problems []error
		if !d.Leads {
			problems = append(problems, fmt.Errorf("it does not lead, %q does", d.Leader))
		}
		for _, c := range d.Clusters {
			if c.Problem != "" || c.ReadAt.IsZero() || c.GPUs == 0 {
				problems = append(problems, fmt.Errorf("cluster %s: %q, read at %v, %d GPUs", c.Name, c.Problem, c.ReadAt, c.GPUs))
			}
		}
		if d.Ledger.Error != "" {
			problems = append(problems, errors.New(d.Ledger.Error))
		}
		return errors.Join(problems...)
	})
	t.Logf("gpu-fleet leads after %v", time.Since(began).Round(10*time.Millisecond))
}

// restart ends the program as systemd does, and starts it with another mode and policy.
func (g *gpuFleet) restart(t *testing.T, mode string, policy map[string]any) {
	t.Helper()
	if g.process != nil {
		g.process.stop(t, syscall.SIGTERM)
		if !g.process.cmd.ProcessState.Success() {
			t.Errorf("gpu-fleet ended with %v; its log ends in\n%s", g.process.cmd.ProcessState, tail(logPath("gpu-fleet"), 5))
		}
	}
	g.configure(t, mode, policy)
	g.start(t)
}

// kill is for a function that does not belong to the test's goroutine.
func (g *gpuFleet) kill() {
	_ = g.process.cmd.Process.Kill() // fails only when it has ended
	<-g.process.exited
}

// document is what gpu-fleet shows.
func (g *gpuFleet) document() (d report.Document, err error) {
	return d, fetchJSON("http://"+fleetAddress+"/fleet.json", &d)
}

// await waits until what gpu-fleet shows is right.
func (g *gpuFleet) await(t *testing.T, what string, limit time.Duration, right func(report.Document) error) (d report.Document) {
	t.Helper()
	await(t, what, limit, func() (err error) {
		if d, err = g.document(); err == nil {
			err = right(d)
		}
		return errors.Join(err, g.process.alive())
	})
	return d
}

// verb runs a command of gpu-fleet.
func (g *gpuFleet) verb(t *testing.T, argv ...string) string {
	t.Helper()
	return must(t, slices.Concat([]string{binary("gpu-fleet")}, argv[:1], []string{"--config=" + fleetConfigFile()}, argv[1:])...)
}

// awaitWait waits until the work, or the GPU, waits for this reason, and returns what gpu-fleet reports of it.
func (g *gpuFleet) awaitWait(t *testing.T, at place, reason rescue.Reason) (found report.Wait) {
	t.Helper()
	g.await(t, fmt.Sprintf("%s of %s to wait for %s", at.id, at.gpu, reason), 60*time.Second, func(d report.Document) error {
		for _, w := range d.Waits {
			if w.Reason == reason && (w.Work == at.id || w.Work == "" && string(w.GPU) == at.gpu) {
				found = w
				return nil
			}
		}
		return fmt.Errorf("what waits: %s", shown(d.Waits))
	})
	t.Logf("%s waits for %s: %s", at.id, reason, found.Text)
	return found
}

// awaitRefusal is awaitWait for what is refused.
func (g *gpuFleet) awaitRefusal(t *testing.T, at place, reason rescue.Reason) {
	t.Helper()
	g.await(t, fmt.Sprintf("%s of %s to be refused for %s", at.id, at.gpu, reason), 60*time.Second, func(d report.Document) error {
		for _, r := range d.Refusals {
			if r.Reason == reason && (r.Work == at.id || r.Work == "" && string(r.GPU) == at.gpu) {
				t.Logf("%s is refused for %s: %s", at.id, reason, r.Text)
				return nil
			}
		}
		return fmt.Errorf("what is refused: %s; what waits: %s", shown(d.Refusals), shown(d.Waits))
	})
}

// awaitOutcome waits until the one move of the work has one of these outcomes, and returns it and its rescue.
func (g *gpuFleet) awaitOutcome(t *testing.T, at place, outcomes ...rescue.Outcome) (r report.Rescue, m report.Move) {
	t.Helper()
	g.await(t, fmt.Sprintf("the move of %s to be one of %s", at.id, shown(outcomes)), 60*time.Second, func(d report.Document) error {
		rescues := rescuesOf(d, at)
		if len(rescues) != 1 {
			return fmt.Errorf("its rescues are %s; what waits: %s", shown(rescues), shown(d.Waits))
		}
		r = rescues[0]
		i := slices.IndexFunc(r.Moves, func(m report.Move) bool { return m.Workloads[0].ID == at.id })
		if m = r.Moves[i]; !slices.Contains(outcomes, m.Outcome) {
			return fmt.Errorf("it is %s; what waits: %s", shown(m), shown(d.Waits))
		}
		return nil
	})
	return r, m
}

// rescuesOf are those that have the work.
func rescuesOf(d report.Document, at place) (all []report.Rescue) {
	for _, r := range d.History {
		if slices.ContainsFunc(r.Moves, func(m report.Move) bool {
			return slices.ContainsFunc(m.Workloads, func(w report.Workload) bool { return w.ID == at.id })
		}) {
			all = append(all, r)
		}
	}
	return all
}

// shown is a value as a message has it.
func shown(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// shows is what gpu-fleet shows of faults, for a message.
func (g *gpuFleet) shows() string {
	d, err := g.document()
	return fmt.Sprintf("waits %s, refusals %s, problems %s, error %v", shown(d.Waits), shown(d.Refusals), shown(d.Problems), err)
}

// awaitDone waits until gpu-fleet has done something.
func (g *gpuFleet) awaitDone(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		t.Fatalf("waited 60 s for %s; it shows %s", what, g.shows())
	}
}
