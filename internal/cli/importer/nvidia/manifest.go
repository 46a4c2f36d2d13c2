package nvidia

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/schema"
)

// readManifest reads Kubernetes objects: the containers of the plugin, ConfigMaps with files, the GPU operator's ClusterPolicy, and what installs
// a chart: Flux, Argo CD, k3s.
func (s *source) readManifest(docs []*node) error {
	s.kind = "manifest of NVIDIA's k8s-device-plugin"
	all := objects(docs)
	if err := s.readReleases(all); err != nil {
		return err
	}
	found := s.releases > 0
	var workloads []*node
	for _, d := range all {
		switch kind := d.get("kind").text(); {
		case s.account.Has(d):
		case kind == "ConfigMap":
			found = s.readConfigMap(d) || found
		case kind == "ClusterPolicy", d.get("spec.devicePlugin") != nil && d.get("spec.template") == nil:
			s.kind = "ClusterPolicy of NVIDIA's GPU operator"
			s.readOperator(d.get("spec"), "spec.")
			s.restOf(d)
			found = true
		default:
			workloads = append(workloads, d)
		}
	}
	for _, d := range docs {
		if d.get("items") != nil { // a List
			s.silence(d.find("apiVersion"), d.find("kind"))
			s.rest(importer.NoEffect, d.find("metadata"), "metadata", "it is of the list, not of the plugin", "")
		}
	}
	for _, d := range workloads { // after the ConfigMaps that they refer to
		found = s.readWorkload(d) || found
	}
	if !found {
		return fmt.Errorf("%s: no container of a device plugin, no ConfigMap with a configuration of it, no ClusterPolicy, and no HelmRelease, "+
			"Application or HelmChart of its chart", s.path)
	}
	return nil
}

// podFields are the fields of a pod that nodes may need for another plugin, too.
var podFields = []field{{
	[]string{"tolerations", "nodeSelector", "affinity", "priorityClassName", "runtimeClassName", "imagePullSecrets"},
	importer.Needed, "it is of the DaemonSet, not of the plugin", "give it to deploy/daemonset.yaml, or to the chart, which has a value of this name",
}}

// restOf notes what else an object has.
func (s *source) restOf(d *node) {
	s.silence(d.find("apiVersion"), d.find("kind"))
	s.rest(importer.NoEffect, d, "", "it is of the "+cmp.Or(d.get("kind").text(), "object")+", not of the plugin", "")
	s.account.Set(d, importer.NoEffect) // it is read
}

// other notes an object that is none of the plugin.
func (s *source) other(d *node) {
	s.note(importer.NoEffect, d, strings.TrimSpace(d.get("kind").text()+" "+d.get("metadata.name").text()), "left out: it is no object of the plugin", "")
}

// objects are the Kubernetes objects of documents; those of a List, too.
func objects(docs []*node) (all []*node) {
	for _, d := range docs {
		items := d.get("items").items()
		if items == nil {
			items = d.items()
		}
		if items != nil {
			all = append(all, objects(items)...)
			continue
		}
		all = append(all, d)
	}
	return all
}

// at is the place of a node of the input.
func (s *source) at(n *node, what string) string {
	if n == nil {
		return s.path + ": " + what
	}
	return strings.TrimSuffix(fmt.Sprintf("%s:%d: %s", s.path, n.Line, what), ": ")
}

// readConfigMap adds the configurations of a ConfigMap; false if it has none.
func (s *source) readConfigMap(d *node) bool {
	found := false
	for _, key := range d.get("data").keys() {
		if v := d.get("data").value(key); s.addText(key, "data."+key, v) {
			found = true
		}
	}
	if !found {
		s.other(d)
		return false
	}
	s.rest(importer.Unknown, d.get("data"), "data", "it is no configuration of the plugin", "")
	s.restOf(d)
	return true
}

// value is the value of a key, which may have dots.
func (n *node) value(key string) *node {
	if n.mapping() == nil {
		return nil
	}
	for pair := range slices.Chunk(n.Content, 2) {
		if pair[0].Value == key {
			return (*node)(pair[1])
		}
	}
	return nil
}

// addText adds a configuration that is the text of a scalar; false if it is no configuration.
func (s *source) addText(name, key string, v *node) bool {
	where := s.at(v, key)
	docs, err := s.text(v, key)
	switch {
	case v.of(yaml.ScalarNode) == nil:
		return false
	case err != nil:
		s.note(importer.Differs, v, key, "left out, it is no YAML: "+err.Error(), "")
		return false
	case len(docs) == 0:
		s.take(v)
		s.configs = append(s.configs, fileText{name: name, where: where})
		return true
	}
	isFile := slices.ContainsFunc(docs[0].keys(), func(key string) bool {
		return slices.ContainsFunc(slices.Concat(fileSections, []string{"resources"}), func(s string) bool { return strings.EqualFold(s, key) })
	})
	if len(docs) != 1 || !isFile {
		return false
	}
	delete(s.embedded, v) // the builder records the effects of its values
	s.take(v)
	s.configs = append(s.configs, fileText{name: name, where: where, root: docs[0]})
	return true
}

