package nvidia

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
)

// clean changes the file so that it has here the effect that it has for NVIDIA's plugin. That one reads keys without regard to case, and
// ignores what it does not use, some of it with a line in its log.
func (b *builder) clean() {
	b.readKeys(b.root, "", knownKeys())
	b.cleanFlags(b.root.mappingAt("flags"))
	b.dropEmpty("flags")
	if resources := b.root.get("resources"); resources != nil {
		b.drop(importer.Differs, b.root, "resources", "resources", "NVIDIA's plugin ignores this section: it offers every full GPU as nvidia.com/gpu and MIG instances by strategy and profile",
			"put it back to give devices the names that it has; here it has an effect")
	}
	b.cleanSharing(b.root.mappingAt("sharing"))
	b.dropEmpty("sharing")
	b.recordPlaces((*yaml.Node)(b.root), "")
}

// knownKeys are the keys of k8s-gpu's file that readKeys knows; a nil value: whatever is below is kept.
func knownKeys() map[string][]string {
	children := map[string][]string{
		"":        {"version", "resources", "sharing", "policy"},
		"sharing": {"timeSlicing", "mps"},
	}
	shares := []string{"renameByDefault", "failRequestsGreaterThanOne", "resources"}
	children["sharing.timeSlicing"], children["sharing.mps"] = shares, shares
	item := []string{"name", "replicas", "rename", "devices"}
	children["sharing.timeSlicing.resources[]"], children["sharing.mps.resources[]"] = item, item
	for _, s := range config.KubernetesSpecs() {
		if s.Key == "" {
			continue
		}
		parts := strings.Split(s.Key, ".")
		for i := range parts {
			parent := strings.Join(parts[:i], ".")
			if !slices.Contains(children[parent], parts[i]) {
				children[parent] = append(children[parent], parts[i])
			}
		}
	}
	return children
}

// readKeys gives keys the spelling of the file, and drops those that neither plugin reads.
func (b *builder) readKeys(n *node, path string, known map[string][]string) {
	names, isParent := known[path]
	if !isParent {
		return
	}
	for _, item := range n.items() {
		b.readKeys(item, path, known)
	}
	if n.mapping() == nil {
		return
	}
	for _, key := range n.keys() {
		full := strings.TrimPrefix(path+"."+key, ".")
		i := slices.IndexFunc(names, func(name string) bool { return strings.EqualFold(name, key) })
		if i < 0 {
			b.drop(importer.Unknown, n, key, full, "NVIDIA's plugin does not read this key", "")
			continue
		}
		if names[i] != key {
			b.rename(n, key, names[i], full)
			full = strings.TrimPrefix(path+"."+names[i], ".")
		}
		child := n.get(names[i])
		below := full
		if child.sequence() != nil {
			below += "[]"
		}
		b.readKeys(child, below, known)
	}
}

// rename gives a key another name. If the mapping has that, too, the other one is dropped.
func (b *builder) rename(n *node, key, name, full string) {
	if n.get(name) != nil {
		b.drop(importer.Differs, n, key, full, "given twice: NVIDIA's plugin reads keys without regard to case", "check which of the values holds")
		return
	}
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			n.Content[i].Value = name
			comment(n.Content[i+1], fmt.Sprintf("was %s: NVIDIA's plugin reads keys without regard to case", key))
		}
	}
}

// comment adds a comment to the line of a value, if it is a scalar; a mapping and a list begin after theirs.
func comment(value *yaml.Node, text string) {
	if value.LineComment != "" {
		text = strings.TrimPrefix(value.LineComment, "# ") + "; " + text
	}
	if value.Kind == yaml.ScalarNode || value.Style == yaml.FlowStyle {
		value.LineComment = "# " + text
	}
}

// maxComment is the length of a comment to which no other is added.
const maxComment = 200

