package nvidia

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
)

// layer is a mapping of values; a later one has precedence.
type layer struct {
	values *node
	key    string // that has them: "spec.values"
}

// release is a chart that is installed by an object.
type release struct {
	object *node
	others []*node // that have values of it
	chart  string
	layers []layer
}

// readReleases reads the releases of NVIDIA's charts in objects.
func (s *source) readReleases(objects []*node) error {
	var found []release
	for _, d := range objects {
		r := release{object: d}
		switch kind := d.get("kind").text(); kind {
		case "HelmRelease":
			s.readFlux(&r, objects)
		case "HelmChart":
			s.readK3s(&r, objects)
		case "Application":
			s.readArgo(&r, d.get("spec"), "spec")
		case "ApplicationSet":
			s.readArgo(&r, d.get("spec.template.spec"), "spec.template.spec")
		default:
			continue
		}
		if r.isNVIDIA() {
			found = append(found, r)
			continue
		}
		s.other(d)
	}
	if s.releases = len(found); len(found) > 1 {
		return fmt.Errorf("%s: %d releases of the plugin, in lines %d and %d: give one at a time", s.path, len(found), found[0].object.Line, found[1].object.Line)
	}
	for _, r := range found {
		values, key := s.merged(r)
		s.readChart(values, key, r.chart)
		s.kind = r.object.get("kind").text() + " with " + s.kind
		for _, d := range append(r.others, r.object) {
			s.restOf(d)
		}
	}
	return nil
}

// chartNames are the names of NVIDIA's charts.
var chartNames = []string{"nvidia-device-plugin", "k8s-device-plugin", "gpu-operator"}

// isNVIDIA reports whether a release is one of NVIDIA's plugin or operator: by the chart, else, as a chart may depend on that one, by its values.
func (r release) isNVIDIA() bool {
	if slices.ContainsFunc(chartNames, func(name string) bool { return strings.Contains(r.chart, name) }) {
		return true
	}
	return slices.ContainsFunc(r.layers, func(l layer) bool { return nested(l.values) != "" })
}

// nested is the key of a mapping that has the values of a chart on which another one depends; "" = there is none.
func nested(values *node) string {
	i := slices.IndexFunc(chartNames, func(name string) bool { return values.get(name).mapping() != nil })
	if i < 0 {
		return ""
	}
	return chartNames[i]
}

// readChart reads values of a chart of NVIDIA's, or of one that depends on it. key is that of the values, chart the name of the chart, if known.
func (s *source) readChart(values *node, key, chart string) {
	prefix := key
	if prefix != "" {
		prefix += "."
	}
	if name := nested(values); name != "" {
		s.readChart(values.get(name), prefix+name, name)
		s.rest(importer.NoEffect, values, key, "it is of another chart", "")
		return
	}
	if strings.Contains(chart, "gpu-operator") || chart == "" && isOperator(values) {
		s.kind = "Helm values of NVIDIA's GPU operator"
		s.readOperator(values, prefix)
		return
	}
	s.kind = "Helm values of NVIDIA's k8s-device-plugin"
	s.readValues(values, prefix)
}

// readFlux reads a HelmRelease.
func (s *source) readFlux(r *release, objects []*node) {
	spec := r.object.get("spec")
	r.chart = cmp.Or(path.Base(spec.get("chart.spec.chart").text()), ".")
	if r.chart == "." {
		r.chart = cmp.Or(spec.get("chartRef.name").text(), r.object.get("metadata.name").text())
	}
	for i, from := range spec.get("valuesFrom").items() {
		s.readValuesFrom(r, from, fmt.Sprintf("spec.valuesFrom[%d]", i), objects)
	}
	r.add(spec.get("values"), "spec.values")
	if patches := spec.get("postRenderers"); patches.given() {
		s.note(importer.Differs, patches, "spec.postRenderers", "left out: patches of the objects that the chart makes", "see what of them the plugin needs")
	}
}

