package chart

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const (
	givenValues   = "../../internal/cli/importer/nvidia/testdata/" // values files of NVIDIA's documents, and of public repositories
	compatibility = "../../docs/compatibility.md"
)

// incumbent is NVIDIA's chart, which its Go module has. The module is that of the comparison of labels.
var incumbent = sync.OnceValues(func() (*chart.Chart, error) {
	download := exec.CommandContext(context.Background(), "go", "mod", "download", "-json", "github.com/NVIDIA/k8s-device-plugin")
	download.Dir = "../conformance/labels"
	download.Env = append(os.Environ(), "GOFLAGS=")
	out, err := download.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return nil, err
	}
	return loader.Load(filepath.Join(module.Dir, "deployments/helm/nvidia-device-plugin"))
})

// Both charts render each values file, this one without what it refuses by name. What it refuses, and what pods and labels have otherwise, is the table in
// docs/compatibility.md. The agent takes all that is rendered. "go test -update" writes the table.
func TestValuesOfNVIDIAsChart(t *testing.T) {
	var files []string
	for _, pattern := range []string{"examples/values-*.yaml", "public/*.yaml"} {
		found, err := filepath.Glob(givenValues + pattern)
		if err != nil || len(found) < 10 {
			t.Fatal(found, err)
		}
		files = append(files, found...)
	}
	usual := differences(factsOfNVIDIA(t, values{}), factsOf(t, values{}))
	var b strings.Builder
	b.WriteString("| values | has | refused here | differs here |\n|---|---|---|---|\n")
	fmt.Fprintf(&b, "| none: so with all of these | | | %s |\n", strings.Join(usual, "<br>"))
	for _, file := range files {
		b.WriteString(rowOf(t, file, usual))
	}
	text, err := os.ReadFile(compatibility)
	if err != nil {
		t.Fatal(err)
	}
	goldenfile.Compare(t, compatibility, replaceBlock(t, string(text), "values files of NVIDIA's chart", b.String()))
}

// sourceOf is where a values file is from, as its first line has it.
var sourceOf = regexp.MustCompile(`^# (?:The settings of )?(?:https://github.com/(NVIDIA/k8s-device-plugin)/blob/[^/]+/)?([^\s,:]+)`)

// notCompared are values files that NVIDIA's chart does not install, and why.
var notCompared = map[string]string{
	"values-shared-tutorial": "Kubernetes refuses what NVIDIA's chart makes of `nodeSelector`",
	"flux-operator":          "values of the GPU Operator's chart: see `import`",
}

// rowOf is the row of a values file.
func rowOf(t *testing.T, file string, usual []string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.TrimSuffix(filepath.Base(file), ".yaml")
	source := strings.TrimPrefix(strings.Join(sourceOf.FindStringSubmatch(string(text))[1:], "/"), "/")
	ours, refused := accepted(t, name, withImported(t, file, text))
	checkRendered(t, name, ours)
	if why := notCompared[name]; why != "" {
		return fmt.Sprintf("| %s (`%s`) | | %s | %s |\n", source, name, code(refused), why)
	}
	has := factsOfNVIDIA(t, valuesIn(t, string(text)))
	var own []string
	for _, d := range differences(has, factsOf(t, ours)) {
		if !slices.Contains(usual, d) {
			own = append(own, d)
		}
	}
	return fmt.Sprintf("| %s (`%s`) | %s | %s | %s |\n", source, name, contents(has), code(refused), strings.Join(own, "<br>"))
}

func code(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "`" + strings.Join(names, "`, `") + "`"
}

// valuesIn returns the values of the chart in a file: those of a release, or the file itself.
func valuesIn(t *testing.T, text string) values {
	t.Helper()
	for _, o := range documents(t, text) {
		spec, _ := o["spec"].(object)
		switch o["kind"] {
		case "HelmRelease":
			given, _ := spec["values"].(object)
			return given
		case "Application":
			return values{} // that of the file has none
		}
	}
	return parse(t, text)
}

// withImported returns the values of a file, with the configurations as import makes them.
func withImported(t *testing.T, file string, text []byte) values {
	t.Helper()
	given := valuesIn(t, string(text))
	r, err := nvidia.Import(nvidia.Input{Path: file, Text: text})
	if err != nil {
		t.Logf("%s: %v", file, err)
		return given
	}
	config, _ := given["config"].(object)
	configs, _ := config["map"].(object)
	for _, f := range r.Files {
		if _, has := configs[f.Name]; has {
			configs[f.Name] = string(f.Text)
		}
	}
	return given
}

// refusal is the value that a line of the chart's message names: by its path, or as an unknown one.
var refusal = regexp.MustCompile(`^- (?:([\w.]+): |at '([^']*)': (?:additional properties '([^']+)')?)`)

