package nvidia

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/schema"
)

// builder makes one file of k8s-gpu.
type builder struct {
	source *source
	config fileText
	root   *node
	notes  importer.Notes
	places map[string]string // by key of the result: where the input has it
	flags  []option          // of k8s-gpu, for what no key of the file has
	env    map[string]string // the same: variables
}

func newBuilder(s *source, c fileText) *builder {
	b := &builder{source: s, config: c, root: c.root, places: map[string]string{}, env: map[string]string{}}
	if b.root.mapping() == nil {
		b.root = &node{Kind: yaml.MappingNode, Tag: "!!map"}
	}
	if b.root.get("version") == nil {
		version := []*yaml.Node{{Kind: yaml.ScalarNode, Tag: "!!str", Value: "version"}, scalar("v1")}
		b.source.take(b.root.value("version")) // null
		b.root.remove("version")
		b.root.Content = slices.Concat(version, b.root.Content)
	}
	return b
}

// at is the place of a key in the input.
func (b *builder) at(n *yaml.Node, key string) string {
	return fmt.Sprintf("%s:%d: %s", b.config.file(), n.Line, key)
}

// file is the path of the file that has the configuration.
func (c fileText) file() string {
	file, _, _ := strings.Cut(c.where, ":")
	return file
}

func (b *builder) build() {
	b.clean()
	for _, o := range b.source.options {
		b.apply(o)
	}
	b.finish()
}

// apply sets an option that is given beside the file.
func (b *builder) apply(o option) {
	switch o.flag {
	case "DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS":
		b.env[o.flag], b.places[o.flag] = o.text, o.where
		return
	case failOnInitError:
		b.withoutInitError(o.where)
		return
	}
	spec, ok := specOf(o.flag)
	if !ok {
		return
	}
	if spec.Key == "" {
		b.flags = slices.DeleteFunc(b.flags, func(other option) bool { return other.flag == o.flag })
		if o.text != spec.Default {
			b.flags = append(b.flags, o)
		}
		return
	}
	if b.root.get(spec.Key) == nil && isDefault(spec, o.text) {
		return
	}
	value := scalar(o.text)
	if items := strings.Split(o.text, ","); spec.Kind == schema.List && (len(items) > 1 || spec.Key == "imex.channelIDs") {
		for i := range items {
			items[i] = strings.TrimSpace(items[i])
		}
		value = list(items)
	}
	comment := "from " + o.where
	if before := b.root.get(spec.Key); before != nil && before.brief() != (*node)(value).brief() {
		comment += ", in place of " + before.brief()
	}
	b.leave(b.root.get(spec.Key))
	value.LineComment = "# " + comment
	b.root.put(spec.Key, value)
	b.places[spec.Key] = o.where
}

// isDefault reports whether an option has its default, in which case no key is needed.
func isDefault(s config.Spec, text string) bool {
	return text == s.Default || text == "" && !s.Empty || s.Kind == schema.Bool && strings.EqualFold(text, s.Default)
}

// specOf is the option of k8s-gpu for a flag of NVIDIA's plugin.
func specOf(flag string) (config.Spec, bool) {
	if !slices.Contains(flags, flag) {
		return config.Spec{}, false
	}
	for _, s := range config.KubernetesSpecs() {
		if s.Flag == flag || slices.Contains(s.Aliases, flag) {
			return s, true
		}
	}
	return config.Spec{}, false
}

// flags are those of NVIDIA's plugin 0.20.0 (cmd/nvidia-device-plugin/main.go) that k8s-gpu has, too: all but config-file.
var flags = []string{
	"mig-strategy", "fail-on-init-error", "driver-root", "nvidia-driver-root", "dev-root", "nvidia-dev-root", "pass-device-specs",
	"device-list-strategy", "device-id-strategy", "gdrcopy-enabled", "gds-enabled", "mofed-enabled", "cdi-annotation-prefix",
	"nvidia-cdi-hook-path", "nvidia-ctk-path", "driver-root-ctr-path", "container-driver-root", "mps-root",
	"shared-devices-allocation-policy", "device-discovery-strategy", "imex-channel-ids", "imex-required", "kubelet-socket",
	"cdi-feature-flags", "cdi-disable-hooks",
}

