// Package walls checks what each package may import, over everything that is linked, and the tables of the documents that are made
// from the code.
package walls

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/tandem-gpu/tandem/"

// Modules and packages that most of the product must not link.
const (
	cgo        = "runtime/cgo"
	nvml       = "github.com/NVIDIA/go-nvml"
	grpc       = "google.golang.org/grpc"
	kubernetes = "k8s.io/"
	hashicorp  = "github.com/hashicorp/"
	nvidia     = module + "internal/core/nvidia"
	monitor    = module + "internal/core/monitor"
)

// The packages that compute: values and pure functions, and what they may import of the standard library, which can neither block,
// nor log, nor read the host.
var (
	pure         = []string{"core", "core/durable", "core/gpu", "core/health/...", "core/holders", "core/inventory", "core/limit", "core/proof", "core/reset", "core/use", "util/oneline", "util/problem", "util/setting"}
	computing    = slices.Concat(pure, []string{"rescue"}) // also those that no agent imports
	encoding     = "encoding/json"                         // of those that remember, whose text has a limit in bytes
	remembering  = []string{"core/durable", "rescue"}
	pureStandard = []string{"cmp", "errors", "fmt", "iter", "maps", "slices", "strconv", "strings", "time", "unicode"}
)

// ofKubernetes is what the packages for Kubernetes may not link: of its libraries they need the kubelet's APIs only.
var ofKubernetes = []string{nvml, nvidia, monitor, hashicorp, kubernetes + "klog", kubernetes + "client-go", kubernetes + "api/"}

// ofFleet are what the packages of gpu-fleet may import. No agent links one of them.
var ofFleet = []string{"core/faultreport", "core/gpu", "core/health/...", "fleet/...", "rescue", "util/..."}

