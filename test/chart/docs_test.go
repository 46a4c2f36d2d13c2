package chart

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	chart "helm.sh/helm/v4/pkg/chart/v2"

	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// value is one of values.yaml: a leaf, or a section without names of its own.
type value struct{ path, fallback, meaning string }

// documented reads values.yaml: each value has a comment above it, which is its description.
func documented(t *testing.T, chart string) []value {
	t.Helper()
	text, err := os.ReadFile(deploy + "/" + chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	return leaves(t, root.Content[0], "")
}

func leaves(t *testing.T, m *yaml.Node, prefix string) (all []value) {
	t.Helper()
	for i := 0; i < len(m.Content); i += 2 {
		key, v := m.Content[i], m.Content[i+1]
		path := prefix + key.Value
		comment := comment(key.HeadComment)
		if v.Kind == yaml.MappingNode && len(v.Content) > 0 && comment == "" {
			all = append(all, leaves(t, v, path+".")...)
			continue
		}
		if comment == "" || !strings.HasSuffix(comment, ".") {
			t.Errorf("values.yaml:%d: %s has no comment that is a sentence: %q", key.Line, path, comment)
		}
		var fallback any
		if err := v.Decode(&fallback); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if err := e.Encode(fallback); err != nil {
			t.Fatal(err)
		}
		all = append(all, value{path, strings.Trim(strings.TrimSpace(b.String()), `"`), comment})
	}
	return all
}

// comment joins the last block of lines, without the headings before it.
func comment(text string) string {
	blocks := strings.Split(text, "\n\n")
	lines := strings.Split(blocks[len(blocks)-1], "\n")
	if strings.HasPrefix(text, "##") && len(blocks) == 1 {
		return "" // a heading alone
	}
	for i, line := range lines {
		lines[i] = strings.TrimSpace(strings.TrimPrefix(line, "#"))
	}
	return strings.Join(lines, " ")
}

// The table in the README is values.yaml. "go test -update" writes it.
func TestReadme(t *testing.T) {
	for _, chart := range charts {
		checkReadme(t, chart)
	}
}

// charts are their folders.
var charts = []string{"chart", "fleet-chart"}

func checkReadme(t *testing.T, chart string) {
	t.Helper()
	file := deploy + "/" + chart + "/README.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString("| value | default | meaning |\n|---|---|---|\n")
	for _, v := range documented(t, chart) {
		fallback := "`" + v.fallback + "`"
		if v.fallback == "" {
			fallback = ""
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.path, strings.ReplaceAll(fallback, "|", `\|`), strings.ReplaceAll(v.meaning, "|", `\|`))
	}
	goldenfile.Compare(t, file, replaceBlock(t, string(text), "values", b.String()))
}

// The examples in the README are values of one installation.
func TestExamples(t *testing.T) {
	text, err := os.ReadFile(deploy + "/chart/README.md")
	if err != nil {
		t.Fatal(err)
	}
	given := values{}
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1) {
		maps.Copy(given, parse(t, string(block[1])))
	}
	if sets := daemonSets(t, objects(t, given)); len(sets) != 4 {
		t.Errorf("%d DaemonSets of three pools and the rest", len(sets))
	}
}

// The README lists the values that a pool may have.
func TestPoolValues(t *testing.T) {
	text, err := os.ReadFile(deploy + "/chart/README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(text), "A pool may have: ")
	list, _, _ = strings.Cut(list, ".")
	var got []string
	for _, name := range regexp.MustCompile("`(.*?)`").FindAllStringSubmatch(list, -1) {
		got = append(got, name[1])
	}
	slices.Sort(got)
	pool := schemaFile(t, valuesSchema)["$defs"].(map[string]any)["pool"].(map[string]any)["properties"].(map[string]any)
	for _, name := range []string{"name", "nodeSelector", "config"} {
		delete(pool, name)
	}
	if want := slices.Sorted(maps.Keys(pool)); !slices.Equal(got, want) {
		t.Errorf("README.md lists\n%q\nthe schema has\n%q", got, want)
	}
}

func replaceBlock(t *testing.T, text, name, content string) string {
	t.Helper()
	begin, end := "<!-- "+name+" -->\n", "<!-- end -->"
	before, rest, found := strings.Cut(text, begin)
	_, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("there is no block %s", name)
	}
	return before + begin + content + end + after
}