// readWorkload reads a DaemonSet or another object with a pod template, or a Pod; false if it has no container of the plugin.
func (s *source) readWorkload(d *node) bool {
	pod, key := d.get("spec.template.spec"), "spec.template.spec"
	if pod == nil {
		pod, key = d.get("spec"), "spec"
	}
	found := false
	for i, c := range pod.get("containers").items() {
		found = s.readContainer(c, pod, fmt.Sprintf("%s.containers[%d]", key, i)) || found
	}
	if !found {
		s.other(d)
		return false
	}
	for i, c := range pod.get("containers").items() {
		if programOf(c) == "" {
			s.note(importer.Unknown, c, fmt.Sprintf("%s.containers[%d]", key, i), "container "+c.get("name").text()+" left out: it is no program of the plugin", "")
		}
	}
	if s.configs == nil && s.options == nil && s.off {
		s.kind = "manifest of gpu-feature-discovery"
	}
	s.readFields(pod, key+".", podFields)
	s.restOf(d)
	return true
}

// readContainer reads a container of the pod; false if it is none of the plugin or its companions.
func (s *source) readContainer(c, pod *node, key string) bool {
	name := "container " + c.get("name").text()
	switch programOf(c) {
	case "nvidia-device-plugin":
		s.take(c.find("name"))
		s.rest(importer.NoEffect, c.find("image"), key+".image", "it is the image of NVIDIA's plugin", "")
		s.readConfigFile(c, pod)
		s.readEnv(c.get("env"))
		s.readFlags(slices.Concat(wordsOf(c.get("command")), wordsOf(c.get("args"))), c.get("args"), "args of "+name)
		return true
	case "gpu-feature-discovery":
		s.noteLabels(c, name)
		s.readLabelVariables(c.get("env"))
		return s.noPlugin()
	case "config-manager":
		s.noteLabelledConfigs(s.at(c, name))
		s.set(c, importer.Differs)
	case "mps-control-daemon", "mps":
		s.note(importer.NoEffect, c, name, "left out: it is NVIDIA's MPS control daemon", "")
	}
	return false
}

// noPlugin marks the input as one that installs no plugin, unless something else does.
func (s *source) noPlugin() bool {
	s.off = len(s.options) == 0 && len(s.configs) == 0
	return true
}

func (s *source) noteLabelledConfigs(where string) {
	s.notes.Add(importer.Needed, where, "k8s-gpu chooses a configuration by the node label nvidia.com/device-plugin.config itself",
		"use the Helm chart, whose config.map and config.default are the same, or give it --config-file-srcdir and a token that may get and watch nodes")
}

// programOf is the program of a container, as far as its fields have it.
func programOf(c *node) string {
	words := textOf(slices.Concat(wordsOf(c.get("command")), wordsOf(c.get("args"))))
	for _, program := range []string{"config-manager", "mps-control-daemon", "gpu-feature-discovery", "nvidia-device-plugin"} {
		if strings.Contains(words, program) {
			return program
		}
	}
	name, image := c.get("name").text(), path.Base(c.get("image").text())
	for _, part := range []string{"config-manager", "mps-control-daemon", "gpu-feature-discovery", "mps"} {
		if strings.Contains(name, part) || strings.HasPrefix(image, part) {
			return part
		}
	}
	if strings.Contains(name, "device-plugin") || strings.Contains(image, "device-plugin") {
		return "nvidia-device-plugin"
	}
	return ""
}

// word is a word of a command or of arguments.
type word struct {
	text   string
	of     *node
	script bool // it is one of several in the text of the node
}

// wordsOf are the words of a command or of arguments. A script of a shell is split into its words.
func wordsOf(n *node) (words []word) {
	for _, item := range n.items() {
		if strings.Contains(item.text(), " ") && !strings.HasPrefix(item.text(), "-") {
			for _, text := range shellWords(item.text()) {
				words = append(words, word{text, item, true})
			}
			continue
		}
		words = append(words, word{item.text(), item, false})
	}
	return words
}

// textOf is a command line.
func textOf(words []word) string {
	var b strings.Builder
	for _, w := range words {
		b.WriteString(w.text + " ")
	}
	return b.String()
}

// shellWords splits a line into words, with quotes as in a shell. Nothing is expanded.
func shellWords(line string) (words []string) {
	var word strings.Builder
	quote, open := rune(0), false
	for _, r := range line + " " {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			quote, open = r, true
		case quote == 0 && strings.ContainsRune(" \t\n\r", r):
			if open {
				words = append(words, word.String())
			}
			word.Reset()
			open = false
		case quote == 0 && r == '\\':
		default:
			word.WriteRune(r)
			open = true
		}
	}
	return words
}

// readEnv reads the variables of a container of the plugin.
func (s *source) readEnv(env *node) {
	if !env.given() {
		s.take(env)
	}
	for _, e := range env.items() {
		name := e.get("name").text()
		s.take(e.find("name"))
		from := e.get("valueFrom")
		switch _, isOption := flagOf(name); {
		case from != nil && isOption:
			s.note(importer.Needed, from, "env "+name, "its value is not in this file: "+from.brief(), "give k8s-gpu the same variable")
		case from != nil:
			s.note(importer.Unknown, from, "env "+name, "left out: NVIDIA's plugin does not read this variable", "")
		default:
			s.readVariable(name, e.get("value").text(), cmp.Or(e.find("value"), e.find("name")))
		}
	}
}

