package rescue

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Cluster is a Kubernetes cluster or a Nomad region, as its servers show it.
type Cluster struct {
	Name    string
	Mode    Mode
	Problem string    // why it can't be read, or not all of it; "" = all of it was read
	ReadAt  time.Time // when the latest answer of its servers came

	// AgentReports means that faults and holders come from the agents of the nodes, by way of the servers. Without it both are the servers' record.
	AgentReports bool

	// Replacements means that new work names the work that it replaces (Work.Replaces), and that its start is the end of a move. Without it a
	// move ends with the old work.
	Replacements bool

	Marks bool // a node can be marked for repair (Node.Mark)

	Nodes []Node
	Work  []Work

	// Pools are the nodes on which work with the same requirements may run, by all that it asks for but devices.
	Pools map[string][]string
}

// Node is a node with GPUs.
type Node struct {
	Name        string
	Hardware    string    // the same in all clusters that have the node, such as its hostname; "" = no other cluster has it. One that several nodes of an orchestrator have is none
	Ready       bool      // by the servers, and not about to be lost
	Draining    bool      // its work is leaving it
	Schedulable bool      // it takes new work: eligible, not cordoned
	ReportedAt  time.Time // when the latest report of its agent came, by the clock of the caller; of a cluster with AgentReports

	Devices []Device
	Faults  []Fault

	Mark         health.Repair // the repair that it is marked for
	MarkIsOurs   bool          // the mark was set by this program
	ChangedIndex uint64        // index of the latest change of its eligibility, or of the end of a drain
}

// Device is a GPU or a MIG instance, as the orchestrator offers it.
type Device struct {
	ID      gpu.DeviceID
	At      gpu.Placement
	Kind    string // what a request names: "nvidia.com/gpu", "nvidia/gpu/H100"
	Units   int    // how much work can have it at a time; 0 = 1
	Healthy bool   // as the servers have it
}

// Counted reports whether it stands for a number of devices of its kind (Units), of which the servers tell no IDs.
func (d Device) Counted() bool { return d.Kind != "" && string(d.ID) == d.Kind }

func (d Device) units() int { return max(d.Units, 1) }

// Fault is a condition of a GPU or an instance of it.
type Fault struct {
	At     gpu.Placement
	State  health.State
	Repair health.Repair
	Cause  string // "XID_95"
	Since  time.Time

	Simulated   bool // by an operator
	Advisory    bool // reported only: the device takes work
	Unconfirmed bool // only the first check after a start has shown it

	Holders      []string // Work.ID of the work that holds the hardware, by the agent
	HoldersKnown bool     // the agent has a complete record of them
}

// Work is a Nomad allocation or a pod.
type Work struct {
	ID         string // of the allocation; UID of the pod
	Namespace  string
	Name       string
	Node       string // "" = not placed
	Controller Controller
	Phase      Phase
	Holds      []Hold // by its orchestrator's own record
	Needs      []Need // devices that it asks for

	// Pool names the nodes that may take its replacement, in Cluster.Pools. The caller sets it for work on GPUs with faults.
	Pool        string
	PoolUnknown string // what it asks for that the caller can't look at, so that no node is certain; "" = all was looked at

	EndsWithin   time.Duration // from the call to its end, by its own settings
	LosesAttempt bool          // its controller counts the call as a failure of the work
	Preempts     bool          // its orchestrator may end work of lower priority for its replacement
	Victims      int           // how much work that would be, if no place is free; 0 = not known

	// ByDevice means that the orchestrator moves all work of a device by one act on the device.
	ByDevice bool

	Replaces string // Work.ID of the work that it replaces
}

func (w *Work) placed() bool  { return w.Node != "" && w.Phase != Ended }
func (w *Work) running() bool { return w.Phase == Running }

// Hold is a device that work has.
type Hold struct {
	Device gpu.DeviceID
	Units  int // of a device that is shared; 0 = 1
	Shown  Shown
}

func (h Hold) units() int { return max(h.Units, 1) }

// Need is how many devices of a kind work asks for, on one node.
type Need struct {
	Kind  string `json:"kind"`
	Units int    `json:"units"`
}

// Fleet is all clusters of the team at one time. It is immutable, and in order.
type Fleet struct{ clusters []cluster }

// cluster is a Cluster with what is looked up in it.
type cluster struct {
	Cluster
	nodeAt map[string]int
	workAt map[string]int
	onNode [][]int          // work by node
	after  map[string][]int // work by the work that it replaces

	ambiguous map[string]bool // Node.Hardware that several nodes of one orchestrator have
}

