// Package viewtest has views of fleets for tests of what is shown.
package viewtest

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// At is the time of Small.
var At = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

// Small is SmallAt that time.
func Small() fleet.View { return SmallAt(At) }

// SmallAt is a fleet with one of each thing that a view can have, and decided by the real decision: work that is moved, that waits, that is refused, that
// does not end; a GPU that is free; instances; a mark; a cluster that can't be read; a history.
func SmallAt(at time.Time) fleet.View {
	east, dc1 := Cluster("east", fleet.Kubernetes, rescue.ModeAct, 4, 4, at), Cluster("dc1", fleet.Nomad, rescue.ModeReport, 3, 2, at)
	west := fleet.ClusterView{Cluster: rescue.Cluster{
		Name: "west", Mode: rescue.ModeAct, ReadAt: at.Add(-7 * time.Minute), Problem: `Get "https://west.example:6443/api/v1/nodes": dial tcp 192.0.2.7:6443: connect: connection refused`,
	}, Kind: fleet.Kubernetes}

	Run(&east, 0, "train", "llm-0", rescue.Service, 1)
	Fault(&east, 0, 1, "XID_95", health.Unhealthy, health.Reset, at.Add(-10*time.Minute))
	Run(&east, 1, "kube-system", "exporter-x", rescue.System, 0)
	Fault(&east, 1, 0, "XID_79", health.GPULost, health.Reboot, at.Add(-2*time.Hour))
	Run(&east, 1, "serve", "chat-1", rescue.Service, 3)
	Fault(&east, 1, 3, "LINK", health.Degraded, health.Reset, at.Add(-26*time.Hour))
	east.Nodes[2].Schedulable = false
	instances(&east, 3, at)
	Fault(&east, 2, 0, "XID_94", health.Unhealthy, health.Reset, at.Add(-time.Hour))
	east.Nodes[2].Faults[0].Simulated = true

	Run(&dc1, 0, "default", "render[3]", rescue.Batch, 0)
	Fault(&dc1, 0, 0, "XID_48", health.Unhealthy, health.Reset, at.Add(-20*time.Second))
	Fault(&dc1, 1, 1, "XID_74", health.Unhealthy, health.Replace, at.Add(-3*time.Hour))
	dc1.Nodes[1].Mark, dc1.Nodes[1].MarkIsOurs = health.Reset, true
	Run(&dc1, 2, "default", "web[0]", rescue.Service, 1)
	Fault(&dc1, 2, 1, "XID_119", health.Unhealthy, health.Reset, at.Add(-time.Hour))

	stuck := Run(&east, 1, "train", "llm-7", rescue.Service, 2)
	stuck.Phase = rescue.Ending
	Fault(&east, 1, 2, "XID_95", health.Unhealthy, health.Reset, at.Add(-30*time.Minute))
	ledger := rescue.NewLedger()
	ledger.Rescues = []rescue.Rescue{
		moved("east", 3, "XID_48", at.Add(-5*time.Hour), rescue.Moved),
		{
			Cluster: "east", Node: "east-1", Hardware: "east-1", GPU: GPU("east", 1, 2), Cause: "XID_95", Began: at.Add(-30 * time.Minute), Reserved: at.Add(-29 * time.Minute),
			Moves: []rescue.Move{{Work: []rescue.Target{{ID: stuck.ID, Namespace: "train", Name: "llm-7"}}, Tries: 1, Accepted: at.Add(-29 * time.Minute), Answer: "created"}},
		},
		moved("dc1", 1, "XID_74", at.Add(-2*time.Hour), rescue.NotReplaced),
	}
	policy := rescue.Default()
	policy.MaxNodes = 3
	v := view(policy, at, ledger, east, dc1, west)
	v.Problems = []problem.Problem{{Code: "CLUSTER_RIGHTS", Object: "dc1", Text: "the token for cluster dc1 has no right operator:read", Remedy: "add it to the policy of the token"}}
	v.Counts = fleet.Counts{
		Acts:     map[fleet.ActKey]uint64{{Cluster: "east", Answer: "accepted"}: 3, {Cluster: "east", Answer: "blocked"}: 7, {Cluster: "dc1", Answer: "listed"}: 1},
		Outcomes: map[fleet.OutcomeKey]uint64{{Cluster: "east", Outcome: rescue.Moved}: 2, {Cluster: "dc1", Outcome: rescue.Listed}: 1},
		Replaced: []fleet.Replaced{
			{Cluster: "east", At: at.Add(-5 * time.Hour), Fault: 75 * time.Second, Call: 2 * time.Second},
			{Cluster: "east", At: at.Add(-4 * time.Hour), Fault: 400 * time.Second, Call: 130 * time.Second},
		},
		Conflicts: 1,
	}
	return v
}

