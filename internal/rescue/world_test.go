package rescue_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// world is a fleet that tests change, and the one controller that decides for it.
type world struct {
	*testing.T
	now      time.Time
	policy   rescue.Policy
	state    rescue.State
	clusters []*rescue.Cluster
	last     rescue.Result
	after    int // number of the latest replacement
}

// newWorld returns a world with a Nomad region and a Kubernetes cluster of nodes with GPUs, without work.
func newWorld(t *testing.T, nodes, gpus int) *world {
	w := &world{T: t, now: time.Date(2026, 11, 27, 9, 0, 0, 0, time.UTC), policy: rescue.Default()}
	w.state = rescue.State{Ledger: rescue.NewLedger()}.Lead()
	w.clusters = []*rescue.Cluster{newCluster("nomad", nodes, gpus), newCluster("kube", nodes, gpus)}
	return w
}

// newCluster returns a cluster; one whose name begins with "nomad" is like a region.
func newCluster(name string, nodes, gpus int) *rescue.Cluster {
	nomad := strings.HasPrefix(name, "nomad")
	c := &rescue.Cluster{Name: name, Mode: rescue.ModeAct, AgentReports: !nomad, Replacements: nomad, Marks: nomad, Pools: map[string][]string{}}
	for n := range nodes {
		node := rescue.Node{Name: fmt.Sprintf("%s-%d", name, n), Ready: true, Schedulable: true}
		for g := range gpus {
			id := uuid(name, n, g)
			node.Devices = append(node.Devices, rescue.Device{ID: id, At: gpu.WholeGPU(id), Kind: "gpu", Healthy: true})
		}
		c.Nodes = append(c.Nodes, node)
		c.Pools["all"] = append(c.Pools["all"], node.Name)
	}
	return c
}

func uuid(cluster string, node, index int) gpu.DeviceID {
	return gpu.DeviceID(fmt.Sprintf("GPU-%s-%d-%d", cluster, node, index))
}

func (w *world) cluster(name string) *rescue.Cluster {
	i := slices.IndexFunc(w.clusters, func(c *rescue.Cluster) bool { return c.Name == name })
	return w.clusters[i]
}

func (w *world) node(cluster string, n int) *rescue.Node { return &w.cluster(cluster).Nodes[n] }

// work returns work by its ID; the pointer is good until work is added.
func (w *world) work(id string) *rescue.Work {
	for _, c := range w.clusters {
		for i := range c.Work {
			if c.Work[i].ID == id {
				return &c.Work[i]
			}
		}
	}
	w.Fatalf("no work %s", id)
	return nil
}

// run adds a service that runs on GPUs of a node, and may run on any.
func (w *world) run(id, cluster string, n int, gpus ...int) *rescue.Work {
	c := w.cluster(cluster)
	one := rescue.Work{
		ID: id, Namespace: "default", Name: id, Node: c.Nodes[n].Name, Controller: rescue.Service, Phase: rescue.Running, Pool: "all",
		Needs: []rescue.Need{{Kind: "gpu", Units: len(gpus)}}, EndsWithin: 5 * time.Second,
	}
	for _, g := range gpus {
		one.Holds = append(one.Holds, rescue.Hold{Device: c.Nodes[n].Devices[g].ID})
	}
	c.Work = append(c.Work, one)
	return &c.Work[len(c.Work)-1]
}

// xid is a fault that counts.
func xid(code int) rescue.Fault {
	return rescue.Fault{State: health.Unhealthy, Repair: health.Reset, Cause: fmt.Sprintf("XID_%d", code), HoldersKnown: true}
}

// fault strikes a GPU. Servers and agent show it at once.
func (w *world) fault(cluster string, n, g int, f rescue.Fault) {
	node := w.node(cluster, n)
	f.At = gpu.WholeGPU(node.Devices[g].ID)
	if f.Since.IsZero() {
		f.Since = w.now
	}
	node.Faults = append(node.Faults, f)
	node.Devices[g].Healthy = false
}

// repair ends all faults of a node.
func (w *world) repair(cluster string, n int) {
	node := w.node(cluster, n)
	node.Faults = nil
	for g := range node.Devices {
		node.Devices[g].Healthy = true
	}
}

// show has the orchestrators' records of holders follow the nodes, and the agents name holders.
func (w *world) show() {
	for _, c := range w.clusters {
		for n := range c.Nodes {
			node := &c.Nodes[n]
			for i := range node.Faults {
				if f := &node.Faults[i]; f.HoldersKnown {
					f.Holders = nil
					for j := range c.Work {
						if c.Work[j].Node == node.Name && c.Work[j].Phase != rescue.Ended && slices.ContainsFunc(c.Work[j].Holds, func(h rescue.Hold) bool { return f.At.Overlaps(placement(node, h.Device)) }) {
							f.Holders = append(f.Holders, c.Work[j].ID)
						}
					}
				}
			}
			for j := range c.Work {
				if c.Work[j].Node == node.Name {
					showHolds(node, &c.Work[j])
				}
			}
		}
	}
}

func showHolds(node *rescue.Node, one *rescue.Work) {
	for h := range one.Holds {
		for _, dev := range node.Devices {
			if dev.ID == one.Holds[h].Device {
				one.Holds[h].Shown = rescue.ShownHealthy
				if !dev.Healthy {
					one.Holds[h].Shown = rescue.ShownUnhealthy
				}
			}
		}
	}
}