// drop removes a key, and notes it: above the file, and at a line beside it if there is one.
func (b *builder) drop(effect importer.Effect, n *node, key, full, why, remedy string) {
	var value *yaml.Node
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			value = n.Content[i+1]
			b.source.set((*node)(value), effect)
			b.notes.Add(effect, b.at(n.Content[i], full), fmt.Sprintf("%s left out: %s", (*node)(value).brief(), why), remedy)
		}
	}
	n.remove(key)
	for i := 1; value != nil && i < len(n.Content); i += 2 {
		if n.Content[i].Kind == yaml.ScalarNode {
			if len(n.Content[i].LineComment) > maxComment {
				return
			}
			comment(n.Content[i], fmt.Sprintf("%s: %s left out, see above", key, (*node)(value).brief()))
			return
		}
	}
}

// cleanFlags drops the flags that have no effect here.
func (b *builder) cleanFlags(flags *node) {
	if v := flags.get("failOnInitError"); v != nil {
		b.withoutInitError(b.at((*yaml.Node)(v), "flags.failOnInitError"))
		b.source.set(v, importer.NoEffect)
		flags.remove("failOnInitError")
	}
	for _, key := range []string{"gfd", "useNodeFeatureAPI"} {
		if flags.get(key) != nil {
			b.drop(importer.NoEffect, flags, key, "flags."+key, "it is read by GPU feature discovery only", "")
			b.notes.Add(importer.Needed, b.config.where, labelsNeeded, labelsRemedy)
		}
	}
	plugin := flags.get("plugin")
	if plugin != nil && plugin.Kind == yaml.MappingNode && len(plugin.Content) == 0 {
		b.leave(plugin)
		flags.remove("plugin")
	}
}

func (b *builder) withoutInitError(where string) {
	b.notes.Add(importer.NoEffect, where, waitsForDriver, "")
}

const (
	failOnInitError = "fail-on-init-error"
	waitsForDriver  = "left out: without a driver k8s-gpu waits for one, offers nothing meanwhile, and /readyz and inspect have the reason"
)

// cleanSharing drops what NVIDIA's plugin does not do (api/config/v1/config.go, DisableResourceNamingInConfig; sharing.go).
func (b *builder) cleanSharing(sharing *node) {
	if sharing.get("mps") != nil && sharing.get("timeSlicing") != nil {
		b.drop(importer.Differs, sharing, "timeSlicing", "sharing.timeSlicing", "NVIDIA's plugin ignores it beside sharing.mps", "put it back to share its resources, too; here both have an effect")
	}
	if mps := sharing.get("mps"); mps.get("failRequestsGreaterThanOne").text() == "false" {
		b.drop(importer.NoEffect, mps, "failRequestsGreaterThanOne", "sharing.mps.failRequestsGreaterThanOne",
			"NVIDIA's plugin ignores it: a request for two shares by MPS fails there, too", "")
	}
	for _, mode := range sharing.keys() {
		for i, item := range sharing.get(mode).get("resources").items() {
			path := fmt.Sprintf("sharing.%s.resources[%d]", mode, i)
			if v := item.get("rename"); v != nil {
				b.drop(importer.Differs, item, "rename", path+".rename", "NVIDIA's plugin ignores it", "put it back to offer the shares under this name; here it has an effect")
			}
			if v := item.get("devices"); v != nil && v.text() != "all" {
				b.drop(importer.Differs, item, "devices", path+".devices", "NVIDIA's plugin ignores it and shares every device",
					"put it back, with a rename, to share only these devices; here it has an effect")
			}
		}
	}
}

// recordPlaces records where the input has each key.
func (b *builder) recordPlaces(n *yaml.Node, key string) {
	if n.Kind == yaml.MappingNode {
		for pair := range slices.Chunk(n.Content, 2) {
			full := strings.TrimPrefix(key+"."+pair[0].Value, ".")
			b.places[full] = b.at(pair[0], full)
			b.recordPlaces(pair[1], full)
		}
	}
	if n.Kind == yaml.SequenceNode {
		for i, item := range n.Content {
			full := fmt.Sprintf("%s[%d]", key, i)
			b.places[full] = b.at(item, full)
			b.recordPlaces(item, full)
		}
	}
}
