package report

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/viewtest"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// The JSON and the text of a fleet with one of each thing.
func TestGolden(t *testing.T) {
	v := viewtest.Small()
	var text, plan bytes.Buffer
	Of(v).text(&text, 0)
	goldenfile.Compare(t, "testdata/small.json", indented(t, Of(v)))
	goldenfile.Compare(t, "testdata/small.txt", text.String())

	in := fleet.Plan(v, rescue.ModeAct)
	PlanOf(v, rescue.ModeAct, in).text(&plan, 0)
	goldenfile.Compare(t, "testdata/plan.txt", plan.String())
	goldenfile.Compare(t, "testdata/plan.json", indented(t, PlanOf(v, rescue.ModeAct, in)))
}

// What a command reads from a running process is the same as there.
func TestRoundTrip(t *testing.T) {
	v := viewtest.Small()
	v.Result.State = v.Result.State.Stopped("ada", "driver rollout", v.At)
	var d Document
	check.NoError(t, json.Unmarshal([]byte(indented(t, Of(v))), &d))
	var here, there bytes.Buffer
	Of(v).text(&here, 0)
	d.text(&there, 0)
	if here.String() != there.String() || indented(t, d) != indented(t, Of(v)) {
		t.Errorf("%s\n%s", &here, &there)
	}
	var p Plan
	plan := PlanOf(v, rescue.ModeAct, fleet.Plan(v, rescue.ModeAct))
	check.NoError(t, json.Unmarshal([]byte(indented(t, plan)), &p))
	if indented(t, p) != indented(t, plan) {
		t.Error(indented(t, p))
	}
}

func indented(t *testing.T, v any) string {
	t.Helper()
	text, err := json.MarshalIndent(v, "", "  ")
	check.NoError(t, err)
	return string(text) + "\n"
}

// A process that has read nothing yet has no list that JSON shows as null, and has the reason for which nothing is done.
func TestNothingIsKnown(t *testing.T) {
	d := Of(fleet.View{At: viewtest.At, Identity: "a", Policy: rescue.Default(), StoreErr: fleet.ErrNoLedger.Error(), Store: "file /x",
		Problems: []problem.Problem{{Code: problem.Ledger, Text: "there is no ledger (file /x)", Remedy: "gpu-fleet init"}}})
	if text := indented(t, d); strings.Contains(text, "null") {
		t.Error(text)
	}
	var text bytes.Buffer
	d.WriteText(&text)
	for _, want := range []string{"LEDGER_UNUSABLE", "there is no ledger (file /x): gpu-fleet init", "NO_LEADER"} {
		if strings.Count(text.String(), want) != 1 {
			t.Errorf("%q is not there once in\n%s", want, &text)
		}
	}
}

// A stop is the first thing that is shown, and then a ledger that can't be used.
func TestStopIsFirst(t *testing.T) {
	v := viewtest.Small()
	v.Result.State = v.Result.State.Stopped("ada", "driver rollout", v.At)
	v.StoreErr = "timeout"
	v.Problems = append(v.Problems, problem.Problem{Code: problem.LedgerStore})
	d := Of(v)
	if len(d.Alerts) < 3 || d.Alerts[0].Code != "STOPPED" || d.Alerts[1].Code != string(problem.LedgerStore) || d.Stop == nil || d.Stop.By != "ada" {
		t.Errorf("%+v %+v", d.Alerts, d.Stop)
	}
}

// That a cluster can't be read is told once, with its remedy: by its wait, or as a problem while nothing is decided. A missing right is told beside it.
func TestUnreadOnce(t *testing.T) {
	v := viewtest.Small()
	right := problem.Problem{Code: problem.MissingRight, Object: "west", Text: "a right is missing"}
	v.Problems = []problem.Problem{{Code: problem.ClusterUnread, Object: "west", Text: "no", Remedy: "renew the token"}, {Code: problem.ClusterUnread, Object: "other", Text: "no"}, right}
	count := func(d Document) (n int, remedy string) {
		for _, a := range d.Alerts {
			if a.Code == string(problem.ClusterUnread) {
				n, remedy = n+1, remedy+a.Remedy
			}
		}
		return n, remedy
	}
	d := Of(v)
	if n, remedy := count(d); n != 2 || remedy != "renew the token" || len(d.Problems) != 2 || !slices.Contains(d.Problems, right) || len(v.Problems) != 3 {
		t.Errorf("%d times, remedy %q, problems %v", n, remedy, d.Problems)
	}
	v.Result.Waits = nil
	if n, remedy := count(Of(v)); n != 2 || remedy != "renew the token" {
		t.Errorf("nothing is decided: %d times, remedy %q", n, remedy)
	}
}