// finish adds what the result needs, and adds a note about each difference.
func (b *builder) finish() {
	mps := b.root.get("sharing.mps") != nil
	switch root := b.root.get("flags.mpsRoot"); {
	case mps && root == nil:
		value := scalar("/run/nvidia/mps")
		value.LineComment = "# added: sharing.mps needs it, and NVIDIA's chart sets it"
		b.root.put("flags.mpsRoot", value)
	case !mps && root != nil:
		b.leave(root)
		b.root.mappingAt("flags").remove("mpsRoot") // it has no effect without MPS in either plugin
		b.dropEmpty("flags")
	}
	if mps {
		b.notes.Add(importer.Needed, b.config.where, "MPS needs a control daemon for each pool, which k8s-gpu mps-daemon runs",
			"use the Helm chart, or apply the component deploy/mps; drain the nodes first, since NVIDIA's daemons end with their DaemonSet")
	}
	strategy := b.root.get("flags.plugin.deviceListStrategy").brief()
	if strings.Contains(strategy, "cdi-") {
		b.notes.Add(importer.Needed, cmp.Or(b.places["flags.plugin.deviceListStrategy"], b.config.where),
			"a device takes work only while the CDI specification on disk defines it", "mount /var/run/cdi as deploy/daemonset.yaml does")
		noteMemoryLimits(&b.notes, cmp.Or(b.places["flags.plugin.deviceListStrategy"], b.config.where))
	}
	if migStrategy := b.root.get("flags.migStrategy").text(); migStrategy == "single" || migStrategy == "mixed" {
		b.notes.Add(importer.Needed, cmp.Or(b.places["flags.migStrategy"], b.config.where), "NVIDIA's container runtime shows MIG instances to a container with SYS_ADMIN only",
			"apply the component deploy/mig")
	}
	if root := b.root.get("flags.nvidiaDriverRoot").text(); root != "" && root != "/" {
		b.notes.Add(importer.Needed, cmp.Or(b.places["flags.nvidiaDriverRoot"], b.config.where), "k8s-gpu looks for the driver where "+root+" is mounted",
			"mount it as the component deploy/driver-container does")
	}
	for _, o := range b.flags {
		b.notes.Add(importer.Needed, o.where, "no key of the file has it", fmt.Sprintf("give k8s-gpu the argument --%s=%s", o.flag, o.text))
	}
	for _, name := range []string{"DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"} {
		if text, ok := b.env[name]; ok {
			b.notes.Add(importer.Needed, b.places[name], "no key of the file has it", fmt.Sprintf("give k8s-gpu the variable %s=%s, which has the same meaning", name, text))
		}
	}
}

// mappingAt is the mapping at a path; an empty one if there is none.
func (n *node) mappingAt(path string) *node {
	if m := n.get(path).mapping(); m != nil {
		return m
	}
	return &node{Kind: yaml.MappingNode}
}

// leave records that a value of the file is not in the result: another one replaces it, and a comment shows that, or it sets nothing.
func (b *builder) leave(n *node) {
	if n != nil {
		b.source.set(n, importer.NoEffect)
	}
}

// dropEmpty removes the mapping at a key of the root if it is empty.
func (b *builder) dropEmpty(key string) {
	if m := b.root.get(key); m != nil && m.Kind == yaml.MappingNode && len(m.Content) == 0 {
		b.leave(m)
		b.root.remove(key)
	}
}

// result is the text of the file, and its problems.
func (b *builder) result() (text []byte, problems []string) {
	var out bytes.Buffer
	title := "Imported from " + b.config.where + ": " + b.source.kind + "."
	out.WriteString(importer.Header(title, slices.Concat(b.notes, b.source.notes)))
	e := yaml.NewEncoder(&out)
	e.SetIndent(2)
	if err := e.Encode((*yaml.Node)(b.root)); err != nil {
		return nil, []string{b.config.where + ": " + err.Error()}
	}
	_ = e.Close()
	return out.Bytes(), b.check(out.Bytes())
}
