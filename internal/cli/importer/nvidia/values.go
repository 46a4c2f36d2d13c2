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

// deployment are the values of the chart that concern its objects, and not what the plugin does.
var deployment = []string{
	"affinity", "allowDefaultNamespace", "componentSelectorLabels", "devicePlugin", "fullnameOverride", "image", "imagePullSecrets",
	"mps", "nameOverride", "namespaceOverride", "nfd", "nodeSelector", "podAnnotations", "podSecurityContext", "priorityClassName", "resources",
	"runtimeClassName", "securityContext", "selectorLabelsOverride", "tolerations", "updateStrategy",
}

// readValues reads values of NVIDIA's chart.
func (s *source) readValues(v *node) {
	if on := v.get("devicePlugin.enabled"); on != nil && on.text() == "false" {
		s.off = true
		s.notes.Add(importer.NoEffect, s.at(on, "devicePlugin.enabled"), "these values install no device plugin", "")
	}
	for _, c := range chartValues {
		value := v.get(c.key)
		switch {
		case value == nil, !value.given() && !value.isBool():
		case c.isBool && value.isBool() || !c.isBool && value.isString():
			s.options = append(s.options, option{c.flag, value.text(), s.at(value, c.key)})
		default:
			kind := "a string"
			if c.isBool {
				kind = "a bool"
			}
			s.notes.Add(importer.Differs, s.at(value, c.key), value.brief()+" left out: the chart's templates drop a value that is not "+kind,
				"put it into the file if it was meant")
		}
	}
	s.readEnv(v.get("devicePlugin.containers.main.env"))
	s.readConfigs(v.get("config"), "config.map")
	if gfd := v.get("gfd.enabled"); gfd.text() == "true" {
		noteLabels(&s.notes, s.at(gfd, "gfd.enabled"))
	}
	s.noteOthers(v)
}

// readConfigs reads named configurations, and which of them is the default.
func (s *source) readConfigs(c *node, mapKey string) {
	key := mapKey[strings.LastIndex(mapKey, ".")+1:]
	for _, name := range c.mappingAt(key).keys() {
		text := c.mappingAt(key).value(name)
		if s.addText(name, mapKey+"."+name, text) {
			continue
		}
		s.notes.Add(importer.Differs, s.at(text, mapKey+"."+name), "left out: it is no configuration of the plugin", "")
	}
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
		s.notes.Add(importer.Needed, s.at(name, strings.TrimSuffix(mapKey, key)+"name"), "the configurations in ConfigMap "+name.text()+" are not in the input",
			"import them as well: kubectl get configmap "+name.text()+" -o yaml")
	}
}

// noteOthers notes what is no option of the plugin: the fields of the chart's objects in one line, others one by one.
func (s *source) noteOthers(v *node) {
	var fields []string
	var first *node
	for _, key := range v.keys() {
		value := v.get(key)
		isOption := slices.ContainsFunc(chartValues, func(c chartValue) bool { return strings.Split(c.key, ".")[0] == key })
		switch {
		case slices.Contains(deployment, key):
			if value.given() && !slices.Contains([]string{"devicePlugin", "mps"}, key) {
				fields = append(fields, key)
				if first == nil {
					first = value
				}
			}
		case isOption, key == "config", key == "gfd", !value.given():
		default:
			s.notes.Add(importer.NoEffect, s.at(value, key), "left out: NVIDIA's chart has no such value", "")
		}
	}
	if fields != nil {
		s.notes.Add(importer.NoEffect, s.at(first, strings.Join(fields, ", ")), "of the chart's objects, not of the plugin; those of k8s-gpu are in deploy", "")
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

// readOperator reads values of the GPU operator or, below "spec.", its ClusterPolicy, whose fields are the same.
func (s *source) readOperator(v *node, prefix string) {
	p := v.get("devicePlugin")
	if on := p.get("enabled"); on.text() == "false" {
		s.off = true
		s.notes.Add(importer.NoEffect, s.at(on, prefix+"devicePlugin.enabled"), "the operator runs no device plugin", "")
	}
	// What the operator's own DaemonSet has (assets/state-device-plugin), and the default of mig.strategy.
	own := s.path + ": the operator's default"
	s.options = append(s.options, option{"pass-device-specs", "true", own})
	if strategy := v.get("mig.strategy"); strategy.given() {
		s.options = append(s.options, option{"mig-strategy", strategy.text(), s.at(strategy, prefix+"mig.strategy")})
	} else {
		s.options = append(s.options, option{"mig-strategy", "single", own})
	}
	s.readEnv(p.get("env"))
	s.readFlags(wordsOf(p.get("args")), s.at(p.get("args"), prefix+"devicePlugin.args"))
	if mps := p.get("mps.root"); mps.given() {
		s.options = append(s.options, option{"mps-root", mps.text(), s.at(mps, prefix+"devicePlugin.mps.root")})
	}
	s.readConfigs(p.get("config"), prefix+"devicePlugin.config.data")
	if on := v.get("cdi.enabled"); on.text() == "true" {
		s.notes.Add(importer.Differs, s.at(on, prefix+"cdi.enabled"), "which strategies the operator sets then depends on its version",
			"see DEVICE_LIST_STRATEGY in its DaemonSet (kubectl get daemonset nvidia-device-plugin-daemonset -o yaml), or let k8s-gpu choose: deviceListStrategy: auto")
	}
	if root := v.get("hostPaths.driverInstallDir"); root.given() {
		s.options = append(s.options, option{"driver-root", root.text(), s.at(root, prefix+"hostPaths.driverInstallDir")})
	} else if v.get("driver.enabled").text() != "false" {
		s.notes.Add(importer.Needed, s.at(v.get("driver"), prefix+"driver"), "the operator's driver container has the driver at /run/nvidia/driver on the host",
			"apply the component deploy/driver-container, unless the driver is installed on the host")
	}
	s.notes.Add(importer.Needed, s.at(p, prefix+"devicePlugin"), "the operator installs its device plugin again as long as it is enabled", "set devicePlugin.enabled=false (docs/migration.md)")
}
