// Package metrics has the metrics of gpu-fleet. All but the histograms of replacements are computed at a scrape from what was decided last, so
// that a series ends with what it is about.
package metrics

import (
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

var set metric.Set

// Metrics returns the descriptions of all metrics.
func Metrics() []*metric.Metric { return set.Metrics() }

var (
	buildInfo = set.Gauge("fleet_build_info", "The controller.", "version", "go")

	leads       = set.Gauge("fleet_leads", "1 if this process leads: it alone makes acts.")
	stopped     = set.Gauge("fleet_stopped", "1 if all acts are stopped, by a person or because too many nodes got a fault of one cause (quorum).", "by")
	decided     = set.Gauge("fleet_last_decision_timestamp_seconds", "When the latest decision was made.")
	decision    = set.Gauge("fleet_decision_seconds", "Duration of the latest decision.")
	problems    = set.Gauge("fleet_problems", "Problems of the controller itself, such as a missing right. /readyz and the page name them.")
	ledgerOK    = set.Gauge("fleet_ledger_usable", "0 if the ledger can't be read or written: no act is made.")
	ledgerBytes = set.Gauge("fleet_ledger_bytes", "Size of the ledger.")
	ledgerLimit = set.Gauge("fleet_ledger_limit_bytes", "How large the ledger may be.")
	conflicts   = set.Counter("fleet_ledger_conflicts_total", "Writes of the ledger that failed because another process had written it.")

	clusterInfo = set.Gauge("fleet_cluster_info", "A cluster: its orchestrator, and what is done in it (off, report, act).", "cluster", "kind", "mode")
	readable    = set.Gauge("fleet_cluster_readable", "0 if a cluster can't be read, or not all of it: no act is made in it.", "cluster")
	readAge     = set.Gauge("fleet_cluster_read_age_seconds", "Time since the latest answer of the servers of a cluster.", "cluster")
	nodes       = set.Gauge("fleet_nodes", "Nodes with GPUs, by whether their servers have them as ready.", "cluster", "ready")
	marked      = set.Gauge("fleet_marked_nodes", "Nodes that are marked for a repair.", "cluster", "repair")
	gpus        = set.Gauge("fleet_gpus", "Physical GPUs by health: the worst that the servers or a fault show.", "cluster", "health")
	held        = set.Gauge("fleet_gpus_held", "Physical GPUs that work has.", "cluster")
	free        = set.Gauge("fleet_gpus_faulty_free", "Faulty GPUs that no work has, by the records of all clusters that can be read.", "cluster")
	faults      = set.Gauge("fleet_faults", "Faults of GPUs by cause and by the repair that they need. Beyond 50 causes the cause is other.", "cluster", "cause", "repair")

	acts     = set.Counter("fleet_acts_total", "Calls that end work on a faulty GPU, by their answer; listed: in mode report there is no call.", "cluster", "answer")
	moves    = set.Counter("fleet_moves_total", "Moves of work that have ended, by their outcome.", "cluster", "outcome")
	due      = set.Gauge("fleet_acts_due", "Acts that were due at the latest decision.", "cluster", "listed")
	waits    = set.Gauge("fleet_waits", "What waits, by its reason. With alert true it does not end without a person.", "cluster", "reason", "alert")
	refusals = set.Gauge("fleet_refusals", "What is not moved while nothing changes, by its reason.", "cluster", "reason")

	budgetUsed = set.Gauge("fleet_budget_used", "How much of a budget is in use. Of gpus, attempts and quorum that of the node, GPU or cause with the most. "+
		"mode report: as if what was listed had been done.", "budget", "mode")
	budgetLimit = set.Gauge("fleet_budget_limit", "Limit of a budget. nodes: with acts at a time. gpus: of a node in an hour. attempts: of a GPU in a day. "+
		"quorum: nodes with a fault of one cause; one more stops all acts. rescues, moves: that the ledger keeps.", "budget")

	replacement = set.Histogram("fleet_replacement_seconds", "Time until the replacement of moved work ran: from the beginning of the fault, and from the call.", "cluster", "from")
)

// Bounds of the buckets of replacement: a call takes seconds, and a fault must last for a minute before it counts.
var bounds = []float64{1, 2, 5, 10, 20, 30, 60, 75, 90, 120, 180, 300, 600, 1800, 3600}

// maxCauses bounds the series of faults: causes are texts of the agents and of Nomad.
const maxCauses = 50

// Answers and outcomes have their series from the start, so that a rate has a beginning.
var (
	answers  = []string{"accepted", "not-found", "blocked", "denied", "failed", "listed"}
	outcomes = []rescue.Outcome{
		rescue.Moved, rescue.NotReplaced, rescue.EndedItself, rescue.Cancelled, rescue.GivenUp, rescue.Refused, rescue.Listed,
	}
)

// Collector is a prometheus.Collector. Make one with New. It is safe for concurrent use.
type Collector struct {
	document func() report.Document
	version  string
	now      func() time.Time

	mu          sync.Mutex
	counted     map[report.Replaced]int // of the latest document, which has the latest ones only
	replacement *prometheus.HistogramVec
}

// New returns a collector of what a function returns at each scrape.
func New(document func() report.Document, version string) *Collector {
	return &Collector{
		document: document, version: version, now: time.Now,
		replacement: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: replacement.Name, Help: replacement.Help, Buckets: bounds}, replacement.Labels),
	}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) { set.Describe(ch) }

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	d, p := c.document(), metric.NewSamples(ch)
	p.Add(buildInfo, 1, c.version, runtime.Version())
	collectProcess(p, d)
	for i := range d.Clusters {
		c.collectCluster(p, &d.Clusters[i])
	}
	collectNodes(p, d)
	collectFaults(p, d)
	collectCounts(p, d)
	collectDecision(p, d)
	collectBudget(p, d)
	c.countReplaced(d)
	c.replacement.Collect(ch)
}

