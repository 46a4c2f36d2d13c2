//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	gpufleet "github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/nomad"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// nomadRegion is a region with ACLs and a client with eight GPUs.
type nomadRegion struct {
	admin   *api.Client
	machine *simdriver.Machine
}

// The rights of gpu-fleet, as docs have them.
const fleetRules = `
node { policy = "write" }
operator { policy = "read" }
namespace "*" {
  capabilities = ["read-job", "alloc-lifecycle"]
  variables { path "gpu-fleet/*" { capabilities = ["read", "write"] } }
}
`

func startRegion(t *testing.T) *nomadRegion {
	t.Helper()
	r := &nomadRegion{machine: install(t, "h100x8")}
	acl := write(t, "acl.hcl", []byte("acl {\n  enabled = true\n}\n"))
	server := start(t, "nomad-server", nil, "nomad", "agent", "-config="+render(t, "nomad-server.hcl", map[string]string{"STATE": stateDir()}), "-config="+acl)
	installPlugin(t, pluginOf("h100"), binary("nomad-gpu"))
	newAgent(t, "h100", nomadConfig(t, "h100", filepath.Dir(pluginOf("h100")), onMachine(r.machine, "h100-history", "")), "-config="+clientConfig(t, "h100", clientPort))
	admin, err := api.NewClient(&api.Config{Address: nomadAPI})
	if err != nil {
		t.Fatal(err)
	}
	r.admin = admin
	await(t, "the first token", 60*time.Second, func() error {
		token, _, err := admin.ACLTokens().Bootstrap(nil)
		if err == nil {
			admin.SetSecretID(token.SecretID)
		}
		return errors.Join(err, server.alive())
	})
	await(t, "a server that encrypts variables", 30*time.Second, func() error {
		_, _, err := admin.Variables().Create(&api.Variable{Path: "ready", Items: api.VariableItems{"is": "so"}}, nil)
		return err
	})
	for _, name := range []string{"team", "hidden"} {
		if _, err := admin.Namespaces().Register(&api.Namespace{Name: name}, nil); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// permit makes or changes a policy, and the token that has it if there is none.
func (r *nomadRegion) permit(t *testing.T, name, rules string) {
	t.Helper()
	if _, err := r.admin.ACLPolicies().Upsert(&api.ACLPolicy{Name: name, Rules: rules}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(tokenFile(name)); err == nil {
		return
	}
	token, _, err := r.admin.ACLTokens().Create(&api.ACLToken{Name: name, Type: "client", Policies: []string{name}}, nil)
	if err == nil {
		err = os.WriteFile(tokenFile(name), []byte(token.SecretID+"\n"), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func tokenFile(policy string) string { return filepath.Join(stateDir(), policy+".token") }

// cluster returns the region as gpu-fleet has it, with the token of a policy.
func (r *nomadRegion) cluster(t *testing.T, policy string) *nomad.Cluster {
	t.Helper()
	r.permit(t, policy, fleetRules)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
	c, err := nomad.New(nomad.Options{Name: "dc1", Mode: rescue.ModeAct, Address: nomadAPI, TokenFile: tokenFile(policy), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// running returns such a cluster that is read until the test ends.
func (r *nomadRegion) running(t *testing.T, policy string) *nomad.Cluster {
	t.Helper()
	c := r.cluster(t, policy)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = c.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return c
}

// run registers a job of one GPU in a namespace.
func (r *nomadRegion) run(t *testing.T, name, namespace string) {
	t.Helper()
	text, err := os.ReadFile(render(t, "fleet.nomad.hcl", map[string]string{"NAME": name, "COUNT": "1", "DEVICES": "1", "GROUP": "", "DEVICE": ""}))
	if err != nil {
		t.Fatal(err)
	}
	job, err := r.admin.Jobs().ParseHCL(string(text), true)
	if err != nil {
		t.Fatal(err)
	}
	job.Namespace = &namespace
	if _, _, err = r.admin.Jobs().Register(job, &api.WriteOptions{Namespace: namespace}); err != nil {
		t.Fatal(err)
	}
}

// awaitShown waits until the cluster shows what is wanted.
func awaitShown(t *testing.T, c *nomad.Cluster, what string, limit time.Duration, wanted func(rescue.Cluster) bool) rescue.Cluster {
	t.Helper()
	began := time.Now()
	var shown rescue.Cluster
	await(t, what, limit, func() error {
		if shown = c.Shown().Load(); !wanted(shown) {
			return fmt.Errorf("it shows %+v", shown)
		}
		return nil
	})
	t.Logf("%s after %v", what, time.Since(began).Round(10*time.Millisecond))
	return shown
}

func workOf(c rescue.Cluster, job string, wanted func(rescue.Work) bool) (rescue.Work, bool) {
	i := slices.IndexFunc(c.Work, func(w rescue.Work) bool { return strings.HasPrefix(w.Name, job+".") && wanted(w) })
	if i < 0 {
		return rescue.Work{}, false
	}
	return c.Work[i], true
}

func runs(w rescue.Work) bool { return w.Phase == rescue.Running }

// gpu-fleet's view of a region with ACLs: what it reads, does, and reports when rights are missing; its ledger and its lock.
func TestNomadRescueAPI(t *testing.T) {
	r := startRegion(t)
	c := r.cluster(t, "gpu-fleet")
	together := func(name string, check func(*testing.T)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t)
		})
	}
	together("ledger", func(t *testing.T) { checkLedger(t, r, c.Store("default", "gpu-fleet/test")) })
	together("lead", func(t *testing.T) { checkLead(t, c, r.cluster(t, "gpu-fleet")) })
	together("a leader that is killed", func(t *testing.T) { checkTakeOver(t, r, c) })
	together("a fault is read, and its work moved", func(t *testing.T) { checkMove(t, r, r.running(t, "gpu-fleet")) })
	together("rights", func(t *testing.T) { checkRights(t, r, r.running(t, "other")) })
}

func checkLedger(t *testing.T, r *nomadRegion, s gpufleet.Store) {
	ctx := t.Context()
	if _, _, err := s.Read(ctx); !errors.Is(err, gpufleet.ErrNoLedger) {
		t.Errorf("before it is created: %v", err)
	}
	if err := s.Create(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(ctx); !errors.Is(err, gpufleet.ErrExists) {
		t.Errorf("created twice: %v", err)
	}
	l, v, err := s.Read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	l.Term = 7
	next, err := s.Write(ctx, l, v)
	if err != nil || next == v {
		t.Fatalf("version %s: %v", next, err)
	}
	if _, err := s.Write(ctx, l, v); !errors.Is(err, gpufleet.ErrConflict) {
		t.Errorf("an old version is written: %v", err)
	}
	if l, got, err := s.Read(ctx); err != nil || l.Term != 7 || got != next {
		t.Errorf("term %d, version %s: %v", l.Term, got, err)
	}
	variable := &api.Variable{Path: "gpu-fleet/test/ledger", Items: api.VariableItems{"ledger": `{"version": 99}`}}
	if _, _, err := r.admin.Variables().Update(variable, nil); err != nil {
		t.Fatal(err)
	}
	var damaged *gpufleet.DamagedError
	if _, _, err := s.Read(ctx); !errors.As(err, &damaged) {
		t.Errorf("damaged: %v", err)
	}
}

// A leader that is killed keeps the lead for 2 x TTL and the delay: it has the lock, and does not renew it.
func checkTakeOver(t *testing.T, r *nomadRegion, c *nomad.Cluster) {
	v := &api.Variable{Path: "gpu-fleet/killed/leader", Items: api.VariableItems{"holder": "killed"}, Lock: &api.VariableLock{TTL: "10s", LockDelay: "5s"}}
	if _, _, err := r.admin.Variables().AcquireLock(v, nil); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	err := c.Leader("default", "gpu-fleet/killed", "next").Lead(t.Context(), func(context.Context) {
		if d := time.Since(began); d < 20*time.Second || d > 40*time.Second {
			t.Errorf("the lock was taken over after %v, want 25 s or little more", d)
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// Of two leaders one leads; when it gives up the other does with its next try, each 5 s, and not when the lock ends, after 25 s.
func checkLead(t *testing.T, c, d *nomad.Cluster) {
	first, second := c.Leader("default", "gpu-fleet/test", "first"), d.Leader("default", "gpu-fleet/test", "second")
	leads, stop, other := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		_ = first.Lead(t.Context(), func(ctx context.Context) { close(leads); <-stop })
	}()
	<-leads
	go func() {
		_ = second.Lead(t.Context(), func(context.Context) { close(other) })
	}()
	select {
	case <-other:
		t.Error("two lead")
	case <-time.After(2 * time.Second):
	}
	await(t, "both to know who leads", 30*time.Second, func() error { // the second one, after its first try
		if first.Holder() != "first" || second.Holder() != "first" {
			return fmt.Errorf("holder %q, %q", first.Holder(), second.Holder())
		}
		return nil
	})
	close(stop)
	began := time.Now()
	<-other
	if d := time.Since(began); d > 15*time.Second {
		t.Errorf("the second one leads after %v", d)
	}
}

func checkMove(t *testing.T, r *nomadRegion, c *nomad.Cluster) {
	awaitShown(t, c, "eight healthy GPUs", 60*time.Second, func(c rescue.Cluster) bool {
		return c.Problem == "" && len(c.Nodes) == 1 && len(c.Nodes[0].Devices) == 8
	})
	r.run(t, "web", "team")
	shown := awaitShown(t, c, "a job that runs", 60*time.Second, func(c rescue.Cluster) bool { _, ok := workOf(c, "web", runs); return ok })
	w, _ := workOf(shown, "web", runs)
	held := string(w.Holds[0].Device)
	failGPU(t, r.machine, held)
	for range 300 { // more events than the servers keep
		if _, _, err := r.admin.Jobs().ForceEvaluate("web", &api.WriteOptions{Namespace: "team"}); err != nil {
			t.Fatal(err)
		}
	}
	shown = awaitShown(t, c, "a fault", 60*time.Second, func(c rescue.Cluster) bool { return len(c.Nodes[0].Faults) == 1 })
	if f := shown.Nodes[0].Faults[0]; string(f.At.GPU) != held || f.Repair == 0 || f.Since.IsZero() {
		t.Errorf("fault %+v", f)
	}
	c.Follow([]string{w.ID})
	awaitShown(t, c, "the places of the job", 30*time.Second, func(c rescue.Cluster) bool {
		w, _ := workOf(c, "web", runs)
		return len(c.Pools[w.Pool]) == 1 && w.Needs[0].Kind == "nvidia/gpu" && w.EndsWithin == time.Second && !w.Preempts
	})
	act := rescue.Act{Subject: rescue.Subject{Cluster: "dc1", Node: "h100", Work: w.ID}, Work: []rescue.Target{{ID: w.ID, Namespace: "team"}}}
	live, err := c.Live(t.Context(), act)
	if err != nil || len(live.Nodes) != 1 || len(live.Nodes[0].Faults) != 1 || !isHeld(live, w.ID) {
		t.Errorf("read live: %+v, %v", live, err)
	}
	if answer := c.Do(t.Context(), act); answer.Kind != rescue.Accepted {
		t.Errorf("answer %+v", answer)
	}
	if live, err := c.Live(t.Context(), act); err != nil || isHeld(live, w.ID) {
		t.Errorf("after the stop: %+v, %v", live.Work, err)
	}
	awaitShown(t, c, "the replacement", 60*time.Second, func(c rescue.Cluster) bool {
		_, ok := workOf(c, "web", func(next rescue.Work) bool {
			return runs(next) && next.Replaces == w.ID && string(next.Holds[0].Device) != held
		})
		return ok
	})
	act.Work[0].ID = "11111111-2222-4333-8444-555555555555"
	if answer := c.Do(t.Context(), act); answer.Kind != rescue.NotFound {
		t.Errorf("an allocation that is not there: %+v", answer)
	}
	checkMark(t, c)
}

// isHeld reports whether an allocation runs with a device that the servers show as unhealthy.
func isHeld(c rescue.Cluster, id string) bool {
	i := slices.IndexFunc(c.Work, func(w rescue.Work) bool { return w.ID == id })
	return i >= 0 && c.Work[i].Phase == rescue.Running && c.Work[i].Holds[0].Shown == rescue.ShownUnhealthy
}

func checkMark(t *testing.T, c *nomad.Cluster) {
	mark := rescue.Mark{Cluster: "dc1", Node: "h100", Repair: 1, Eligible: rescue.MakeIneligible}
	index, err := c.Mark(t.Context(), mark)
	if err != nil || index == 0 {
		t.Errorf("index %d, %v", index, err)
	}
	awaitShown(t, c, "the mark", 30*time.Second, func(c rescue.Cluster) bool {
		n := c.Nodes[0]
		return n.Mark == 1 && n.MarkIsOurs && !n.Schedulable && n.ChangedIndex == index
	})
	mark.Repair, mark.Eligible = 0, rescue.MakeEligible
	if _, err := c.Mark(t.Context(), mark); err != nil {
		t.Error(err)
	}
	awaitShown(t, c, "no mark", 30*time.Second, func(c rescue.Cluster) bool { return c.Nodes[0].Mark == 0 && c.Nodes[0].Schedulable })
}

// Without a right the servers leave entries out: that is a problem, and not an empty region.
func checkRights(t *testing.T, r *nomadRegion, c *nomad.Cluster) {
	readable := func(c rescue.Cluster) bool { return c.Problem == "" }
	r.run(t, "unseen", "hidden")
	awaitShown(t, c, "a job that runs", 60*time.Second, func(c rescue.Cluster) bool { _, ok := workOf(c, "unseen", runs); return ok })
	for _, rule := range []string{`capabilities = ["list-jobs"]`, `policy = "deny"`} {
		r.permit(t, "other", fleetRules+"namespace \"hidden\" { "+rule+" }\n")
		awaitShown(t, c, "a namespace that can't be read", 30*time.Second, func(c rescue.Cluster) bool { return strings.Contains(c.Problem, "can't read namespace hidden") })
		r.permit(t, "other", fleetRules)
		awaitShown(t, c, "all namespaces again", 30*time.Second, readable)
	}
	if err := os.WriteFile(tokenFile("other"), []byte("11111111-2222-4333-8444-555555555555\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	awaitShown(t, c, "a token that is not valid", 30*time.Second, func(c rescue.Cluster) bool { return c.Problem != "" })
	if len(c.Problems()) == 0 {
		t.Error("no problem is listed")
	}
}