// rules are what packages may import: the one table of it. The last pattern that matches a package holds. A pattern with "/..." has a
// package and those below it; the prefix internal/ is left out.
var rules = []struct {
	packages string
	own      []string // patterns of packages of this module that it may import, beside those that match its own pattern
	never    []string // prefixes of import paths that it may not link, also not through other packages
}{
	{"util/...", nil, []string{cgo, nvml, grpc, kubernetes, hashicorp}},
	// Those of HTTP: the standard library's net links cgo.
	{"util/httpserver", []string{"util/..."}, []string{nvml, grpc, kubernetes, hashicorp}},
	{"util/metric", nil, []string{nvml, grpc, kubernetes, hashicorp}},

	{"core", pure, nil},
	{"core/gpu", nil, nil},
	{"core/health/...", []string{"core/gpu", "util/oneline", "util/setting"}, nil},
	{"core/faultreport", []string{"core/gpu", "core/health"}, []string{cgo, nvml, grpc, kubernetes, hashicorp}},
	{"core/inventory", []string{"core/gpu", "core/health/..."}, nil},
	{"core/holders", []string{"core/gpu", "core/inventory"}, nil},
	{"core/durable", []string{"core/gpu", "core/health"}, nil},
	{"core/limit", []string{"core/durable", "core/gpu", "core/health", "core/holders", "core/inventory", "util/problem"}, nil},
	{"core/proof", []string{"core/durable", "core/gpu", "core/health/...", "util/oneline", "util/setting"}, nil},
	{"core/reset", []string{"core/durable", "core/gpu", "core/health", "util/oneline"}, nil},
	{"core/use", []string{"core/gpu", "core/holders", "core/inventory", "util/problem"}, nil},
	// The decision about moves is for both orchestrators, and knows neither.
	{"rescue", []string{"core/gpu", "core/health", "util/setting"}, []string{cgo, nvml, grpc, kubernetes, hashicorp}},
	{"fleet/...", ofFleet, []string{nvml, grpc, kubernetes, hashicorp}},
	{"fleet/config", slices.Concat(ofFleet, []string{"config/document", "config/schema"}), []string{cgo, nvml, grpc, kubernetes, hashicorp}},
	{"fleet/kube", ofFleet, []string{nvml, hashicorp}},
	{"fleet/nomad", ofFleet, []string{nvml, kubernetes}},
	{"core/nvidia", slices.Concat(pure, []string{"util/..."}), []string{monitor, grpc, kubernetes, hashicorp}},
	{"core/monitor", slices.Concat(pure, []string{"util/..."}), []string{cgo, nvidia, grpc, kubernetes, hashicorp}},

	{"config/...", slices.Concat(pure, []string{"util/..."}), []string{cgo, nvml, monitor, grpc, kubernetes, hashicorp}},
	{"cdi/...", slices.Concat(pure, []string{"util/..."}), []string{nvidia, monitor, grpc, kubernetes, hashicorp}},
	{"cdi/specfile", []string{"util/statefile"}, []string{cgo, nvml}},
	// The history is the monitor's store.
	{"node/...", slices.Concat(pure, []string{"core/monitor", "util/..."}), []string{cgo, nvml, grpc, kubernetes, hashicorp}},
	// Servers and clients of components are HTTP.
	{"node/component", slices.Concat(pure, []string{"util/..."}), []string{nvml, monitor, grpc, kubernetes, hashicorp}},
	{"node/limitserver", slices.Concat(pure, []string{"node/...", "util/..."}), []string{nvml, monitor, grpc, kubernetes, hashicorp}},
	{"node/resetserver", slices.Concat(pure, []string{"node/...", "util/..."}), []string{nvml, monitor, grpc, kubernetes, hashicorp}},
	// A proof uses the CUDA driver, and neither NVML nor what the agents know: so it can't mix a fault of theirs with one of the GPU.
	{"node/cudaproof", nil, []string{nvml, module + "internal/core", grpc, kubernetes, hashicorp}},

	// An adapter sees values of the core, and one orchestrator. Of Nomad's packages those with the license BUSL-1.1 are not linked.
	{"nomadadapter/...", slices.Concat(pure, []string{"config/...", "core/faultreport", "node/...", "util/..."}), []string{
		nvml, kubernetes, hashicorp + "nomad/client/devicemanager", hashicorp + "nomad/helper/pluginutils/loader"}},
	{"kubeadapter/...", slices.Concat(pure, []string{"cdi/specfile", "node/...", "util/..."}), ofKubernetes},
	// agent/kube passes what one of the kubelet's plugin APIs needs of the other.
	{"kubeadapter/deviceplugin", slices.Concat(pure, []string{"kubeadapter", "kubeadapter/podresources", "kubeadapter/pluginsocket", "node/...", "util/..."}), ofKubernetes},
	{"kubeadapter/dra/...", slices.Concat(pure, []string{"kubeadapter", "kubeadapter/kubeapi", "kubeadapter/pluginsocket", "cdi/specfile", "util/..."}), ofKubernetes},
	{"kubeadapter/handover", slices.Concat(pure, []string{"core/faultreport", "kubeadapter/kubeapi", "util/..."}), ofKubernetes},
	{"kubeadapter/kubeapi", []string{"util/..."}, []string{grpc, kubernetes, hashicorp}},

	{"operator/...", slices.Concat(pure, []string{"config/...", "core/monitor", "node/...", "util/..."}), []string{nvml, grpc, kubernetes, hashicorp}},
	// doctor reads the node itself.
	{"operator/doctor", slices.Concat(pure, []string{"cdi", "config", "core/nvidia", "node/cgroup", "node/cudaproof", "node/gpureset", "node/kmsg", "node/limitserver", "node/proofcommand", "operator/control", "operator/report", "util/..."}), []string{grpc, kubernetes, hashicorp}},
	{"operator/doctor/kubelet", []string{"operator/...", "cdi", "config", "core/...", "kubeadapter/...", "util/..."}, []string{hashicorp}},
	{"operator/doctor/nomad", []string{"operator/...", "cdi", "config", "core/...", "nomadadapter/...", "util/..."}, []string{grpc, kubernetes}},

	{"agent", []string{"cdi", "config", "core/...", "node/...", "operator/...", "util/..."}, []string{grpc, kubernetes, hashicorp}},
	{"agent/kube/...", []string{"agent", "cdi", "config/...", "core/...", "kubeadapter/...", "node/...", "operator/...", "util/..."}, []string{hashicorp}},
	{"agent/nomad/...", []string{"agent", "cdi", "config/...", "core/...", "nomadadapter/...", "node/...", "operator/...", "util/..."}, []string{kubernetes}},
	{"cli/...", []string{"agent", "cdi", "config/...", "core/...", "node/...", "operator/...", "util/..."}, []string{grpc, kubernetes, hashicorp}},
	// What the agents' command lines and that of gpu-fleet have in common.
	{"cli/command", []string{"config/document", "util/oneline"}, []string{nvml, nvidia, monitor, grpc, kubernetes, hashicorp}},
	{"cli/processlog", []string{"cli/command", "util/..."}, []string{nvml, nvidia, monitor, grpc, kubernetes, hashicorp}},
	{"cli/importer/nvidia", []string{"cli/importer", "config/...", "util/..."}, []string{hashicorp, kubernetes}},
	{"cli/importer/hashicorp", []string{"cli/importer", "config/...", "nomadadapter/clientconfig", "util/..."}, []string{hashicorp + "nomad", kubernetes}},
	{"cli/shadow/kubeshadow", []string{"agent", "cli/shadow", "config/...", "core/...", "kubeadapter/..."}, []string{hashicorp}},
	{"cli/shadow/nomadshadow", []string{"agent", "cli/shadow", "config/...", "core/...", "nomadadapter/..."}, []string{kubernetes}},
	{"cmd/k8s-gpu", []string{"..."}, []string{hashicorp, kubernetes + "client-go", module + "internal/nomadadapter", module + "internal/rescue", module + "internal/fleet"}},
	{"cmd/gpu-fleet", slices.Concat(ofFleet, []string{"cli/command", "cli/processlog", "config/document"}), []string{
		nvml, nvidia, monitor, module + "internal/agent", module + "internal/kubeadapter", module + "internal/nomadadapter", hashicorp + "nomad/client"}},
	{"cmd/nomad-gpu", []string{"..."}, []string{kubernetes, hashicorp + "nomad/api", module + "internal/kubeadapter", module + "internal/rescue", module + "internal/fleet"}},
}