// schemaFile is the chart's schema, with numbers as they are written.
func schemaFile(t *testing.T, path string) map[string]any {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var s map[string]any
	if err := d.Decode(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	valuesSchema  = deploy + "/chart/values.schema.json"
	productSchema = "../../docs/tandem.schema.json"
	fleetSchema   = "../../docs/gpu-fleet.schema.json"
)

// The schema has the descriptions of values.yaml and, for a configuration, the schema of the program. "go test -update" writes them.
func TestSchemaDescribesTheValues(t *testing.T) {
	s, product := schemaFile(t, valuesSchema), schemaFile(t, productSchema)
	delete(product, "$schema")
	delete(product, "title")
	s["$defs"].(map[string]any)["configuration"] = product
	describe(t, s, "chart")

	fleet, file := schemaFile(t, deploy+"/fleet-chart/values.schema.json"), schemaFile(t, fleetSchema)["properties"].(map[string]any)
	delete(file["ledger"].(map[string]any)["properties"].(map[string]any), "file") // pods have no disk for it
	config := find(fleet, "config")["properties"].(map[string]any)
	for name := range config {
		config[name] = file[name]
	}
	describe(t, fleet, "fleet-chart")
}

// describe compares a chart's schema with one that has the descriptions.
func describe(t *testing.T, s map[string]any, chart string) {
	t.Helper()
	for _, v := range documented(t, chart) {
		at := find(s, v.path)
		if at == nil {
			t.Errorf("the schema has no %s", v.path)
			continue
		}
		at["description"] = v.meaning
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(s); err != nil {
		t.Fatal(err)
	}
	goldenfile.Compare(t, deploy+"/"+chart+"/values.schema.json", b.String())
}

// find returns the part of the schema at a path of values, beyond references.
func find(s map[string]any, path string) map[string]any {
	at := s
	for _, name := range strings.Split(path, ".") {
		properties, _ := at["properties"].(map[string]any)
		next, found := properties[name].(map[string]any)
		if !found {
			return nil
		}
		if ref, is := next["$ref"].(string); is {
			next = s["$defs"].(map[string]any)[strings.TrimPrefix(ref, "#/$defs/")].(map[string]any)
		}
		at = next
	}
	return at
}

// Where a value is an option of the agent, it takes the same words.
func TestWordsAreTheAgents(t *testing.T) {
	s, product := schemaFile(t, valuesSchema), schemaFile(t, productSchema)
	for path, option := range map[string]string{
		"migStrategy":             "flags.migStrategy",
		"deviceListStrategy":      "flags.plugin.deviceListStrategy",
		"deviceIDStrategy":        "flags.plugin.deviceIDStrategy",
		"deviceDiscoveryStrategy": "flags.deviceDiscoveryStrategy",
		"reservationCheck":        "health.reservationCheck",
		"owners.occupancy":        "health.occupancy",
	} {
		got, want := enums(find(s, path)["examples"]), enums(find(product, option))
		if path == "owners.occupancy" { // switched on and off by owners.enabled
			got = append(got, "off")
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s takes %q, the agent's %s %q", path, got, option, want)
		}
		pattern := regexp.MustCompile(find(s, path)["pattern"].(string))
		for _, word := range got {
			if !pattern.MatchString(word) && (path != "owners.occupancy" || word != "off") {
				t.Errorf("%s: %s is refused", path, word)
			}
		}
	}
}

// enums returns all words of a part of a schema, sorted.
func enums(part any) (words []string) {
	switch p := part.(type) {
	case map[string]any:
		words = enums(p["enum"])
		for key, value := range p {
			if key != "enum" && key != "description" && key != "default" {
				words = append(words, enums(value)...)
			}
		}
	case []any:
		for _, item := range p {
			if word, is := item.(string); is && word != "" {
				words = append(words, word)
			} else if !is {
				words = append(words, enums(item)...)
			}
		}
	}
	slices.Sort(words)
	return slices.Compact(words)
}

// The charts have the version of the binaries.
func TestVersion(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^VERSION := (.*)$`).FindSubmatch(makefile)[1]
	for name, load := range map[string]func() (*chart.Chart, error){"chart": load, "fleet-chart": loadFleet} {
		c, err := load()
		if err != nil {
			t.Fatal(err)
		}
		if m := c.Metadata; m.Version != string(version) || m.AppVersion != string(version) {
			t.Errorf("the %s is %s of %s, VERSION is %s", name, m.Version, m.AppVersion, version)
		}
	}
}