// The brief document has the nodes with a fault, a mark or another state than ready, and how many others there are.
func TestBrief(t *testing.T) {
	d := Of(viewtest.Large(100, viewtest.At))
	brief := d.Brief()
	if len(d.Nodes) != 100 || len(brief.Nodes) != 2 || brief.More != 98 || len(brief.Clusters) != 2 {
		t.Errorf("%d nodes, %d brief, %d more", len(d.Nodes), len(brief.Nodes), brief.More)
	}
	for _, change := range []func(*Node){
		func(n *Node) { n.Ready = false }, func(n *Node) { n.Schedulable = false }, func(n *Node) { n.Draining = true }, func(n *Node) { n.Mark = health.Reset },
		func(n *Node) { n.Faults = []Fault{{}} }, func(n *Node) { n.GPUs[0].Health = health.Degraded }, func(n *Node) { n.GPUs[0].Faults = []Fault{{Advisory: true}} },
	} {
		d := Of(viewtest.Large(1, viewtest.At))
		if change(&d.Nodes[0]); len(d.Brief().Nodes) != 1 {
			t.Errorf("%+v is left out", d.Nodes[0])
		}
	}
}

// A fault of the node is of no GPU; a GPU that the servers do not list any more is shown by its fault; an advisory fault leaves the GPU healthy.
func TestFaults(t *testing.T) {
	c := viewtest.Cluster("east", fleet.Kubernetes, rescue.ModeAct, 1, 1, viewtest.At)
	id := c.Nodes[0].Devices[0].ID
	gone := rescue.Fault{State: health.GPULost, Cause: "LOST"}
	gone.At.GPU = "GPU-gone"
	advisory := rescue.Fault{At: c.Nodes[0].Devices[0].At, State: health.Unhealthy, Cause: "XID_95", Advisory: true}
	c.Nodes[0].Faults = []rescue.Fault{{State: health.Unknown, Cause: "DRIVER"}, gone, advisory}
	n := Of(viewtest.View(viewtest.At, rescue.NewLedger(), c)).Nodes[0]
	if len(n.Faults) != 1 || n.Faults[0].Cause != "DRIVER" || len(n.GPUs) != 2 || n.GPUs[0].ID != id || n.GPUs[0].Health != health.Healthy || n.GPUs[0].OutOfService() ||
		n.GPUs[1].ID != "GPU-gone" || n.GPUs[1].Health != health.GPULost || !n.GPUs[1].OutOfService() {
		t.Errorf("%+v", n)
	}
}

// No line is wider than the terminal, and nothing that a cluster names moves the cursor.
func TestWidth(t *testing.T) {
	v := viewtest.Small()
	v.Clusters[2].Problem = "a\x1b[2Jb\nc\u009bd"
	var text bytes.Buffer
	Of(v).text(&text, 80)
	for line := range strings.Lines(text.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	text.Reset()
	Of(v).text(&text, 0)
	if strings.ContainsAny(text.String(), "\x1b\u009b") || !strings.Contains(text.String(), "a [2Jb c d") {
		t.Errorf("%q", text.String())
	}
}

func BenchmarkOf(b *testing.B) {
	v := viewtest.Large(1000, viewtest.At)
	for b.Loop() {
		text, err := json.Marshal(Of(v))
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(text)), "B/document")
	}
}

// Where the servers tell numbers of devices, those are the GPUs that take work; a faulty one is beside them.
func TestNumbersOfDevices(t *testing.T) {
	c := viewtest.Cluster("east", fleet.Kubernetes, rescue.ModeAct, 1, 2, viewtest.At)
	n := &c.Nodes[0]
	viewtest.Run(&c, 0, "team", "train", rescue.Service, 0)
	viewtest.Fault(&c, 0, 0, "XID_95", health.Unhealthy, health.Reset, viewtest.At)
	for i := range n.Devices {
		n.Devices[i].Kind = "" // it has an ID only because more is known of it
	}
	n.Devices = append(n.Devices, rescue.Device{ID: "nvidia.com/gpu", At: gpu.WholeGPU("nvidia.com/gpu"), Kind: "nvidia.com/gpu", Units: 7})
	c.Work[0].Holds = append(c.Work[0].Holds, rescue.Hold{Device: "nvidia.com/gpu"})
	d := Of(fleet.View{At: viewtest.At, Policy: rescue.Default(), Clusters: []fleet.ClusterView{c}})
	if got := d.Clusters[0]; got.GPUs != 8 || got.FaultyGPUs != 1 || got.HeldGPUs != 1 {
		t.Errorf("%+v", got)
	}
	if got := d.Nodes[0]; len(got.GPUs) != 2 || len(got.Resources) != 1 || got.Resources[0] != (Resource{Kind: "nvidia.com/gpu", Units: 7, Held: 1}) {
		t.Errorf("%+v", got)
	}
}
