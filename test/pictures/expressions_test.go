package pictures

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

const (
	dashboardFile = "../../deploy/monitoring/dashboard.json"
	rulesFile     = "../../deploy/monitoring/tandem.rules.yaml"
)

// scraped are the labels that Prometheus adds to every series of a target, and those of what it records itself.
var (
	scraped = []string{"job", "instance"}
	own     = map[string][]string{"up": {}, "ALERTS": {"alertname", "alertstate", "severity"}}
)

// group is a rule group.
type group struct {
	Name  string
	Rules []rulefmt.Rule
}

func readRules(t *testing.T) []group {
	t.Helper()
	text, err := os.ReadFile(rulesFile)
	must(t, err)
	var file struct{ Groups []group }
	must(t, yaml.Unmarshal(text, &file))
	return file.Groups
}

// expressions checks what PromQL names.
type expressions struct {
	*testing.T
	metrics map[string][]string // labels, by metric
	seen    map[string]bool     // metrics
}

// check checks an expression: every metric exists and has the labels by which it is selected; a label by which is grouped or matched
// is one of the metrics below.
func (e *expressions) check(at, text string) parser.Expr {
	e.Helper()
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(variables.ReplaceAllString(text, "5m"))
	if err != nil {
		e.Errorf("%s: %v in %s", at, err, text)
		return nil
	}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			e.selector(at, n)
		case *parser.AggregateExpr:
			e.grouping(at, n, n.Grouping)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				e.grouping(at, n, slices.Concat(n.VectorMatching.MatchingLabels, n.VectorMatching.Include))
			}
		}
		return nil
	})
	return expr
}

// variables are those of Grafana that are durations.
var variables = regexp.MustCompile(`\$__(rate_)?interval`)

func (e *expressions) selector(at string, s *parser.VectorSelector) {
	e.Helper()
	known, ok := e.metrics[s.Name]
	if !ok {
		e.Errorf("%s: there is no metric %q", at, s.Name)
		return
	}
	e.seen[s.Name] = true
	for _, m := range s.LabelMatchers {
		if m.Name == labels.MetricName {
			continue
		}
		if !slices.Contains(known, m.Name) && !slices.Contains(scraped, m.Name) && own[s.Name] == nil {
			e.Errorf("%s: %s has no label %q: %q", at, s.Name, m.Name, known)
		}
		for value := range strings.SplitSeq(m.Value, "|") {
			if all, ok := e.values(s.Name)[m.Name]; ok && !strings.HasPrefix(value, "$") && !slices.Contains(all, value) {
				e.Errorf("%s: the label %s of %s is never %q: %q", at, m.Name, s.Name, value, all)
			}
		}
	}
}

func (e *expressions) grouping(at string, node parser.Node, names []string) {
	e.Helper()
	below := slices.Clone(scraped)
	parser.Inspect(node, func(n parser.Node, _ []parser.Node) error {
		if s, ok := n.(*parser.VectorSelector); ok {
			below = slices.Concat(below, e.metrics[s.Name])
		}
		return nil
	})
	for _, name := range names {
		if !slices.Contains(below, name) {
			e.Errorf("%s: no metric in %s has the label %q", at, node, name)
		}
	}
}

// TestExpressions checks every query of the dashboard and every rule: what they name is what agents export.
func TestExpressions(t *testing.T) {
	e := &expressions{T: t, metrics: exported(t), seen: map[string]bool{}}
	maps.Copy(e.metrics, own)
	for _, g := range readRules(t) {
		for _, r := range g.Rules {
			at := r.Record + r.Alert
			expr := e.check(at, r.Expr)
			if r.Record != "" && expr != nil {
				e.metrics[r.Record] = outputLabels(expr)
			}
			for _, name := range templateLabels.FindAllStringSubmatch(fmt.Sprint(r.Annotations), -1) {
				if !slices.Contains(e.labelsBelow(expr), name[1]) {
					t.Errorf("%s: an annotation names the label %s, which no metric in %s has", at, name[1], r.Expr)
				}
			}
		}
	}
	for at, query := range dashboardQueries(t) {
		e.check(at, query)
	}
	for name := range e.metrics {
		if strings.HasPrefix(name, "tandem_") && !e.seen[name] {
			t.Logf("neither the dashboard nor a rule uses %s", name)
		}
	}
	if len(e.seen) < 40 {
		t.Errorf("only %d metrics were seen", len(e.seen))
	}
}

var templateLabels = regexp.MustCompile(`\$labels\.(\w+)`)

// outputLabels are the labels of the result of a recording rule, which is an aggregation.
func outputLabels(expr parser.Expr) []string {
	if a, ok := expr.(*parser.AggregateExpr); ok {
		return a.Grouping
	}
	return nil
}

func (e *expressions) labelsBelow(expr parser.Expr) []string {
	below := slices.Clone(scraped)
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		if s, ok := n.(*parser.VectorSelector); ok {
			below = slices.Concat(below, e.metrics[s.Name])
		}
		return nil
	})
	return below
}

// dashboardQueries reads the dashboard with Grafana's own types, which refuse an unknown field, and returns its queries by place.
func dashboardQueries(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	must(t, err)
	plugins.RegisterDefaultPlugins() // the options of each type of panel and query
	var d dashboard.Dashboard
	must(t, d.UnmarshalJSONStrict(text), d.Validate())
	queries := map[string]string{}
	var raw struct {
		Panels []struct {
			Title   string
			Type    string
			Targets []struct{ RefID, Expr string }
		}
		Templating struct {
			List []struct {
				Name, Type string
				Query      any
			}
		}
		Annotations struct{ List []struct{ Name, Expr string } }
	}
	must(t, json.Unmarshal(text, &raw))
	for _, p := range raw.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q has no query", p.Title)
		}
		for _, target := range p.Targets {
			queries["panel "+p.Title+" "+target.RefID] = target.Expr
		}
	}
	for _, v := range raw.Templating.List {
		if v.Type == "query" {
			query := strings.TrimSuffix(strings.TrimPrefix(v.Query.(map[string]any)["query"].(string), "label_values("), ")") // of Grafana's data source
			comma := strings.LastIndex(query, ", ")
			inner, label := query[:comma], query[comma+2:]
			queries["variable "+v.Name] = "count by (" + label + ") (" + inner + ")"
		}
	}
	for _, a := range raw.Annotations.List {
		queries["annotation "+a.Name] = a.Expr
	}
	if len(queries) < 60 {
		t.Errorf("only %d queries", len(queries))
	}
	return queries
}