// readValuesFrom reads values of a ConfigMap, if the input has it.
func (s *source) readValuesFrom(r *release, from *node, key string, objects []*node) {
	name, file := from.get("name").text(), cmp.Or(from.get("valuesKey").text(), "values.yaml")
	for _, d := range objects {
		if d.get("kind").text() != "ConfigMap" || d.get("metadata.name").text() != name || from.get("kind").text() != "ConfigMap" {
			continue
		}
		if v := d.get("data").value(file); v != nil && from.get("targetPath") == nil && s.addValues(r, v, "data."+file) {
			s.take(from.find("kind"), from.find("name"), from.find("valuesKey"))
			r.others = append(r.others, d)
			return
		}
	}
	s.note(importer.Needed, from, key, fmt.Sprintf("the values in %s %s are not in the input", from.get("kind").text(), name), "add them to spec.values")
}

// readK3s reads a HelmChart, and the HelmChartConfig of its name.
func (s *source) readK3s(r *release, objects []*node) {
	spec := r.object.get("spec")
	r.chart = path.Base(spec.get("chart").text())
	s.addContent(r, spec)
	for _, d := range objects {
		if d.get("kind").text() == "HelmChartConfig" && d.get("metadata.name").text() == r.object.get("metadata.name").text() && r.isNVIDIA() {
			s.addContent(r, d.get("spec"))
			r.others = append(r.others, d)
		}
	}
	set := &node{Kind: yaml.MappingNode, Line: spec.get("set").line()}
	for _, name := range spec.get("set").keys() {
		setValue(set, name, spec.get("set").value(name), false)
	}
	r.add(set, "spec.set")
}

// addContent adds valuesContent and values of a HelmChart or HelmChartConfig.
func (s *source) addContent(r *release, spec *node) {
	if v := spec.get("valuesContent"); v != nil {
		s.addValues(r, v, "spec.valuesContent")
	}
	r.add(spec.get("values"), "spec.values")
}

// readArgo reads the sources of an Application.
func (s *source) readArgo(r *release, spec *node, key string) {
	s.readArgoSource(r, spec.get("source"), key+".source")
	for i, source := range spec.get("sources").items() {
		s.readArgoSource(r, source, fmt.Sprintf("%s.sources[%d]", key, i))
	}
}

func (s *source) readArgoSource(r *release, source *node, key string) {
	own := release{chart: source.get("chart").text(), object: r.object}
	helm := source.get("helm")
	key += ".helm."
	if v := helm.get("values"); v != nil && helm.get("valuesObject") == nil {
		s.addValues(&own, v, key+"values")
	} else if v != nil {
		s.note(importer.NoEffect, v, key+"values", "left out: Argo CD ignores it beside valuesObject", "")
	}
	own.add(helm.get("valuesObject"), key+"valuesObject")
	set := &node{Kind: yaml.MappingNode, Line: helm.get("parameters").line()}
	for _, p := range helm.get("parameters").items() {
		s.take(p.find("name"), p.find("forceString"))
		setValue(set, p.get("name").text(), p.find("value"), p.get("forceString").text() == "true")
	}
	own.add(set, key+"parameters")
	if own.chart == "" && path.Base(source.get("path").text()) != "." { // a chart in a repository
		own.chart = path.Base(source.get("path").text())
	}
	if !own.isNVIDIA() {
		return
	}
	for i, file := range helm.get("valueFiles").items() {
		s.note(importer.Needed, file, fmt.Sprintf("%svalueFiles[%d]", key, i), "the values in "+file.text()+" are not in the input", "import that file, and give the other values there")
	}
	r.chart, r.layers = own.chart, append(r.layers, own.layers...)
}

func (r *release) add(values *node, key string) {
	if values.mapping() != nil && len(values.Content) > 0 {
		r.layers = append(r.layers, layer{values, key})
	}
}

// addValues adds values that are the text of a scalar; false if they are none.
func (s *source) addValues(r *release, v *node, key string) bool {
	docs, err := s.text(v, key)
	if err != nil || len(docs) > 1 || len(docs) == 1 && docs[0].mapping() == nil {
		s.note(importer.Differs, v, key, "left out: it is no mapping of values in YAML", "correct it")
		return false
	}
	for _, d := range docs {
		r.add(d, key)
	}
	return true
}

