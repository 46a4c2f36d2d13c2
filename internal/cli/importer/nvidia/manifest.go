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

// readManifest reads Kubernetes objects: the containers of the plugin, ConfigMaps with files, the GPU operator's ClusterPolicy.
func (s *source) readManifest(docs []*node) error {
	s.kind = "manifest of NVIDIA's k8s-device-plugin"
	found := false
	var workloads []*node
	for _, d := range objects(docs) {
		switch kind := d.get("kind").text(); {
		case kind == "ConfigMap":
			found = s.readConfigMap(d) || found
		case kind == "ClusterPolicy", d.get("spec.devicePlugin") != nil && d.get("spec.template") == nil:
			s.kind = "ClusterPolicy of NVIDIA's GPU operator"
			s.readOperator(d.get("spec"), "spec.")
			found = true
		default:
			workloads = append(workloads, d)
		}
	}
	for _, d := range workloads { // after the ConfigMaps that they refer to
		found = s.readWorkload(d) || found
	}
	if !found {
		return fmt.Errorf("%s: no container of a device plugin, no ConfigMap with a configuration of it and no ClusterPolicy", s.path)
	}
	return nil
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
	return fmt.Sprintf("%s:%d: %s", s.path, n.Line, what)
}

// readConfigMap adds the configurations of a ConfigMap; false if it has none.
func (s *source) readConfigMap(d *node) bool {
	found := false
	for _, key := range d.get("data").keys() {
		if v := d.mappingAt("data").value(key); s.addText(key, "data."+key, v) {
			found = true
		}
	}
	return found
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
	line := v.Line
	if v.Style&(yaml.LiteralStyle|yaml.FoldedStyle) == 0 {
		line--
	}
	docs, err := parse(where, []byte(v.text()))
	switch {
	case err != nil:
		s.notes.Add(importer.Differs, where, "left out, it is no YAML: "+err.Error(), "")
		return false
	case len(docs) == 0:
		s.configs = append(s.configs, fileText{name: name, where: where, line: line})
		return true
	}
	known := slices.ContainsFunc(docs[0].keys(), func(key string) bool {
		return slices.ContainsFunc(slices.Concat(fileSections, []string{"resources"}), func(s string) bool { return strings.EqualFold(s, key) })
	})
	if len(docs) == 1 && known {
		s.configs = append(s.configs, fileText{name: name, where: where, root: docs[0], line: line})
		return true
	}
	return false
}

// readWorkload reads a DaemonSet or another object with a pod template, or a Pod; false if it has no container of the plugin.
func (s *source) readWorkload(d *node) bool {
	pod := d.get("spec.template.spec")
	if pod == nil {
		pod = d.get("spec")
	}
	found := false
	for _, c := range pod.get("containers").items() {
		switch program := programOf(c); program {
		case "nvidia-device-plugin":
			found = true
			s.readEnv(c.get("env"))
			s.readConfigFile(c, pod)
			words := slices.Concat(wordsOf(c.get("command")), wordsOf(c.get("args")))
			s.readFlags(words, s.at(c.get("args"), "args of container "+c.get("name").text()))
		case "gpu-feature-discovery":
			noteLabels(&s.notes, s.at(c, "container "+c.get("name").text()))
			found = found || s.noPlugin()
		case "config-manager":
			s.noteLabelledConfigs(s.at(c, "container "+c.get("name").text()))
		}
	}
	return found
}

// noPlugin marks the input as one that installs no plugin, unless something else does.
func (s *source) noPlugin() bool {
	s.off = len(s.options) == 0 && len(s.configs) == 0
	return true
}

func (s *source) noteLabelledConfigs(where string) {
	s.notes.Add(importer.Differs, where, "k8s-gpu has no choice of a configuration by the node label nvidia.com/device-plugin.config",
		"use the Helm chart, which has a DaemonSet for each configuration and the nodes with its label, or rules by model in one file (docs/policy.md)")
}

// programOf is the program of a container, as far as its fields have it.
func programOf(c *node) string {
	words := strings.Join(slices.Concat(wordsOf(c.get("command")), wordsOf(c.get("args"))), " ")
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

// wordsOf are the words of a command or of arguments. A script of a shell is split into its words.
func wordsOf(n *node) (words []string) {
	for _, item := range n.items() {
		if strings.Contains(item.text(), " ") && !strings.HasPrefix(item.text(), "-") {
			words = append(words, shellWords(item.text())...)
			continue
		}
		words = append(words, item.text())
	}
	return words
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
	for _, e := range env.items() {
		name := e.get("name").text()
		where := s.at(e, "env "+name)
		if from := e.get("valueFrom"); from != nil {
			if _, isOption := flagOf(name); isOption {
				s.notes.Add(importer.Needed, where, "its value is not in this file: "+from.brief(), "give k8s-gpu the same variable")
			}
			continue
		}
		s.readVariable(name, e.get("value").text(), where)
	}
}

// readVariable reads a variable of the plugin's process.
func (s *source) readVariable(name, value, where string) {
	flag, isOption := flagOf(name)
	switch {
	case isOption && value == "":
	case isOption:
		s.options = append(s.options, option{flag, value, where})
	case name == "CONFIG_FILE":
	case name == "NVIDIA_VISIBLE_DEVICES" && !slices.Contains([]string{"", "all", "void", "none"}, value):
		s.notes.Add(importer.Differs, where, "the plugin offers only "+value+", because NVIDIA's container runtime shows it no others",
			"keep the variable in the DaemonSet, or select these devices by policy.include")
	case strings.HasPrefix(name, "NVIDIA_"):
		s.notes.Add(importer.NoEffect, where, "it is for NVIDIA's container runtime, which starts the plugin's container; deploy/daemonset.yaml has its own", "")
	default:
		s.notes.Add(importer.NoEffect, where, "left out: NVIDIA's plugin does not read this variable", "")
	}
}

// flagOf is the flag of NVIDIA's plugin that a variable sets; the variables of its health checks stand for themselves.
func flagOf(variable string) (string, bool) {
	if variable == "DP_DISABLE_HEALTHCHECKS" || variable == "DP_ENABLE_HEALTHCHECKS" {
		return variable, true
	}
	for _, s := range config.KubernetesSpecs() {
		if slices.Contains(flags, s.Flag) && slices.Contains(s.Env, variable) {
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

// readFlags reads the arguments of the plugin.
func (s *source) readFlags(words []string, where string) {
	for i := 0; i < len(words); i++ {
		name, isFlag := strings.CutPrefix(words[i], "-")
		if !isFlag {
			continue
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		spec, known := specOf(name)
		if !known && name != config.FlagConfigFile {
			s.notes.Add(importer.NoEffect, where, "left out: NVIDIA's plugin has no flag "+words[i], "")
			continue
		}
		switch {
		case hasValue:
		case spec.Kind == schema.Bool:
			value = "true"
		case i+1 < len(words):
			i++
			value = words[i]
		}
		if name == config.FlagConfigFile {
			s.notes.Add(importer.Needed, where+" --"+name, "the configuration file "+value+" is not in the input", "import it as well")
			continue
		}
		s.options = append(s.options, option{spec.Flag, value, where + " --" + name})
	}
}