func collectProcess(p *metric.Samples, d report.Document) {
	quorum := d.Stop != nil && d.Stop.By == rescue.ByQuorum
	p.AddBool(leads, d.Leads)
	p.AddBool(stopped, quorum, "quorum")
	p.AddBool(stopped, d.Stop != nil && !quorum, "person")
	if !d.At.IsZero() {
		p.Add(decided, float64(d.At.UnixMilli())/1000)
	}
	p.Add(decision, d.DecisionSeconds)
	p.Add(problems, float64(len(d.Problems)))
	p.AddBool(ledgerOK, d.Ledger.Error == "")
	p.Add(ledgerBytes, float64(d.Ledger.Bytes))
	p.Add(ledgerLimit, float64(d.Ledger.Limit))
	p.Add(conflicts, float64(d.Counts.Conflicts))
}

func (c *Collector) collectCluster(p *metric.Samples, one *report.Cluster) {
	p.Add(clusterInfo, 1, one.Name, string(one.Kind), one.Mode.String())
	if one.Mode == rescue.ModeOff {
		return // nothing is read of it
	}
	p.AddBool(readable, one.Problem == "", one.Name)
	if !one.ReadAt.IsZero() {
		p.Add(readAge, max(0, c.now().Sub(one.ReadAt)).Seconds(), one.Name)
	}
	p.Add(held, float64(one.HeldGPUs), one.Name)
}

// tally is how often each combination of labels is there.
type tally map[[3]string]int

func (t tally) send(p *metric.Samples, m *metric.Metric) {
	for labels, n := range t {
		p.Add(m, float64(n), labels[:len(m.Labels)]...)
	}
}

func collectNodes(p *metric.Samples, d report.Document) {
	ready, marks, states := tally{}, tally{}, tally{}
	for _, c := range d.Clusters {
		if c.Mode == rescue.ModeOff {
			continue
		}
		ready[[3]string{c.Name, "true"}], ready[[3]string{c.Name, "false"}] = 0, 0
		for state := health.Healthy; state <= health.GPULost; state++ {
			states[[3]string{c.Name, state.String()}] = 0
		}
	}
	for i := range d.Nodes {
		n := &d.Nodes[i]
		ready[[3]string{n.Cluster, strconv.FormatBool(n.Ready)}]++
		if n.Mark != health.NoRepair {
			marks[[3]string{n.Cluster, n.Mark.String()}]++
		}
		for state, count := range n.ByHealth() {
			states[[3]string{n.Cluster, state.String()}] += count
		}
	}
	ready.send(p, nodes)
	marks.send(p, marked)
	states.send(p, gpus)
}