// matches reports whether a package is one of a pattern.
func matches(pattern, pkg string) bool {
	if pattern == "..." {
		return true
	}
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == base || strings.HasPrefix(pkg, base+"/")
	}
	return pkg == pattern
}

func matchesAny(patterns []string, pkg string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, pkg) })
}

// short is an import path as the table has it, if it is one of the product.
func short(path string) (string, bool) {
	name, ok := strings.CutPrefix(path, module)
	return strings.TrimPrefix(name, "internal/"), ok
}

// fixture reports whether a package is only for tests.
func fixture(pkg string) bool { return strings.HasSuffix(pkg, "test") }

func list(t *testing.T, args ...string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...).Output()
	if err != nil {
		t.Fatalf("go list %v: %v", args, err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// ownC is the only package of this module that has C. Others link cgo through modules: go-nvml, and the standard library's net.
const ownC = "node/cudaproof"

func TestOnlyOnePackageHasC(t *testing.T) {
	for _, line := range list(t, "-f", `{{.ImportPath}};{{len .CgoFiles}}`, module+"internal/...", module+"cmd/...") {
		path, files, _ := strings.Cut(line, ";")
		if pkg, _ := short(path); (files != "0") != (pkg == ownC) {
			t.Errorf("%s has %s files with C: want them in %s alone", pkg, files, ownC)
		}
	}
}

// Each package of the product has a rule, imports what that allows, and links nothing that it forbids.
func TestImports(t *testing.T) {
	for _, line := range list(t, "-f", `{{.ImportPath}};{{join .Imports " "}};{{join .Deps " "}}`, module+"internal/...", module+"cmd/...") {
		f := strings.Split(line, ";")
		pkg, _ := short(f[0])
		if fixture(pkg) {
			continue
		}
		rule := len(rules) - 1
		for ; rule >= 0 && !matches(rules[rule].packages, pkg); rule-- {
		}
		if rule < 0 {
			t.Errorf("no rule for %s", pkg)
			continue
		}
		own := append([]string{rules[rule].packages}, rules[rule].own...)
		for _, path := range strings.Fields(f[1]) {
			imported, ofProduct := short(path)
			switch {
			case strings.HasPrefix(imported, "test/"), ofProduct && fixture(imported):
				t.Errorf("%s imports %s, which is for tests", pkg, path)
			case ofProduct && !matchesAny(own, imported):
				t.Errorf("%s imports %s; its rule has %v", pkg, imported, own)
			case !ofProduct && matchesAny(computing, pkg) && !slices.Contains(pureStandard, path) && (path != encoding || !slices.Contains(remembering, pkg)):
				t.Errorf("%s imports %s: a package that computes may import %v", pkg, path, pureStandard)
			}
		}
		for _, path := range strings.Fields(f[2]) {
			for _, prefix := range rules[rule].never {
				if strings.HasPrefix(path, prefix) {
					t.Errorf("%s links %s", pkg, path)
				}
			}
		}
	}
}
