package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// ByLabel is the choice of the configuration file by a label of the node. Names and meanings are those of NVIDIA's config-manager. The settings
// are flags and variables only: they apply before there is a file.
type ByLabel struct {
	Dir       string   // folder with a file for each value of the label; "" = the file is that of --config-file
	Label     string   // "nvidia.com/device-plugin.config"
	Default   string   // name of the file for a node without the label; "" = Fallbacks decides
	Fallbacks []string // of named, single and empty, in this order
}

const (
	flagConfigDir = "config-file-srcdir"

	// DefaultConfigLabel is the node label that NVIDIA's config-manager reads.
	DefaultConfigLabel = "nvidia.com/device-plugin.config"
	// DefaultPauseLabel is the node label by which the GPU Operator (26.7) and the programs that it runs take GPU clients off a node.
	DefaultPauseLabel = "nvidia.com/gpu.deploy.client"

	namedFallback  = "named"
	singleFallback = "single"
	emptyFallback  = "empty"
	namedConfig    = "default" // the file of the fallback named
)

// labelForm is a key of a label.
const labelForm = `^([-a-z0-9.]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`

// nodeOptions are those that depend on labels of the node.
func nodeOptions(s *Kubernetes) []Spec {
	o := &s.ByLabel
	label := func(field *string) binding {
		return matching(field, schema.Match(labelForm, "a label"), "want a key of a label such as "+DefaultConfigLabel)
	}
	return []Spec{
		{Flag: flagConfigDir, Usage: "folder of configuration files, of which a label of this node's Node object names one; empty: --config-file alone",
			Note:    "See [below](#by-a-label-of-the-node). In a pod the mount point of a ConfigMap. Takes `node-name`, and the verbs `get` and `watch` on nodes",
			binding: pathOrEmpty(&o.Dir, "/etc/tandem/configs")},
		{Flag: "node-label", Default: DefaultConfigLabel, Usage: "the label of the node whose value is the name of a file in --" + flagConfigDir, binding: label(&o.Label)},
		{Flag: "default-config", Usage: "name of the file for a node without the label; empty: --fallback-strategies",
			binding: orEmpty(&o.Default, matching(&o.Default, schema.Match(`^[-A-Za-z0-9_.]+$`, "a name"), "want the name of a file"))},
		{Flag: "fallback-strategies", Default: namedFallback + "," + singleFallback, Empty: true,
			Usage: "which file applies to a node without the label if --default-config is empty, the first of these that there is: named: " + namedConfig + "; single: the only one; empty: none",
			binding: binding{Type: commaList(schema.OneOf(namedFallback, singleFallback, emptyFallback)), setItem: func(item string) error {
				if !slices.Contains([]string{namedFallback, singleFallback, emptyFallback}, item) {
					return errors.New("want named, single or empty")
				}
				o.Fallbacks = append(o.Fallbacks, item)
				return nil
			}}},
		{Flag: "pause-label", Usage: "label of the node with which the GPU Operator announces that it changes the driver or the MIG layout, such as " + DefaultPauseLabel + ": while its value has paused-for-, the driver is released as by quiesce; empty: none",
			Note:    "See [operations](operations.md#gpu-operator). Takes `node-name`, and the verbs `get` and `watch` on nodes",
			binding: orEmpty(&s.PauseLabel, label(&s.PauseLabel))},
	}
}

// ReadsNode reports whether labels of the Node are settings.
func (s Kubernetes) ReadsNode() bool { return s.ByLabel.Dir != "" || s.PauseLabel != "" }

// NoConfigError means that the label of a node, or the default, names no configuration.
type NoConfigError struct {
	Label, Value string   // Value "" = the node does not have the label
	Dir          string   // that was searched
	Name         string   // that it does not have; "" = neither a default nor a fallback names a file
	Names        []string // that it has, sorted
}

// Error has label, value and remedy.
func (e *NoConfigError) Error() string {
	have := "which has no file"
	if len(e.Names) > 0 {
		have = "which has " + strings.Join(e.Names, ", ")
	}
	switch {
	case e.Value != "":
		return fmt.Sprintf("node label %s = %q: there is no such configuration in %s, %s: set the label to one of them, or remove it for the default", e.Label, e.Value, e.Dir, have)
	case e.Name != "":
		return fmt.Sprintf("--default-config = %q: there is no such configuration in %s, %s: name one of them, or label the node with %s", e.Name, e.Dir, have, e.Label)
	}
	return fmt.Sprintf("the node has no label %s, --default-config is empty, and no strategy of --fallback-strategies finds a configuration in %s, %s: set one of these", e.Label, e.Dir, have)
}

// Choose returns the name of the file for a value of the label, by the rules of NVIDIA's config-manager; "" = none applies. A value that names no
// file is a *NoConfigError.
func (b ByLabel) Choose(value string) (string, error) {
	names, err := b.names()
	if err != nil {
		return "", fmt.Errorf("--%s: %w", flagConfigDir, err)
	}
	none := &NoConfigError{Label: b.Label, Value: value, Dir: b.Dir, Names: names}
	for _, name := range []string{value, b.Default} {
		if name == "" {
			continue
		}
		if !slices.Contains(names, name) {
			none.Name = name
			return "", none
		}
		return name, nil
	}
	for _, fallback := range b.Fallbacks {
		switch {
		case fallback == namedFallback && slices.Contains(names, namedConfig):
			return namedConfig, nil
		case fallback == singleFallback && len(names) == 1:
			return names[0], nil
		case fallback == emptyFallback:
			return "", nil
		}
	}
	return "", none
}

// path is that of a file; "" = none.
func (b ByLabel) path(name string) string {
	if name == "" {
		return ""
	}
	return filepath.Join(b.Dir, name)
}

// dataLink begins the names that a mounted ConfigMap has beside its keys.
var dataLink = regexp.MustCompile(`^\.\.`)

// names are those of the files, sorted.
func (b ByLabel) names() (names []string, err error) {
	entries, err := os.ReadDir(b.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if !e.IsDir() && !dataLink.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// checkNodeName reports a missing name of the Node whose labels are settings.
func (s Kubernetes) checkNodeName() error {
	if !s.ReadsNode() || s.DRA.Node != "" {
		return nil
	}
	return &setting.Error{Key: "--node-name", Remedy: "--" + flagConfigDir + " and --pause-label take the name of this node's Node object: --node-name, or NODE_NAME from the pod's spec.nodeName (fieldRef)"}
}

// ReadBeforeFile reads command line and environment alone: what decides which file is read.
func ReadBeforeFile(flags Flags, env Environment) (Kubernetes, error) {
	s, err := resolve(flags, env, File{})
	return s, errors.Join(err, s.checkNodeName())
}

// configFile is the configuration file: that of a flag or variable, or with ByLabel that of Environment.Config; "" = none.
func configFile(flags Flags, env Environment) (string, error) {
	file := lookup(Spec{Flag: FlagConfigFile, Env: configFileVariables}, flags, env, nil)
	dir := lookup(Spec{Flag: flagConfigDir, Env: []string{variable(flagConfigDir)}}, flags, env, nil)
	if dir.Text == "" {
		return file.Text, nil
	}
	if file.Text != "" {
		return "", &setting.Error{Key: file.Where, Value: file.Text, Remedy: "the configuration comes from " + dir.Where + ": remove one of them"}
	}
	return ByLabel{Dir: dir.Text}.path(env.Config), nil
}