// accepted returns the values without those that the chart refuses, and the paths of these.
func accepted(t *testing.T, name string, given values) (rest values, refused []string) {
	t.Helper()
	rest = given
	for range 3 { // unknown names are refused before what the templates refuse
		_, err := render(t, rest)
		if err == nil {
			slices.Sort(refused)
			return rest, slices.Compact(refused)
		}
		for _, line := range problems(err) {
			m := refusal.FindStringSubmatch(line)
			if m == nil {
				t.Fatalf("%s: %s", name, line)
			}
			path := strings.Trim(strings.ReplaceAll(cmp.Or(m[1], m[2]), "/", ".")+"."+m[3], ".")
			refused = append(refused, path)
			remove(rest, strings.Split(path, "."))
		}
	}
	t.Fatalf("%s: still refused without %q", name, refused)
	return nil, nil
}

func remove(from values, path []string) {
	if in, is := from[path[0]].(values); is && len(path) > 1 {
		remove(in, path[1:])
		return
	}
	delete(from, path[0])
}

// checkRendered has the agent read what the values render to.
func checkRendered(t *testing.T, name string, given values) {
	t.Helper()
	all, configs := objects(t, given), map[string]map[string]string{}
	for _, o := range all {
		if o["kind"] == "ConfigMap" {
			c := strict[corev1.ConfigMap](t, o)
			configs[c.Name] = c.Data
		}
	}
	for _, d := range daemonSets(t, all) {
		checkAgent(t, name, d, configs)
	}
}

// facts are what a chart installs, in words that both charts have: by the name of a variable, of a field of the pod, or of a part.
type facts struct {
	of      map[string]string
	configs map[string]string // by name
}

// compared are the variables that both plugins read.
var compared = []string{
	"MIG_STRATEGY", "FAIL_ON_INIT_ERROR", "PASS_DEVICE_SPECS", "DEVICE_LIST_STRATEGY", "DEVICE_ID_STRATEGY", "NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT",
	"NVIDIA_CDI_HOOK_PATH", "CDI_FEATURE_FLAGS", "GDRCOPY_ENABLED", "GDS_ENABLED", "MOFED_ENABLED", "DEVICE_DISCOVERY_STRATEGY",
}

// addPod adds the facts of the pod of a plugin.
func (f facts) addPod(t *testing.T, pod corev1.PodSpec, c corev1.Container) {
	t.Helper()
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	for _, name := range compared {
		f.of[name] = env[name]
	}
	if pod.RuntimeClassName != nil {
		f.of["runtimeClassName"] = *pod.RuntimeClassName
	}
	f.of["priorityClassName"] = pod.PriorityClassName
	for name, v := range map[string]any{"nodeSelector": pod.NodeSelector, "resources": c.Resources, "tolerations": sorted(t, pod.Tolerations)} {
		f.of[name] = plain(t, v)
	}
	f.of["affinity"] = affinityOf(pod.Affinity)
	if s := c.SecurityContext; s != nil && s.Privileged != nil && *s.Privileged {
		f.of["privileged"] = "true"
	} else if s != nil && s.Capabilities != nil {
		for _, capability := range s.Capabilities.Add {
			f.of["capability "+string(capability)] = "added"
		}
	}
}

// affinityOf is the affinity of a pod to nodes: the keys of each term.
func affinityOf(a *corev1.Affinity) string {
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	var terms []string
	for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		var keys []string
		for _, e := range term.MatchExpressions {
			keys = append(keys, e.Key+" "+string(e.Operator)+" "+strings.Join(e.Values, ","))
		}
		terms = append(terms, strings.TrimSpace(strings.Join(keys, " and ")))
	}
	return strings.Join(terms, ", or ")
}

func sorted(t *testing.T, all []corev1.Toleration) []corev1.Toleration {
	t.Helper()
	return slices.SortedFunc(slices.Values(all), func(a, b corev1.Toleration) int { return cmp.Compare(plain(t, a), plain(t, b)) })
}

// plain is a value in one line of JSON; "" if it is empty.
func plain(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains([]string{"null", "{}", "[]"}, string(text)) {
		return ""
	}
	return string(text)
}

