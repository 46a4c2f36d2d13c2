package pictures

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const (
	ruleTestsFile = "../../deploy/monitoring/tandem.rules.test.yaml"
	guideFile     = "../../docs/monitoring.md"
	guideURL      = "https://github.com/tandem-gpu/tandem/blob/main/docs/monitoring.md"
)

// TestRules runs Prometheus' own checks and tests of the rules.
func TestRules(t *testing.T) {
	for _, args := range [][]string{{"check", "rules", "--lint=all", "--lint-fatal", rulesFile}, {"test", "rules", ruleTestsFile}} {
		if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v (apt-get install prometheus, or make pictures)\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// TestScrapeConfigs runs Prometheus' check of the configurations in docs/monitoring.md, without their service discovery: Debian's
// Prometheus is built without that of Kubernetes and Consul.
func TestScrapeConfigs(t *testing.T) {
	text, err := os.ReadFile(guideFile)
	must(t, err)
	checked := 0
	for _, block := range yamlBlocks.FindAllStringSubmatch(string(text), -1) {
		if !strings.HasPrefix(block[1], "scrape_configs:") && !strings.HasPrefix(block[1], "rule_files:") {
			continue
		}
		var config map[string][]any
		must(t, yaml.Unmarshal([]byte(block[1]), &config))
		for _, scrape := range config["scrape_configs"] {
			maps.DeleteFunc(scrape.(map[string]any), func(key string, _ any) bool { return strings.HasSuffix(key, "_sd_configs") })
		}
		text, err := yaml.Marshal(config)
		file := filepath.Join(t.TempDir(), "prometheus.yml")
		must(t, err, os.WriteFile(file, text, 0o600))
		if out, err := exec.Command("promtool", "check", "config", "--syntax-only", file).CombinedOutput(); err != nil {
			t.Errorf("%v: %s\n%s", err, out, block[1])
		}
		checked++
	}
	if checked != 4 {
		t.Errorf("%d configurations", checked)
	}
}

var yamlBlocks = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// TestEachAlertIsTested checks that a test has each alert firing and, later, not firing any more.
func TestEachAlertIsTested(t *testing.T) {
	text, err := os.ReadFile(ruleTestsFile)
	must(t, err)
	var file struct {
		Tests []struct {
			Name   string
			Checks []struct {
				At      model.Duration            `yaml:"eval_time"`
				Samples []struct{ Labels string } `yaml:"exp_samples"`
			} `yaml:"promql_expr_test"`
		}
	}
	must(t, yaml.Unmarshal(text, &file))
	fires, clears := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		var last model.Duration
		firing := map[string]bool{} // alerts that fired in this test
		for _, c := range test.Checks {
			if c.At < last {
				t.Errorf("%s: the checks are not in the order of time", test.Name)
			}
			last = c.At
			for name := range firing {
				if !slices.ContainsFunc(c.Samples, func(s struct{ Labels string }) bool { return s.Labels == name }) {
					clears[name] = true
				}
			}
			for _, s := range c.Samples {
				fires[s.Labels], firing[s.Labels] = true, true
			}
		}
	}
	for _, r := range alerts(t) {
		if name := fmt.Sprintf("{alertname=%q}", r.Alert); !fires[name] || !clears[name] {
			t.Errorf("%s: fires in a test: %t, clears: %t", r.Alert, fires[name], clears[name])
		}
	}
}

// alert is an alert rule.
type alert struct {
	Alert, Expr         string
	For                 model.Duration
	Labels, Annotations map[string]string
}

func alerts(t *testing.T) (all []alert) {
	t.Helper()
	text, err := os.ReadFile(rulesFile)
	must(t, err)
	var file struct{ Groups []struct{ Rules []alert } }
	must(t, yaml.Unmarshal(text, &file))
	for _, g := range file.Groups {
		all = append(all, slices.DeleteFunc(g.Rules, func(r alert) bool { return r.Alert == "" })...)
	}
	return all
}

// TestRunbooks checks that each alert has all that the person on call needs, and that docs/monitoring.md has the same; -update writes it.
func TestRunbooks(t *testing.T) {
	var section strings.Builder
	for _, r := range alerts(t) {
		if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
			t.Errorf("%s: severity %q", r.Alert, r.Labels["severity"])
		}
		if want := guideURL + "#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook_url %s, want %s", r.Alert, r.Annotations["runbook_url"], want)
		}
		lines := strings.Split(strings.TrimSpace(r.Annotations["runbook"]), "\n")
		if len(lines) != 3 || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Fatalf("%s: %d lines of runbook, annotations %q", r.Alert, len(lines), r.Annotations)
		}
		after := ""
		if r.For > 0 {
			after = ", after " + r.For.String()
		}
		fmt.Fprintf(&section, "### %s\n\n%s%s: `%s`\n\n", r.Alert, r.Labels["severity"], after, strings.Join(strings.Fields(r.Expr), " "))
		for i, head := range []string{"Meaning: ", "Look at: ", "Do: "} {
			text, ok := strings.CutPrefix(lines[i], head)
			if !ok {
				t.Errorf("%s: line %d of the runbook does not begin with %q", r.Alert, i+1, head)
			}
			fmt.Fprintf(&section, "- **%s** %s\n", strings.TrimSpace(head), text)
		}
		section.WriteString("\n")
	}
	const begin, end = "<!-- alerts: written by go test -run TestRunbooks -update -->\n\n", "<!-- end of alerts -->\n"
	text, err := os.ReadFile(guideFile)
	must(t, err)
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s lacks the marks of the list of alerts", guideFile)
	}
	goldenfile.Compare(t, guideFile, before+begin+section.String()+end+after)
}
