// Package nvidia turns configurations of NVIDIA's k8s-device-plugin (0.20) into files of k8s-gpu that give the same answers: its
// configuration file, Helm values of its chart and of the GPU operator, and manifests with arguments, variables and ConfigMaps.
package nvidia

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
)

// Format is the form of an input.
type Format string

// The formats. The empty one is detected.
const (
	FromFile     Format = "file"     // version: v1
	FromValues   Format = "values"   // of NVIDIA's chart, or of the GPU operator's
	FromManifest Format = "manifest" // DaemonSet, Pod, ConfigMap, ClusterPolicy, HelmRelease, Application, HelmChart, lists of them
)

// Formats are the names of the formats.
var Formats = []string{string(FromFile), string(FromValues), string(FromManifest)}

// Input is a text and where it is from.
type Input struct {
	Path   string // for messages
	Text   []byte
	Format Format
}

// Import returns the files of k8s-gpu that an input means. Every file is valid for it. An input that can't be read, or in which the
// plugin is told to do what k8s-gpu does not do, is an error with a line for each problem.
func Import(in Input) (importer.Result, error) {
	src, err := read(in)
	if err != nil {
		return importer.Result{}, err
	}
	all := src.values() // before builders change it
	var builders []*builder
	if len(src.configs) == 0 && !src.off {
		src.configs = []fileText{{where: in.Path}}
	}
	slices.SortStableFunc(src.configs, func(a, b fileText) int { return cmp.Compare(a.name, b.name) })
	for _, c := range src.configs {
		b := newBuilder(src, c)
		b.build()
		src.take(c.root)
		builders = append(builders, b)
	}
	src.close(all)
	if len(src.notes) > 0 && !src.account.Understood(all) {
		return importer.Result{}, &importer.NothingError{Path: src.path, Kind: src.kind, Notes: src.notes}
	}
	r := importer.Result{Kind: src.kind, Default: src.byDefault, Notes: src.notes, Taken: src.account.Leaves(all, importer.Taken)}
	if src.off {
		r.Notes = importer.Sorted(r.Notes)
		return r, nil
	}
	var problems []string
	for _, b := range builders {
		text, errs := b.result()
		problems = append(problems, errs...)
		r.Files = append(r.Files, importer.File{Name: b.config.name, Text: text})
		r.Notes = append(r.Notes, b.notes...)
	}
	r.Notes = importer.Sorted(r.Notes)
	if len(problems) > 0 {
		return importer.Result{}, importer.Problems("not imported", problems)
	}
	return r, nil
}

// close adds a note for each value of the input that has no recorded effect.
func (s *source) close(all importer.Value) {
	for _, v := range s.account.Open(all) {
		if n, ok := v.ID.(*node); ok && !slices.Contains(s.docs, n) {
			s.set(n, importer.Unknown)
			s.notes.Add(importer.Unknown, v.Where, n.brief()+" left out: it is not known", "")
		}
	}
}

// source is what an input has, in whatever form.
type source struct {
	kind      string
	path      string
	configs   []fileText // configuration files in it
	byDefault string     // name of one of them
	options   []option   // given beside a file, which they override; a later one has precedence
	notes     importer.Notes
	off       bool // it installs no device plugin
	releases  int  // of a chart that it has

	docs     []*node           // of the input
	embedded map[*node][]*node // documents that are the text of a scalar
	account  importer.Account
}

// fileText is a configuration file of NVIDIA's plugin.
type fileText struct {
	name  string // "" = it is the only one
	where string // of the text: "values.yaml:12: config.map.default"; "values.yaml" for a whole file
	root  *node  // nil = an empty file
}

// option is an option of the plugin that is given as a flag, a variable or a chart value.
type option struct {
	flag  string // without "--"; a variable that is no flag: its name
	text  string
	where string
}

// noteLabels adds what to do about node labels, for which an input has a value.
func (s *source) noteLabels(n *node, where string) {
	s.note(importer.Needed, n, where, labelsNeeded, labelsRemedy)
}

const (
	labelsNeeded = "k8s-gpu can write the labels of GPU feature discovery for Node Feature Discovery"
	labelsRemedy = "give it --use-node-feature-api or --features-file: nodeLabels of the Helm chart"
)

// wanted is what an input may be.
const wanted = "give the values of the release (helm get values RELEASE -o yaml), the manifest (kubectl get daemonset NAME -o yaml) or the configuration file"

// helmHeader is the first line of helm get values without -o yaml.
const helmHeader = "USER-SUPPLIED VALUES:"

func blankHeader(text []byte) []byte {
	if rest, ok := bytes.CutPrefix(text, []byte(helmHeader)); ok {
		return rest
	}
	return text
}

// noteMemoryLimits adds what the limits of containers need that get their devices by CDI.
func noteMemoryLimits(notes *importer.Notes, where string) {
	notes.Add(importer.Needed, where, "memory limits of containers (NVIDIA_GPU_MEMORY_LIMIT) need nvidia-container-toolkit 1.20.1 or later on the node", "k8s-gpu doctor names an older one")
}

// read parses an input.
func read(in Input) (*source, error) {
	docs, err := parse(in.Path, blankHeader(in.Text))
	if err != nil {
		return nil, err
	}
	format := cmp.Or(in.Format, detect(docs))
	if none := strings.TrimSpace(string(in.Text)); len(docs) == 0 && (none == "null" || none == helmHeader+"\nnull") {
		docs, format = []*node{{Kind: yaml.MappingNode, Line: 1}}, FromValues // a release without values
	}
	s := &source{path: in.Path, docs: docs, embedded: map[*node][]*node{}}
	if format == FromManifest {
		return s, s.readManifest(docs)
	}
	if len(docs) != 1 {
		return nil, fmt.Errorf("%s: %d YAML documents: want one, or --from manifest", in.Path, len(docs))
	}
	if docs[0].mapping() == nil {
		return nil, fmt.Errorf("%s: no mapping: %s", in.Path, wanted)
	}
	switch format {
	case FromFile:
		s.kind = "configuration file of NVIDIA's k8s-device-plugin"
		s.configs = []fileText{{where: in.Path, root: docs[0]}}
	case FromValues:
		s.readChart(docs[0], "", "")
	default:
		return nil, fmt.Errorf("%s: --from %s: want one of %s", in.Path, format, strings.Join(Formats, ", "))
	}
	return s, nil
}

// detect returns the format of a text.
func detect(docs []*node) Format {
	for _, d := range docs {
		if d.get("kind") != nil && d.get("apiVersion") != nil || d.sequence() != nil && len(docs) == 1 && d.items()[0].get("kind") != nil {
			return FromManifest
		}
	}
	if len(docs) == 0 || docs[0].mapping() == nil {
		return FromFile
	}
	root := docs[0]
	if root.get("spec.devicePlugin") != nil { // a patch of a ClusterPolicy
		return FromManifest
	}
	for _, key := range root.keys() {
		if slices.ContainsFunc(fileSections, func(section string) bool { return strings.EqualFold(section, key) }) {
			return FromFile
		}
	}
	return FromValues
}

// fileSections are the sections of NVIDIA's configuration file. "resources" is a value of its chart, too.
var fileSections = []string{"version", "flags", "sharing", "imex"}