// merged are the values of a release, and their key.
func (s *source) merged(r release) (values *node, key string) {
	values = &node{Kind: yaml.MappingNode, Tag: "!!map", Line: r.object.Line}
	for _, l := range r.layers {
		key = cmp.Or(key, l.key)
		values = s.overlay(values, l.values, key)
	}
	return values, key
}

// overlay returns base, whose key is key, with the values of over, as Helm does. It changes neither.
func (s *source) overlay(base, over *node, key string) *node {
	if base.mapping() == nil || over.mapping() == nil || len(over.Content) == 0 {
		s.note(importer.NoEffect, base, key, fmt.Sprintf("%s has no effect: line %d has another value", base.brief(), over.Line), "")
		return over
	}
	result := &node{Kind: yaml.MappingNode, Tag: "!!map", Line: base.Line, Content: slices.Clone(base.Content)}
	for pair := range slices.Chunk(over.Content, 2) {
		value := (*node)(pair[1])
		i := 0
		for i < len(result.Content) && result.Content[i].Value != pair[0].Value {
			i += 2
		}
		if i == len(result.Content) {
			result.Content = append(result.Content, pair...)
			continue
		}
		result.Content[i+1] = (*yaml.Node)(s.overlay((*node)(result.Content[i+1]), value, key+"."+pair[0].Value))
	}
	return result
}

// setValue sets a value at a path as helm --set writes it: a.b[0].c, with \. for a dot in a key. Its text is read as YAML, unless it is a string.
func setValue(root *node, name string, value *node, isString bool) {
	if value == nil {
		return
	}
	var plain yaml.Node
	if !isString && value.of(yaml.ScalarNode) != nil && yaml.Unmarshal([]byte(value.Value), &plain) == nil && len(plain.Content) == 1 && plain.Content[0].Kind == yaml.ScalarNode {
		value.Tag, value.Style = plain.Content[0].Tag, plain.Content[0].Style
	}
	at := root
	parts := pathOf(name)
	for i, part := range parts {
		next := &node{Kind: yaml.MappingNode, Tag: "!!map", Line: value.Line}
		switch {
		case i == len(parts)-1:
			next = value
		case isIndex(parts[i+1]):
			next.Kind, next.Tag = yaml.SequenceNode, "!!seq"
		}
		at = at.child(part, next)
	}
}

// pathOf are the parts of a name: "a", "[0]", "c".
func pathOf(name string) (parts []string) {
	const dot = "\x00"
	for part := range strings.SplitSeq(strings.ReplaceAll(name, `\.`, dot), ".") {
		part = strings.ReplaceAll(part, dot, ".")
		key, rest, _ := strings.Cut(part, "[")
		if key != "" || rest == "" {
			parts = append(parts, key)
		}
		for rest != "" {
			index, after, _ := strings.Cut(rest, "]")
			parts = append(parts, "["+index)
			rest = strings.TrimPrefix(after, "[")
		}
	}
	return parts
}

func isIndex(part string) bool { return strings.HasPrefix(part, "[") }

// child returns what a mapping or list has for a part of a path: next, unless both are mappings or both lists.
func (n *node) child(part string, next *node) *node {
	if isIndex(part) {
		i, err := strconv.Atoi(part[1:])
		if n.Kind != yaml.SequenceNode || err != nil || i < 0 || i > len(n.Content) {
			return next // Helm refuses it
		}
		if i == len(n.Content) {
			n.Content = append(n.Content, (*yaml.Node)(next))
		}
		return n.replace(i, next)
	}
	if n.Kind != yaml.MappingNode {
		return next
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == part {
			return n.replace(i+1, next)
		}
	}
	n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: part}, (*yaml.Node)(next))
	return next
}

// replace returns the content at i if it is a collection of the kind of next, and else next, which is then there.
func (n *node) replace(i int, next *node) *node {
	if n.Content[i].Kind == next.Kind && next.Kind != yaml.ScalarNode {
		return (*node)(n.Content[i])
	}
	n.Content[i] = (*yaml.Node)(next)
	return next
}

func (n *node) line() int {
	if n == nil {
		return 0
	}
	return n.Line
}