// NewFleet returns the fleet of clusters. A cluster in which two objects have one name can't be read, since one of them is not what it seems. What is
// passed is not to be changed later.
func NewFleet(clusters ...Cluster) Fleet {
	all := make([]cluster, 0, len(clusters))
	for _, c := range sorted(clusters, func(c *Cluster) string { return c.Name }) {
		if n := len(all); n > 0 && all[n-1].Name == c.Name {
			all[n-1].Problem = fmt.Sprintf("two clusters have the name %q", c.Name)
			continue
		}
		all = append(all, newCluster(c))
	}
	findAmbiguous(all)
	return Fleet{all}
}

// findAmbiguous finds hostnames that several nodes of one orchestrator have, as those that are made from one image: they do not tell that two are one node.
func findAmbiguous(all []cluster) {
	type owner struct {
		hardware     string
		agentReports bool // which orchestrator
	}
	seen, twice := map[owner]bool{}, map[string]bool{}
	for i := range all {
		for n := range all[i].Nodes {
			k := owner{all[i].Nodes[n].Hardware, all[i].AgentReports}
			if seen[k] {
				twice[k.hardware] = true
			}
			seen[k] = true
		}
	}
	for i := range all {
		all[i].ambiguous = twice
	}
}

// sorted returns all in the order of a name. What is in order is returned as it is: the caller's objects often are.
func sorted[T any](all []T, name func(*T) string) []T {
	order := make([]int, len(all)) // sorting moves numbers, and not what is large
	inOrder := true
	for i := range all {
		order[i] = i
		inOrder = inOrder && (i == 0 || name(&all[i-1]) <= name(&all[i]))
	}
	if inOrder {
		return all
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(name(&all[i]), name(&all[j])) })
	next := make([]T, len(all))
	for to, from := range order {
		next[to] = all[from]
	}
	return next
}

func newCluster(c Cluster) cluster {
	c.Nodes = sorted(c.Nodes, func(n *Node) string { return n.Name })
	c.Work = sorted(c.Work, func(w *Work) string { return w.ID })
	x := cluster{
		Cluster: c, nodeAt: make(map[string]int, len(c.Nodes)), workAt: make(map[string]int, len(c.Work)),
		onNode: make([][]int, len(c.Nodes)), after: map[string][]int{},
	}
	for i := range c.Nodes {
		x.index(x.nodeAt, "nodes", c.Nodes[i].Name, i)
	}
	for i := range c.Work {
		w := &c.Work[i]
		x.index(x.workAt, "pods or allocations", w.ID, i)
		if n, ok := x.nodeAt[w.Node]; ok && w.placed() {
			x.onNode[n] = append(x.onNode[n], i)
		}
		if w.Replaces != "" {
			x.after[w.Replaces] = append(x.after[w.Replaces], i)
		}
	}
	return x
}

func (c *cluster) index(at map[string]int, what, name string, i int) {
	if _, twice := at[name]; twice {
		c.Problem = cmp.Or(c.Problem, fmt.Sprintf("two %s have the name %q", what, name))
	}
	at[name] = i
}

// cluster returns a cluster by its name; nil = the fleet does not have it.
func (f Fleet) cluster(name string) *cluster {
	if i, ok := slices.BinarySearchFunc(f.clusters, name, func(c cluster, name string) int { return cmp.Compare(c.Name, name) }); ok {
		return &f.clusters[i]
	}
	return nil
}

// work returns work by its ID; nil = the cluster does not have it, or it has ended.
func (c *cluster) work(id string) *Work {
	if i, ok := c.workAt[id]; ok && c.Work[i].Phase != Ended {
		return &c.Work[i]
	}
	return nil
}

// node returns a node by its name; nil = the cluster does not have it.
func (c *cluster) node(name string) *Node {
	if i, ok := c.nodeAt[name]; ok {
		return &c.Nodes[i]
	}
	return nil
}

// hardware names the node in all clusters that have it: it is one for the budgets and the quorum.
func (c *cluster) hardware(n *Node) string {
	if n.Hardware == "" || c.ambiguous[n.Hardware] {
		return c.Name + "/" + n.Name
	}
	return n.Hardware
}

// at returns where a device of the node is.
func (n *Node) at(id gpu.DeviceID) (gpu.Placement, bool) {
	for i := range n.Devices {
		if n.Devices[i].ID == id {
			return n.Devices[i].At, true
		}
	}
	return gpu.Placement{}, false
}

// with returns the fleet with each cluster changed. It is for tests and for the plan of another mode.
func (f Fleet) with(change func(*Cluster)) Fleet {
	all := slices.Clone(f.clusters)
	for i := range all {
		change(&all[i].Cluster)
	}
	return Fleet{all}
}

// InMode returns the fleet as it would be with another mode of the clusters that are not off: for a plan.
func (f Fleet) InMode(m Mode) Fleet {
	return f.with(func(c *Cluster) {
		if c.Mode != ModeOff {
			c.Mode = m
		}
	})
}

// keys are those of a map, in order.
func keys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