// readVariable reads a variable of the plugin's process; value has its place.
func (s *source) readVariable(name, text string, value *node) {
	flag, isOption := flagOf(name)
	where := "env " + name
	s.take(value)
	switch {
	case isOption && text == "":
	case isOption:
		s.option(flag, value, where)
	case name == "CONFIG_FILE":
	case name == "NVIDIA_VISIBLE_DEVICES" && !slices.Contains([]string{"", "all", "void", "none"}, text):
		s.note(importer.Differs, value, where, "the plugin offers only "+text+", because NVIDIA's container runtime shows it no others",
			"keep the variable in the DaemonSet, or select these devices by policy.include")
	case strings.HasPrefix(name, "NVIDIA_"):
		s.note(importer.NoEffect, value, where, "it is for NVIDIA's container runtime, which starts the plugin's container; deploy/daemonset.yaml has its own", "")
	default:
		s.note(importer.Unknown, value, where, "left out: NVIDIA's plugin does not read this variable", "")
	}
}

// readLabelVariables reads the variables of a container of gpu-feature-discovery that are of that program alone.
func (s *source) readLabelVariables(env *node) {
	for _, e := range env.items() {
		name := e.get("name").text()
		for _, spec := range config.KubernetesSpecs() {
			switch {
			case !strings.HasPrefix(name, labelVariable) || !slices.Contains(spec.Env, name):
			case spec.Flag == failOnInitError:
				s.note(importer.NoEffect, e, "env "+name, waitsForDriver, "")
			case spec.Without() != "":
				s.note(importer.NoEffect, e, "env "+name, "left out: "+spec.Without(), "")
			default:
				s.note(importer.Needed, e, "env "+name, "k8s-gpu reads this variable with the same meaning", "give it to k8s-gpu")
			}
		}
	}
}

// labelVariable begins the names of variables that gpu-feature-discovery reads, and the plugin does not.
const labelVariable = "GFD_"

// flagOf is the flag of NVIDIA's plugin that a variable sets; the variables of its health checks stand for themselves.
func flagOf(variable string) (string, bool) {
	if variable == "DP_DISABLE_HEALTHCHECKS" || variable == "DP_ENABLE_HEALTHCHECKS" {
		return variable, true
	}
	for _, s := range config.KubernetesSpecs() {
		if slices.Contains(flags, s.Flag) && slices.Contains(s.Env, variable) && !strings.HasPrefix(variable, labelVariable) {
			return s.Flag, true
		}
	}
	return "", false
}

// readConfigFile notes a configuration file that is not in the input.
func (s *source) readConfigFile(c, pod *node) {
	var named *node
	for _, e := range c.get("env").items() {
		if e.get("name").text() == "CONFIG_FILE" && e.get("value").given() {
			named = e.get("value")
		}
	}
	if named == nil || len(s.configs) > 0 {
		return
	}
	maps := []string{}
	for _, v := range pod.get("volumes").items() {
		if name := v.get("configMap.name").text(); name != "" {
			maps = append(maps, name)
		}
	}
	s.notes.Add(importer.Needed, s.at(named, "env CONFIG_FILE"), "the configuration file "+named.text()+" is not in the input",
		"import it as well: kubectl get configmap "+cmp.Or(strings.Join(maps, " "), "NAME")+" -o yaml")
}

// readFlags reads the words of the plugin's command line; list has the last of them.
func (s *source) readFlags(words []word, list *node, where string) {
	for i := 0; i < len(words); i++ {
		w := words[i]
		name, isFlag := strings.CutPrefix(w.text, "-")
		if !isFlag {
			s.readArgument(w, i, where)
			continue
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		spec, known := specOf(name)
		if !known && name != config.FlagConfigFile {
			s.note(importer.Unknown, w.of, where, "left out: NVIDIA's plugin has no flag "+w.text, "")
			continue
		}
		s.take(w.of)
		switch {
		case hasValue:
		case spec.Kind == schema.Bool:
			value = "true"
		case i+1 < len(words):
			i++
			value = words[i].text
			s.take(words[i].of)
		}
		if name == config.FlagConfigFile {
			s.note(importer.Needed, w.of, where+" --"+name, "the configuration file "+value+" is not in the input", "import it as well")
			continue
		}
		s.options = append(s.options, option{spec.Flag, value, s.at(w.of, where) + " --" + name})
	}
	if !list.given() {
		s.take(list)
	}
}

// readArgument reads a word that is no flag: the program, a part of a script, or one that the plugin does not read.
func (s *source) readArgument(w word, position int, where string) {
	if position == 0 || w.script {
		if !s.account.Has(w.of) {
			s.take(w.of)
		}
		return
	}
	s.note(importer.Unknown, w.of, where, "left out: NVIDIA's plugin does not read the argument "+w.text, "")
}
