package nvidia

import (
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
)

// chartValue is a value of NVIDIA's chart that its templates pass to the plugin.
type chartValue struct {
	key, flag string
	isBool    bool // the templates pass a bool only; otherwise a string only
}

// chartValues are those of chart 0.20 (templates/daemonset-device-plugin.yml).
var chartValues = []chartValue{
	{"migStrategy", "mig-strategy", false},
	{"failOnInitError", "fail-on-init-error", true},
	{"compatWithCPUManager", "pass-device-specs", true},
	{"deviceListStrategy", "device-list-strategy", false},
	{"deviceIDStrategy", "device-id-strategy", false},
	{"nvidiaDriverRoot", "driver-root", false},
	{"nvidiaDevRoot", "dev-root", false},
	{"gdrcopyEnabled", "gdrcopy-enabled", true},
	{"gdsEnabled", "gds-enabled", true},
	{"mofedEnabled", "mofed-enabled", true},
	{"deviceDiscoveryStrategy", "device-discovery-strategy", false},
	{"mps.root", "mps-root", false},
	{"cdi.nvidiaHookPath", "nvidia-cdi-hook-path", false},
	{"cdi.featureFlags", "cdi-feature-flags", false},
}

// field is a key that is no option of the plugin: what it is, and what to do.
type field struct {
	keys         []string
	effect       importer.Effect
	text, remedy string
}

// sameName is the remedy for a value of NVIDIA's chart that the chart of k8s-gpu has, too.
const sameName = "give it to the chart tandem-k8s-gpu, which has a value of this name"

// chartFields are the values of NVIDIA's chart that are no options, with their keys in chart 0.20 (values.yaml).
var chartFields = []field{
	{[]string{
		"nameOverride", "fullnameOverride", "namespaceOverride", "selectorLabelsOverride", "allowDefaultNamespace", "imagePullSecrets", "updateStrategy",
		"podAnnotations", "podSecurityContext", "securityContext", "resources", "nodeSelector", "affinity", "tolerations", "priorityClassName",
		"runtimeClassName", "config.fallbackStrategies", "mps.enableHostPID", "mps.enableHostNetwork", "gfd.noTimestamp", "noTimestamp",
	}, importer.Needed, "it is of the chart's objects, not of the plugin", sameName},
	{[]string{"image"}, importer.NoEffect, "it is the image of NVIDIA's plugin", ""},
	{[]string{"componentSelectorLabels", "devicePlugin.enableHostNetwork"}, importer.NoEffect, "it is of the objects of NVIDIA's chart", ""},
	{[]string{
		"gfd.nameOverride", "gfd.namespaceOverride", "gfd.sleepInterval", "sleepInterval", "gfd.securityContext", "gfd.enableHostNetwork",
	}, importer.NoEffect, "it is of gpu-feature-discovery, which k8s-gpu does not start", ""},
	{[]string{"nfd"}, importer.NoEffect, "it is of Node Feature Discovery, which NVIDIA's chart installs and that of k8s-gpu does not",
		"install its own chart with these values if node labels are read by others"},
}

// readFields adds the notes about the fields of v.
func (s *source) readFields(v *node, prefix string, fields []field) {
	for _, f := range fields {
		for _, key := range f.keys {
			s.rest(f.effect, v.find(key), prefix+key, f.text, f.remedy)
		}
	}
}

// readValues reads values of NVIDIA's chart. prefix is the key that has them: "spec.values.".
func (s *source) readValues(v *node, prefix string) {
	s.readEnabled(v, prefix, "these values install no device plugin")
	for _, c := range chartValues {
		value := v.get(c.key)
		switch {
		case value == nil, !value.given() && !value.isBool():
			s.take(v.find(c.key))
		case c.isBool && value.isBool() || !c.isBool && value.isString():
			s.option(c.flag, value, prefix+c.key)
		default:
			kind := "a string"
			if c.isBool {
				kind = "a bool"
			}
			s.note(importer.Differs, value, prefix+c.key, value.brief()+" left out: the chart's templates drop a value that is not "+kind,
				"put it into the file if it was meant")
		}
	}
	s.readEnv(v.get("devicePlugin.containers.main.env"))
	s.readConfigs(v.get("config"), prefix+"config.map")
	s.readGFD(v, prefix)
	s.readFields(v, prefix, chartFields)
	s.rest(importer.Unknown, v, strings.TrimSuffix(prefix, "."), "NVIDIA's chart has no such value", "")
}

// readEnabled reads whether values install the plugin.
func (s *source) readEnabled(v *node, prefix, text string) {
	on := v.find("devicePlugin.enabled")
	s.take(on)
	if on.text() == "false" {
		s.off = true
		s.note(importer.NoEffect, on, prefix+"devicePlugin.enabled", text, "")
	}
}

// readGFD reads whether values install gpu-feature-discovery.
func (s *source) readGFD(v *node, prefix string) {
	on := v.find("gfd.enabled")
	s.take(on)
	if on.text() == "true" {
		s.noteLabels(on, prefix+"gfd.enabled")
	}
}

// option adds an option that a value has.
func (s *source) option(flag string, value *node, key string) {
	s.take(value)
	s.options = append(s.options, option{flag, value.text(), s.at(value, key)})
}