func moved(cluster string, index int, cause string, at time.Time, o rescue.Outcome) rescue.Rescue {
	node := fmt.Sprintf("%s-%d", cluster, index)
	return rescue.Rescue{
		Cluster: cluster, Node: node, Hardware: node, GPU: GPU(cluster, index, 1), Cause: cause, Began: at.Add(-time.Minute), Reserved: at, Over: at.Add(20 * time.Minute),
		Moves: []rescue.Move{{
			Work: []rescue.Target{{ID: "old-" + node, Namespace: "train", Name: "llm-old"}}, Tries: 1, Accepted: at.Add(time.Second), Ended: at.Add(12 * time.Second), Outcome: o,
		}},
	}
}

// instances divides the first GPU of a node; the first instance has work and a fault that only its agent reports.
func instances(c *fleet.ClusterView, node int, at time.Time) {
	n, id := &c.Nodes[node], GPU(c.Name, node, 0)
	var all []rescue.Device
	for gi := range uint32(2) {
		all = append(all, rescue.Device{
			ID: gpu.DeviceID(fmt.Sprintf("MIG-%s-%d", n.Name, gi)), At: gpu.Placement{GPU: id, GI: gi + 1, CI: 0}, Kind: "nvidia.com/mig-3g.40gb", Healthy: gi == 1,
		})
	}
	n.Devices = append(all, n.Devices[1:]...)
	n.Faults = append(n.Faults, rescue.Fault{
		At: all[0].At, State: health.Unhealthy, Repair: health.Reset, Cause: "XID_63", Since: at.Add(-15 * time.Minute), Holders: []string{"mig-0"},
	})
	c.Work = append(c.Work, rescue.Work{
		ID: "mig-0", Namespace: "research", Name: "notebook", Node: n.Name, Controller: rescue.Service, Phase: rescue.Running, Pool: "all",
		Holds: []rescue.Hold{{Device: all[0].ID, Shown: rescue.ShownUnhealthy}}, Needs: []rescue.Need{{Kind: all[0].Kind, Units: 1}},
	})
}

// View decides on clusters at a time, as the leader with the default policy.
func View(at time.Time, ledger rescue.Ledger, clusters ...fleet.ClusterView) fleet.View {
	return view(rescue.Default(), at, ledger, clusters...)
}

func view(policy rescue.Policy, at time.Time, ledger rescue.Ledger, clusters ...fleet.ClusterView) fleet.View {
	v := fleet.View{
		At: at, Identity: "gpu-fleet-0", Leads: true, Leader: "gpu-fleet-0", Policy: policy, Clusters: clusters, Decided: 3 * time.Millisecond,
		Store: "ConfigMap gpu-fleet/gpu-fleet in cluster east",
	}
	var all []rescue.Cluster
	for _, c := range clusters {
		all = append(all, c.Cluster)
	}
	v.Result = v.Policy.Next(rescue.State{Ledger: ledger}.Lead(), rescue.NewFleet(all...), at)
	return v
}

