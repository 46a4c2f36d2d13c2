package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
)

// The file for a label, by the rules of NVIDIA's config-manager (cmd/config-manager/main.go, updateConfigName).
func TestChoose(t *testing.T) {
	for name, c := range map[string]struct {
		files, value, standard, fallbacks string
		want, problem                     string
	}{
		"the label":                       {files: "a default", value: "a", fallbacks: "named,single", want: "a"},
		"the label, before the default":   {files: "a b", value: "a", standard: "b", want: "a"},
		"no label, a default":             {files: "a b", standard: "b", fallbacks: "empty", want: "b"},
		"no label, named":                 {files: "a default", fallbacks: "named,single", want: "default"},
		"no label, single":                {files: "a", fallbacks: "named,single", want: "a"},
		"no label, empty":                 {files: "a b", fallbacks: "named,single,empty", want: ""},
		"empty before single":             {files: "a", fallbacks: "empty,single", want: ""},
		"a label that names none":         {files: "a b", value: "c", standard: "a", fallbacks: "empty", problem: `node label l = "c": there is no such configuration in DIR, which has a, b: set the label to one of them, or remove it for the default`},
		"a default that names none":       {files: "a b", standard: "c", fallbacks: "empty", problem: `--default-config = "c": there is no such configuration in DIR, which has a, b`},
		"no label and nothing to fall to": {files: "a b", fallbacks: "named,single", problem: "the node has no label l, --default-config is empty, and no strategy"},
		"no files":                        {value: "a", problem: "which has no file"},
	} {
		dir := t.TempDir()
		check.NoError(t, os.Mkdir(filepath.Join(dir, "..data"), 0o755)) // as in the mount of a ConfigMap
		for _, file := range append(strings.Fields(c.files), "..link") {
			check.NoError(t, os.WriteFile(filepath.Join(dir, file), nil, 0o644))
		}
		b := ByLabel{Dir: dir, Label: "l", Default: c.standard, Fallbacks: strings.FieldsFunc(c.fallbacks, func(r rune) bool { return r == ',' })}
		got, err := b.Choose(c.value)
		text := ""
		if err != nil {
			text = strings.ReplaceAll(err.Error(), dir, "DIR")
		}
		if got != c.want || (c.problem == "") != (err == nil) || !strings.Contains(text, c.problem) {
			t.Errorf("%s: %q, %q", name, got, text)
		}
	}
}

// What is read is the file that was chosen. The node's name is required, and one source of the configuration.
func TestReadByLabel(t *testing.T) {
	dir := t.TempDir()
	check.NoError(t, os.WriteFile(filepath.Join(dir, "mixed"), []byte("version: v1\nflags: {migStrategy: mixed}\n"), 0o644))
	read := func(name string, more ...string) (Kubernetes, error) {
		variables := map[string]string{"CONFIG_FILE_SRCDIR": dir, "NODE_NAME": "n1"}
		for _, m := range more {
			key, value, _ := strings.Cut(m, "=")
			variables[key] = value
		}
		env := Environment{Config: name, CheckAddress: func(string) error { return nil }, LookupEnv: func(key string) (string, bool) {
			value, ok := variables[key]
			return value, ok
		}}
		return ReadKubernetes(NewFlags(KubernetesSpecs()), env)
	}
	if s, err := read("mixed"); err != nil || s.Core.MIG != "mixed" || s.ByLabel.Label != DefaultConfigLabel {
		t.Errorf("%+v, %v", s.ByLabel, err)
	}
	if s, err := read("mixed", "NODE_LABEL=nvidia.com/dra-driver-gpu.config"); err != nil || s.Core.MIG != "mixed" || s.ByLabel.Label != "nvidia.com/dra-driver-gpu.config" {
		t.Errorf("the label of NVIDIA's DRA driver: %+v, %v", s.ByLabel, err)
	}
	if s, err := read(""); err != nil || s.Core.MIG != "none" {
		t.Errorf("without a file: %v, %v", s.Core.MIG, err)
	}
	for name, c := range map[string][]string{
		"node-name":          {"NODE_NAME="},
		"remove one of them": {"CONFIG_FILE=/c.yaml"},
		"want a key of a label such as nvidia.com/device-plugin.config": {"NODE_LABEL=a b"},
		"want named, single or empty":                                   {"FALLBACK_STRATEGIES=named,first"},
		"--namespace, or NAMESPACE":                                     {"GFD_USE_NODE_FEATURE_API=true"},
		"takes --features-file or --use-node-feature-api":               {"GFD_ONESHOT=true"},
	} {
		if _, err := read("mixed", c...); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v: %v, want %s", c, err, name)
		}
	}
}
