package pictures

import (
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/operator/statuspage"
)

// node is a node with eight GPUs at one time: its report, and what the devices did in the last hour.
type node struct {
	name   string
	now    time.Time
	report report.Report
}

const memory = 80 << 30

// h100x8 is a node at work: seven GPUs have pods, one of them has been idle for most of the hour, one GPU has a fault.
func h100x8() node {
	n := node{name: "gpu-node-17", now: time.Now().UTC()}
	r := report.Report{
		Source: report.FromAgent, Driver: report.Driver{State: "ready", Version: "570.124.06", CUDA: "12.8"},
		Devices: []report.Device{}, Excluded: []report.Excluded{}, Conditions: []report.Condition{}, Counts: []report.Count{},
		PolicyWarnings: []string{}, Bindings: []report.Binding{}, Overlaps: []report.Overlap{},
		Injections: []report.Injection{{Pools: []string{"gpu"}, Configured: "auto", Runtime: true, CDI: true, IDs: "uuid"}},
	}
	owners := []string{"train/llm-70b-0", "train/llm-70b-0", "train/llm-70b-1", "train/llm-70b-1", "serve/chat-6f9c7", "research/notebook-ada", "", "train/llm-70b-2"}
	for i, owner := range owners {
		d := report.Device{
			ID: gpu.DeviceID("GPU-" + strconv.Itoa(i) + "f3b2c1d-a695-5024-8c66-5db903cdf8e3"), Index: i, Model: "NVIDIA H100 80GB HBM3",
			PCI: gpu.PCIAddress("0000:" + []string{"1b", "43", "52", "61", "9d", "c3", "d1", "df"}[i] + ":00.0"), NUMANode: i / 4, MemoryBytes: memory,
			Schedulable: true, Health: "healthy", State: health.Healthy, Pool: "gpu", Sharing: "exclusive", NVLinks: 18, Serial: "165282305500" + strconv.Itoa(i),
		}
		d.GPU = d.ID
		if owner != "" {
			space, pod, _ := strings.Cut(owner, "/")
			d.Owners = []report.Owner{{Orchestrator: holders.Kubernetes, Namespace: space, Name: pod, Container: "main", ID: "uid-" + strconv.Itoa(i)}}
			d.HeldSince = n.now.Add(-time.Duration(7+i) * time.Hour)
		}
		u, _ := did(i, n.now, time.Hour)
		d.Usage = described(u)
		r.Devices = append(r.Devices, d)
	}
	r.Devices[5].IdleSince = n.now.Add(-47 * time.Minute)
	fault(&r.Devices[7], n.now.Add(-12*time.Minute))
	bad := r.Devices[7]
	r.Conditions = []report.Condition{{
		Placement: string(bad.ID), GPU: bad.ID, Index: 7, Cause: bad.Cause, State: bad.State, Since: bad.Since, LastSeen: bad.Since, Count: 1,
		Action: bad.Action, Clears: bad.Clears,
	}}
	r.Counts = []report.Count{{GPU: bad.ID, Index: 7, Cause: bad.Cause, Count: 1, LastSeen: bad.Since}}
	n.report = r
	return n
}

func fault(d *report.Device, since time.Time) {
	d.State, d.Cause, d.Since, d.Schedulable = health.Unhealthy, "XID_95", since, false
	d.RecoveryAction, d.Action = "GPU reset", "drain and reset the GPU"
	d.Clears = "recovery action None, a reset or a reboot, and complete checks for 1m0s"
	d.Health = "unhealthy: XID 95 uncontained memory error since " + since.Format("2006-01-02T15:04Z07:00") +
		"; recovery action: GPU reset; action: " + d.Action + "; cleared by: " + d.Clears
}

// did is what GPU i did at a time of the hour; false if it did not answer.
func did(i int, at time.Time, since time.Duration) (gpu.Usage, bool) {
	x := since.Seconds()
	wave := func(period, phase float64) float64 { return (1 + math.Sin(2*math.Pi*(x/period+phase))) / 2 }
	busy := 0.0
	switch i {
	case 0, 1, 2, 3, 7:
		busy = 0.93 + 0.05*wave(97, float64(i)/9)
		if math.Mod(x+300, 900) > 840 { // writes a checkpoint
			busy = 0.08
		}
	case 4:
		busy = 0.15 + 0.6*wave(1700, 0.3)*wave(140, 0.1)
	case 5:
		if x < 780 {
			busy = 0.4 + 0.4*wave(200, 0)
		}
	}
	used := []float64{.91, .91, .88, .88, .62, .34, .01, .87}[i]
	if i == 7 && x > 2880 { // after its fault
		busy, used = 0, .01
	}
	return gpu.Usage{
		At: at, GPU: gpu.OptionalUint64Of(uint64(busy * 100)), MemoryUsed: gpu.OptionalUint64Of(uint64(used * memory)), MemoryTotal: gpu.OptionalUint64Of(memory),
		Power: gpu.OptionalUint64Of(uint64(75000 + busy*590000 + 9000*wave(61, 0))), PowerLimit: gpu.OptionalUint64Of(700000),
		Temperature: gpu.OptionalUint64Of(uint64(31 + busy*36 + 3*wave(1900, float64(i)/8))),
	}, i != 4 || x < 1500 || x > 1700
}

func described(u gpu.Usage) *report.Usage {
	return &report.Usage{
		At: u.At, GPUPercent: &u.GPU.Value, MemoryUsedBytes: &u.MemoryUsed.Value, MemoryTotalBytes: &u.MemoryTotal.Value,
		PowerMilliwatts: &u.Power.Value, PowerLimitMilliwatts: &u.PowerLimit.Value, TemperatureCelsius: &u.Temperature.Value,
	}
}

// serve serves the status page of the node and returns its URL.
func (n node) serve(t *testing.T) string {
	t.Helper()
	return n.server(t).URL
}

// server serves the status page of the node with an hour of history, as an agent does.
func (n node) server(t *testing.T) *httptest.Server {
	t.Helper()
	start := n.now.Add(-time.Hour)
	at := start
	page := statuspage.New(statuspage.Options{
		Agent: "k8s-gpu", Version: "2.0.0", Node: n.name, Report: func() report.Report { return n.report }, Now: func() time.Time {
			if at.IsZero() { // the hour is over
				return time.Now()
			}
			return at
		},
	})
	page.Run(func(yield func(use.Table) bool) {
		for ; at.Before(n.now); at = at.Add(3 * time.Second) {
			table := use.Table{At: at, HoldersKnown: true}
			for i, d := range n.report.Devices {
				one := use.Device{ID: d.ID}
				if u, ok := did(i%8, at, at.Sub(start)); ok {
					one.Usage = u
				}
				table.Devices = append(table.Devices, one)
			}
			if !yield(table) {
				return
			}
		}
	})
	at = time.Time{}
	mux := http.NewServeMux()
	for pattern, handler := range page.Handlers() {
		mux.Handle(pattern, handler)
	}
	mux.HandleFunc("GET /inventory", func(w http.ResponseWriter, _ *http.Request) { _ = report.WriteJSON(w, n.report) })
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server
}