func collectFaults(p *metric.Samples, d report.Document) {
	all, known := tally{}, map[string]bool{}
	for i := range d.Nodes {
		n := &d.Nodes[i]
		for _, g := range n.GPUs {
			for _, f := range g.Faults {
				cause := f.Cause
				if !known[cause] && len(known) >= maxCauses {
					cause = "other"
				}
				known[cause] = true
				all[[3]string{n.Cluster, cause, f.Repair.String()}]++
			}
		}
	}
	all.send(p, faults)
	unheld := tally{}
	for _, s := range d.Free {
		unheld[[3]string{s.Cluster}]++
	}
	unheld.send(p, free)
}

func collectCounts(p *metric.Samples, d report.Document) {
	calls, ended := tally{}, tally{}
	for _, c := range d.Clusters {
		for _, a := range answers {
			calls[[3]string{c.Name, a}] = 0
		}
		for _, o := range outcomes {
			ended[[3]string{c.Name, o.String()}] = 0
		}
	}
	for _, a := range d.Counts.Acts {
		calls[[3]string{a.Cluster, a.Answer}] += int(a.Count) //nolint:gosec // no process makes so many
	}
	for _, o := range d.Counts.Outcomes {
		ended[[3]string{o.Cluster, o.Outcome.String()}] += int(o.Count) //nolint:gosec // as above
	}
	calls.send(p, acts)
	ended.send(p, moves)
}

func collectDecision(p *metric.Samples, d report.Document) {
	acts, waiting, refused := tally{}, tally{}, tally{}
	for _, a := range d.Acts {
		acts[[3]string{a.Cluster, strconv.FormatBool(a.Listed)}]++
	}
	for _, w := range d.Waits {
		waiting[[3]string{w.Cluster, string(w.Reason), strconv.FormatBool(w.Alert)}]++
	}
	for _, r := range d.Refusals {
		refused[[3]string{r.Cluster, string(r.Reason)}]++
	}
	acts.send(p, due)
	waiting.send(p, waits)
	refused.send(p, refusals)
}

func collectBudget(p *metric.Samples, d report.Document) {
	b := d.Budget
	for _, one := range []struct {
		name string
		all  []report.Used
	}{
		{"nodes", []report.Used{b.Nodes}}, {"gpus", b.GPUs}, {"attempts", b.Attempts}, {"quorum", b.Quorum},
		{"rescues", []report.Used{b.Rescues}}, {"moves", []report.Used{b.Moves}},
	} {
		used, listed := 0, 0
		for _, u := range one.all {
			used, listed = max(used, u.Used), max(listed, u.Used+u.Listed)
		}
		p.Add(budgetUsed, float64(used), one.name, rescue.ModeAct.String())
		p.Add(budgetUsed, float64(listed), one.name, rescue.ModeReport.String())
	}
	for name, limit := range map[string]int{
		"nodes": b.Nodes.Limit, "gpus": b.LimitGPUs, "attempts": b.LimitAttempts, "quorum": b.LimitQuorum, "rescues": b.Rescues.Limit, "moves": b.Moves.Limit,
	} {
		p.Add(budgetLimit, float64(limit), name)
	}
}

// countReplaced adds the moves that the document before did not have.
func (c *Collector) countReplaced(d report.Document) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range d.Clusters {
		c.replacement.WithLabelValues(one.Name, "fault")
		c.replacement.WithLabelValues(one.Name, "call")
	}
	now := map[report.Replaced]int{}
	for _, r := range d.Counts.Replaced {
		if now[r]++; now[r] > c.counted[r] {
			c.replacement.WithLabelValues(r.Cluster, "fault").Observe(r.FaultSeconds)
			c.replacement.WithLabelValues(r.Cluster, "call").Observe(r.CallSeconds)
		}
	}
	c.counted = now
}