// readConfigs reads named configurations, and which of them is the default.
func (s *source) readConfigs(c *node, mapKey string) {
	key := mapKey[strings.LastIndex(mapKey, ".")+1:]
	configs := c.find(key)
	if !configs.given() {
		s.take(configs)
	}
	for _, name := range configs.keys() {
		text := configs.value(name)
		if s.addText(name, mapKey+"."+name, text) {
			continue
		}
		s.note(importer.Differs, text, mapKey+"."+name, "left out: it is no configuration of the plugin", "")
	}
	s.take(c.find("default"), c.find("name"))
	s.byDefault = c.get("default").text()
	names := []string{}
	for _, f := range s.configs {
		names = append(names, f.name)
	}
	switch {
	case s.byDefault != "":
	case slices.Contains(names, "default"):
		s.byDefault = "default"
	case len(names) == 1:
		s.byDefault = names[0]
	}
	if len(names) > 1 {
		s.noteLabelledConfigs(s.at(c, mapKey))
	}
	if name := c.get("name"); name.given() && len(names) == 0 {
		s.note(importer.Needed, name, strings.TrimSuffix(mapKey, key)+"name", "the configurations in ConfigMap "+name.text()+" are not in the input",
			"import them as well: kubectl get configmap "+name.text()+" -o yaml")
	}
}

// isOperator reports whether values are those of the GPU operator's chart.
func isOperator(v *node) bool {
	for _, key := range []string{"operator", "driver", "toolkit", "dcgmExporter", "dcgm", "migManager", "validator", "mig", "clusterPolicy"} {
		if v.get(key) != nil {
			return true
		}
	}
	p := v.get("devicePlugin")
	return p.get("config") != nil || p.get("env") != nil || p.get("args") != nil || p.get("repository") != nil
}

// operatorFields are the values of the GPU operator's chart, and fields of its ClusterPolicy, that are no options of the plugin (chart 25.10).
var operatorFields = []field{
	{[]string{
		"devicePlugin.repository", "devicePlugin.image", "devicePlugin.version", "devicePlugin.imagePullPolicy", "devicePlugin.imagePullSecrets",
	}, importer.NoEffect, "it is the image of NVIDIA's plugin", ""},
	{[]string{"devicePlugin.resources", "daemonsets.tolerations", "daemonsets.priorityClassName"}, importer.Needed, "it is of the plugin's DaemonSet",
		"give it to the chart tandem-k8s-gpu (resources, tolerations, priorityClassName) if nodes need it"},
	{[]string{
		"cdi", "hostPaths", "sandboxWorkloads", "platform", "nfd", "psa", "psp", "operator", "mig", "driver", "toolkit", "dcgm", "dcgmExporter", "gfd",
		"migManager", "nodeStatusExporter", "gds", "gdrcopy", "vgpuManager", "vgpuDeviceManager", "vfioManager", "kataManager", "sandboxDevicePlugin",
		"kataSandboxDevicePlugin", "ccManager", "validator", "daemonsets", "node-feature-discovery", "devicePlugin.mps", "clusterPolicy", "fabricManager",
	}, importer.NoEffect, "it is of another part of the GPU operator, which stays as it is", ""},
}

// readOperator reads values of the GPU operator or its ClusterPolicy, whose fields are the same. prefix is the key that has them: "spec.".
func (s *source) readOperator(v *node, prefix string) {
	p := v.get("devicePlugin")
	s.readEnabled(v, prefix, "the operator runs no device plugin")
	// What the operator's own DaemonSet has (assets/state-device-plugin), and the default of mig.strategy.
	own := s.path + ": the operator's default"
	s.options = append(s.options, option{"pass-device-specs", "true", own})
	if strategy := v.get("mig.strategy"); strategy.given() {
		s.option("mig-strategy", strategy, prefix+"mig.strategy")
	} else {
		s.options = append(s.options, option{"mig-strategy", "single", own})
	}
	s.readEnv(p.get("env"))
	s.readFlags(wordsOf(p.get("args")), p.get("args"), prefix+"devicePlugin.args")
	if mps := p.get("mps.root"); mps.given() {
		s.option("mps-root", mps, prefix+"devicePlugin.mps.root")
	}
	s.readConfigs(p.get("config"), prefix+"devicePlugin.config.data")
	s.take(p.find("config.create"))
	if on := v.get("cdi.enabled"); on.text() == "true" {
		s.note(importer.Differs, on, prefix+"cdi.enabled", "which strategies the operator sets then depends on its version",
			"see DEVICE_LIST_STRATEGY in its DaemonSet (kubectl get daemonset nvidia-device-plugin-daemonset -o yaml), or let k8s-gpu choose: deviceListStrategy: auto")
	}
	s.readGFD(v, prefix)
	s.readDriver(v, prefix)
	s.notes.Add(importer.Needed, s.at(p, prefix+"devicePlugin"), "the operator installs its device plugin again as long as it is enabled", "set devicePlugin.enabled=false (docs/migration.md)")
	s.readFields(v, prefix, operatorFields)
	s.rest(importer.Unknown, v, strings.TrimSuffix(prefix, "."), "the GPU operator's chart has no such value", "")
}

// readDriver reads where the operator has the driver.
func (s *source) readDriver(v *node, prefix string) {
	own := v.find("driver.enabled")
	s.take(own)
	if root := v.get("hostPaths.driverInstallDir"); root.given() {
		s.option("driver-root", root, prefix+"hostPaths.driverInstallDir")
	} else if own.text() != "false" {
		s.notes.Add(importer.Needed, s.at(v.get("driver"), prefix+"driver"), "the operator's driver container has the driver at /run/nvidia/driver on the host",
			"apply the component deploy/driver-container, unless the driver is installed on the host")
	}
}
