// Package metrics writes docs/metrics.md, the reference of all metrics, from their descriptions. `go test ./test/metrics -update`
// writes it.
package metrics

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/agent/nomad"
	fleet "github.com/tandem-gpu/tandem/internal/fleet/metrics"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/util/metric"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// sections are the headings of the reference, with what begins the names of the metrics in each. The first that fits counts.
var sections = []struct {
	title    string
	prefixes []string
}{
	{"Kubernetes", nil},
	{"Kubernetes: the API dra", []string{"dra_"}},
	{"Nomad", nil},
	{"Both: duration of requests", []string{"request_"}},
	{"Health and faults", []string{"device_health", "device_condition", "xid_", "events_", "health_", "gpu_", "last_health", "driver_calls_stuck"}},
	{"Owners", []string{"device_owner", "device_held", "device_idle", "device_processes", "device_unreserved", "holders_", "use_"}},
	{"Limits of device memory", []string{"memory_limit"}},
	{"Driver calls", []string{"driver_call"}},
	{"Inventory", []string{"devices", "device_units", "device_info", "device_overlaps", "device_nodes", "cdi_", "policy_", "driver_info"}},
	{"Use", []string{"device_"}},
	{"gpu-fleet", []string{"fleet_"}},
	{"Agent and configuration", []string{""}},
}

// entry is a metric in the reference.
type entry struct {
	*metric.Metric
	section string
	agents  string
	help    string
}

func entries(t *testing.T) (all []entry) {
	byName := map[string]*entry{}
	for _, set := range []struct {
		agents, section string
		metrics         []*metric.Metric
	}{
		{"both", "", metrics.Shared()}, {"k8s-gpu", "Kubernetes", kubestatus.Metrics()}, {"nomad-gpu", "Nomad", nomad.Metrics()},
		{"gpu-fleet", "gpu-fleet", fleet.Metrics()},
	} {
		for _, m := range set.metrics {
			if e := byName[m.Name]; e != nil { // of both adapters, each with its methods
				if e.agents == "both" || e.Type != m.Type || !slices.Equal(e.Labels, m.Labels) {
					t.Errorf("%s is described twice", m.Name)
				}
				e.agents, e.section, e.help = "both", "Both: duration of requests", e.agents+": "+e.Help+" "+set.agents+": "+m.Help
				continue
			}
			section := set.section
			if section == "" || strings.HasPrefix(m.Name, "tandem_dra_") {
				section = sectionOf(m.Name)
			}
			byName[m.Name] = &entry{m, section, set.agents, m.Help}
		}
	}
	for _, e := range byName {
		all = append(all, *e)
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func sectionOf(name string) string {
	name = strings.TrimPrefix(name, "tandem_")
	for _, s := range sections {
		if slices.ContainsFunc(s.prefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			return s.title
		}
	}
	return ""
}

func TestReference(t *testing.T) {
	preface, err := os.ReadFile("testdata/preface.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := strings.Builder{}
	doc.WriteString("<!-- Written by `go test ./test/metrics -update` from test/metrics/testdata/preface.md and the descriptions in the code; do not edit. -->\n")
	doc.Write(preface)
	all := entries(t)
	for _, s := range sections {
		fmt.Fprintf(&doc, "\n## %s\n\n| metric | type | labels | agent | meaning |\n|---|---|---|---|---|\n", s.title)
		for _, e := range all {
			if e.section == s.title {
				labels := strings.Join(e.Labels, "`, `")
				if labels != "" {
					labels = "`" + labels + "`"
				}
				fmt.Fprintf(&doc, "| `%s` | %s | %s | %s | %s |\n", e.Name, e.Type, labels, e.agents, strings.ReplaceAll(e.help, "|", `\|`))
			}
		}
	}
	goldenfile.Compare(t, "../../docs/metrics.md", doc.String())
}

// Names follow Prometheus' rules: base units, _total for counters and for nothing else, one sentence of help at least.
func TestNames(t *testing.T) {
	for _, e := range entries(t) {
		if total := strings.HasSuffix(e.Name, "_total"); total != (e.Type == metric.Counter) {
			t.Errorf("%s is a %s", e.Name, e.Type)
		}
		for _, unit := range []string{"_ms", "_milliseconds", "_percent", "_mhz", "_megabytes", "_kib", "_milliwatts"} {
			if strings.Contains(e.Name, unit) {
				t.Errorf("%s is not in a base unit", e.Name)
			}
		}
		if !strings.HasSuffix(e.Help, ".") || strings.Contains(e.Help, "\n") {
			t.Errorf("%s: %q", e.Name, e.Help)
		}
	}
}