func placement(node *rescue.Node, id gpu.DeviceID) gpu.Placement {
	for _, dev := range node.Devices {
		if dev.ID == id {
			return dev.At
		}
	}
	return gpu.Placement{}
}

// fleet is a copy of what is shown now; agents and servers that answer did so now.
func (w *world) fleet() rescue.Fleet {
	var all []rescue.Cluster
	for _, c := range w.clusters {
		one := *c
		one.Nodes, one.Work = slices.Clone(c.Nodes), slices.Clone(c.Work)
		for i := range one.Nodes {
			one.Nodes[i].Devices, one.Nodes[i].Faults = slices.Clone(one.Nodes[i].Devices), slices.Clone(one.Nodes[i].Faults)
		}
		for i := range one.Work {
			one.Work[i].Holds = slices.Clone(one.Work[i].Holds)
		}
		all = append(all, one)
	}
	return rescue.NewFleet(all...)
}

// answering has all servers and agents answer now.
func (w *world) answering() {
	for _, c := range w.clusters {
		c.ReadAt = w.now
		for n := range c.Nodes {
			if c.AgentReports && c.Nodes[n].Ready {
				c.Nodes[n].ReportedAt = w.now
			}
		}
	}
}

// next decides with what is shown as it is.
func (w *world) next() rescue.Result {
	w.Helper()
	before, f := text(w.T, w.state.Ledger), w.fleet()
	w.last = w.policy.Next(w.state, f, w.now)
	if again := w.policy.Next(w.state, f, w.now); !reflect.DeepEqual(again, w.last) {
		w.Errorf("the same values have two results:\n%+v\n%+v", w.last, again)
	}
	if after := text(w.T, w.state.Ledger); after != before {
		w.Errorf("the state was changed:\n%s\n%s", before, after)
	}
	w.state = w.last.State
	return w.last
}

// pass has time pass with all answering, and decides.
func (w *world) pass(d time.Duration) rescue.Result {
	w.Helper()
	w.now = w.now.Add(d)
	w.answering()
	w.show()
	return w.next()
}

// restart has the controller lose what is not in the ledger, which it reads from its JSON.
func (w *world) restart() {
	w.Helper()
	var l rescue.Ledger
	if err := json.Unmarshal([]byte(text(w.T, w.state.Ledger)), &l); err != nil {
		w.Fatal(err)
	}
	w.state = rescue.State{Ledger: l}.Lead()
}

// answer gives an answer to an act.
func (w *world) answer(a rescue.Act, kind rescue.AnswerKind) {
	w.state = w.state.Answered(a, rescue.Answer{Kind: kind, Text: "answer"}, w.now)
}

// move has the orchestrator stop work and start its replacement on GPUs of a node.
func (w *world) move(id, cluster string, n int, gpus ...int) {
	old := *w.work(id)
	w.work(id).Phase = rescue.Ended
	w.after++
	next := w.run(fmt.Sprintf("%s-%d", id, w.after), cluster, n, gpus...)
	next.Replaces, next.Pool, next.Controller = id, old.Pool, old.Controller
}

// acts checks which work is acted on, and returns the acts.
func (w *world) acts(when string, ids ...string) []rescue.Act {
	w.Helper()
	var got []string
	for _, a := range w.last.Acts {
		for _, t := range a.Work {
			got = append(got, t.ID)
		}
	}
	if !slices.Equal(got, ids) {
		w.Fatalf("%s: acts on %q, want %q\nwaits %+v\nrefusals %+v\nproblem %q", when, got, ids, w.last.Waits, w.last.Refusals, w.last.Problem)
	}
	return w.last.Acts
}

// waits checks that something waits for a reason, and returns it.
func (w *world) waits(when string, why rescue.Reason) rescue.Wait {
	w.Helper()
	i := slices.IndexFunc(w.last.Waits, func(x rescue.Wait) bool { return x.Reason == why })
	if i < 0 {
		w.Fatalf("%s: nothing waits for %s\nacts %+v\nwaits %+v\nrefusals %+v\nproblem %q", when, why, w.last.Acts, w.last.Waits, w.last.Refusals, w.last.Problem)
	}
	return w.last.Waits[i]
}

// refused checks that something is refused for a reason.
func (w *world) refused(when string, why rescue.Reason) {
	w.Helper()
	if !slices.ContainsFunc(w.last.Refusals, func(x rescue.Refusal) bool { return x.Reason == why }) {
		w.Fatalf("%s: nothing is refused for %s\nacts %+v\nwaits %+v\nrefusals %+v", when, why, w.last.Acts, w.last.Waits, w.last.Refusals)
	}
}

// outcomes checks the outcomes of all moves of the ledger, in order.
func (w *world) outcomes(when string, want ...rescue.Outcome) {
	w.Helper()
	var got []rescue.Outcome
	for _, r := range w.state.Ledger.Rescues {
		for _, m := range r.Moves {
			got = append(got, m.Outcome)
		}
	}
	if !slices.Equal(got, want) {
		w.Fatalf("%s: outcomes %v, want %v\nwaits %+v", when, got, want, w.last.Waits)
	}
}

func text(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