// Cluster returns a cluster of nodes with GPUs that no work holds, of which all was read and reported just now.
func Cluster(name string, kind fleet.Kind, mode rescue.Mode, nodes, gpus int, at time.Time) fleet.ClusterView {
	kinds := map[fleet.Kind]string{fleet.Kubernetes: "nvidia.com/gpu", fleet.Nomad: "nvidia/gpu/NVIDIA H100 80GB HBM3"}
	c := rescue.Cluster{
		Name: name, Mode: mode, ReadAt: at.Add(-2 * time.Second), AgentReports: kind == fleet.Kubernetes, Replacements: kind == fleet.Nomad, Marks: kind == fleet.Nomad,
		Pools: map[string][]string{},
	}
	for n := range nodes {
		node := rescue.Node{Name: fmt.Sprintf("%s-%d", name, n), Ready: true, Schedulable: true, ReportedAt: at.Add(-5 * time.Second)}
		node.Hardware = node.Name
		for g := range gpus {
			id := GPU(name, n, g)
			node.Devices = append(node.Devices, rescue.Device{ID: id, At: gpu.WholeGPU(id), Kind: kinds[kind], Healthy: true})
		}
		c.Nodes = append(c.Nodes, node)
		c.Pools["all"] = append(c.Pools["all"], node.Name)
	}
	return fleet.ClusterView{Cluster: c, Kind: kind}
}

// GPU is the UUID of a GPU of a cluster.
func GPU(cluster string, node, index int) gpu.DeviceID {
	sum := uint32(2166136261)
	for _, b := range []byte(cluster) {
		sum = (sum ^ uint32(b)) * 16777619
	}
	return gpu.DeviceID(fmt.Sprintf("GPU-%08x-%04x-4%03x-8000-00005db903cd", sum, node, index))
}

// Run adds work that has GPUs of a node. The pointer is good until work is added.
func Run(c *fleet.ClusterView, node int, namespace, name string, controller rescue.Controller, gpus ...int) *rescue.Work {
	n := &c.Nodes[node]
	w := rescue.Work{
		ID: fmt.Sprintf("%s-%s-%d", namespace, name, len(c.Work)), Namespace: namespace, Name: name, Node: n.Name, Controller: controller, Phase: rescue.Running, Pool: "all",
		Needs: []rescue.Need{{Kind: n.Devices[0].Kind, Units: len(gpus)}}, EndsWithin: 30 * time.Second,
	}
	for _, g := range gpus {
		w.Holds = append(w.Holds, rescue.Hold{Device: n.Devices[g].ID, Shown: rescue.ShownHealthy})
	}
	c.Work = append(c.Work, w)
	return &c.Work[len(c.Work)-1]
}

// Fault strikes a GPU. Servers and agent show it.
func Fault(c *fleet.ClusterView, node, index int, cause string, state health.State, repair health.Repair, since time.Time) {
	n := &c.Nodes[node]
	dev := &n.Devices[index]
	f := rescue.Fault{At: dev.At, State: state, Repair: repair, Cause: cause, Since: since, HoldersKnown: true}
	dev.Healthy = state < health.Unhealthy
	for i := range c.Work {
		w := &c.Work[i]
		for j := range w.Holds {
			if w.Node == n.Name && w.Holds[j].Device == dev.ID && !dev.Healthy {
				w.Holds[j].Shown = rescue.ShownUnhealthy
				f.Holders = append(f.Holders, w.ID)
			}
		}
	}
	n.Faults = append(n.Faults, f)
}

// Large is a fleet of nodes with eight GPUs, half of them of Kubernetes and half of Nomad, all at work, of which one node in fifty has a fault.
func Large(nodes int, at time.Time) fleet.View {
	clusters := []fleet.ClusterView{
		Cluster("east", fleet.Kubernetes, rescue.ModeAct, nodes/2, 8, at), Cluster("dc1", fleet.Nomad, rescue.ModeReport, nodes-nodes/2, 8, at),
	}
	for i := range clusters {
		c := &clusters[i]
		for n := range c.Nodes {
			for g := range 8 {
				if (n+g)%11 > 0 { // some are free
					Run(c, n, []string{"train", "serve", "research"}[g%3], fmt.Sprintf("job-%d-%d", n, g), rescue.Service, g)
				}
			}
			if n%50 == 7 {
				Fault(c, n, n/50%8, fmt.Sprintf("XID_%d", []int{95, 79, 48, 64, 94}[n/50%5]), health.Unhealthy, health.Reset, at.Add(-time.Duration(n)*time.Minute/3))
			}
		}
	}
	return View(at, rescue.NewLedger(), clusters...)
}