// factsOfNVIDIA are those of NVIDIA's chart.
func factsOfNVIDIA(t *testing.T, given values) facts {
	t.Helper()
	c, err := incumbent()
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.ToRenderValues(c, given, common.ReleaseOptions{Name: "nvdp", Namespace: "nvidia-device-plugin", IsInstall: true}, kubernetes(t, "v1.37.1"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(c, all)
	if err != nil {
		t.Fatal(err)
	}
	f := facts{of: map[string]string{"node labels": "none", "MPS daemons": "none", "device plugin": "none", "configuration": "none"}, configs: map[string]string{}}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasPrefix(name, "nvidia-device-plugin/templates/") { // others are those of Node Feature Discovery
			for _, o := range documents(t, files[name]) {
				f.addNVIDIAs(t, o)
			}
		}
	}
	if f.of["MPS daemons"] != "none" && !f.shares("mps") {
		f.of["MPS daemons"] = "none" // they wait for a label that no node has
	}
	return f
}

func (f facts) addNVIDIAs(t *testing.T, o object) {
	t.Helper()
	switch o["kind"] {
	case "ConfigMap":
		maps.Copy(f.configs, strict[corev1.ConfigMap](t, o).Data)
	case "DaemonSet":
		pod := strict[appsv1.DaemonSet](t, o).Spec.Template.Spec
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			env := environment(corev1.PodSpec{Containers: []corev1.Container{c}})
			switch c.Name {
			case "nvidia-device-plugin-ctr":
				f.of["device plugin"] = "a DaemonSet"
				f.addPod(t, pod, c)
			case "nvidia-device-plugin-sidecar":
				f.of["configuration"] = chosen(f.configs, env)
			case "gpu-feature-discovery-ctr":
				f.of["node labels"], f.of["GFD_NO_TIMESTAMP"] = "those of gpu-feature-discovery", env["GFD_NO_TIMESTAMP"]
			case "mps-control-daemon-ctr":
				i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "mps-root" })
				f.of["MPS daemons"] = "below " + pod.Volumes[i].HostPath.Path
			}
		}
	}
}

// factsOf are those of this chart.
func factsOf(t *testing.T, given values) facts {
	t.Helper()
	all := objects(t, given)
	f := facts{of: map[string]string{"node labels": "none", "MPS daemons": "none", "device plugin": "a DaemonSet"}, configs: map[string]string{}}
	for _, o := range all {
		if o["kind"] == "ConfigMap" {
			maps.Copy(f.configs, strict[corev1.ConfigMap](t, o).Data)
		}
	}
	agents, mps := bothDaemonSets(t, all)
	pod := agents[0].Spec.Template.Spec
	env := environment(pod)
	f.addPod(t, pod, pod.Containers[0])
	f.of["configuration"] = chosen(f.configs, env)
	if env["USE_NODE_FEATURE_API"] == "true" {
		f.of["node labels"], f.of["GFD_NO_TIMESTAMP"] = "those of gpu-feature-discovery", env["GFD_NO_TIMESTAMP"]
	}
	if len(mps) > 0 {
		f.of["MPS daemons"] = "below " + environment(mps[0].Spec.Template.Spec)["MPS_ROOT"]
	}
	return f
}

// chosen is which configuration a node has. Where there is one alone, the label can name no other.
func chosen(configs map[string]string, env map[string]string) string {
	names := slices.Sorted(maps.Keys(configs))
	fallback := env["DEFAULT_CONFIG"]
	for _, strategy := range strings.Split(env["FALLBACK_STRATEGIES"], ",") {
		if strategy == "named" && fallback == "" && slices.Contains(names, "default") {
			fallback = "default"
		}
	}
	switch {
	case env["CONFIG_FILE_SRCDIR"] == "" && env["CONFIG_FILE"] == "":
		return "none"
	case len(names) == 0:
		return "of a ConfigMap, by node label"
	case len(names) == 1:
		return "one"
	}
	return "by node label, else " + fallback
}

// shares reports whether a configuration shares GPUs in a mode.
func (f facts) shares(mode string) bool {
	for _, text := range f.configs {
		if regexp.MustCompile(`(?m)^\s*` + mode + `:`).MatchString(text) {
			return true
		}
	}
	return false
}

// contents returns what a values file has that others have not.
func contents(f facts) string {
	var all []string
	add := func(has bool, what string) {
		if has {
			all = append(all, what)
		}
	}
	add(len(f.configs) == 0 && f.of["configuration"] != "none", "`config.name`")
	add(len(f.configs) > 0, "`config.map`: "+strings.Join(slices.Sorted(maps.Keys(f.configs)), ", "))
	add(f.shares("timeSlicing"), "time-slicing")
	add(f.shares("mps"), "MPS")
	add(f.of["node labels"] != "none", "GFD")
	return strings.Join(all, "; ")
}

// differences are the facts that are not the same, in one line each.
func differences(theirs, ours facts) (all []string) {
	names := map[string]bool{}
	for _, f := range []facts{theirs, ours} {
		for name := range f.of {
			names[name] = true
		}
	}
	word := func(text string) string {
		if text == "" {
			return "nothing"
		}
		return "`" + text + "`"
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		is, was := ours.of[name], theirs.of[name]
		if is != was && (theirs.of["device plugin"] != "none" || name == "device plugin") { // without a pod there is nothing to compare
			all = append(all, fmt.Sprintf("%s: %s, there %s", name, word(is), word(was)))
		}
	}
	return all
}
