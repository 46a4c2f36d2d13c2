package config

import (
	"io"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
)

// groups are the meanings of the keys that contain others, apart from those of package policy.
var groups = map[string]string{
	"dra":          "the API dra of k8s-gpu",
	"flags":        "options of the plugin",
	"handOver":     "the faults of GPUs in Kubernetes' API, by k8s-gpu",
	"flags.plugin": "how containers get devices",
	"health":       "health of the devices, and the node",
	"imex":         "IMEX channels",
}

// WriteFileSchema writes the JSON Schema of the configuration file, as k8s-gpu reads it; of nomad-gpu's policy file, too, which ignores the values
// of some keys.
func WriteFileSchema(w io.Writer) error {
	return schema.Write(w, "Configuration file of k8s-gpu, and policy file of nomad-gpu", schema.ObjectOf(fileKeys()...))
}

// fileKeys are the keys of the file, with all keys below them.
func fileKeys() []schema.Key {
	keys := []schema.Key{{Name: "version", Default: version, Type: schema.Type{Values: []string{version}, Blank: true}, Usage: "version of the format"}}
	for _, s := range KubernetesSpecs() {
		if s.Key != "" {
			keys = insert(keys, "", s)
		}
	}
	return append(keys, policy.Sections()...)
}

// insert adds an option below a prefix of its key: "" or "flags.".
func insert(keys []schema.Key, prefix string, s Spec) []schema.Key {
	name, _, isGroup := strings.Cut(strings.TrimPrefix(s.Key, prefix), ".")
	if !isGroup {
		return append(keys, s.fileKey(name))
	}
	group := prefix + name
	for i := range keys {
		if keys[i].Name == name {
			keys[i].Keys = insert(keys[i].Keys, group+".", s)
			return keys
		}
	}
	return append(keys, schema.Key{Name: name, Usage: groups[group], Type: schema.ObjectOf(insert(nil, group+".", s)...)})
}

// fileKey is the option as a key of the file. An empty scalar is as if it were not set.
func (s Spec) fileKey(name string) schema.Key {
	k := schema.Key{Name: name, Default: s.Default, Usage: s.meaning(), Type: s.Type}
	k.Blank = k.Blank || k.Kind == schema.Scalar
	return k
}

// meaning is Usage and Note.
func (s Spec) meaning() string {
	switch {
	case s.without != "":
		return "accepted and without effect: " + s.without
	case s.Note != "":
		return s.Usage + ". " + s.Note
	}
	return s.Usage
}
