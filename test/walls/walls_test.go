// Package walls checks what may import what, over everything that is linked and not only over the
// import lines that the linter sees. The table is the one of docs/architecture.md.
package walls

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const (
	module = "github.com/tandem-gpu/tandem/"
)

// pure are the packages that internal/core is made of. They may be linked wherever core may.
var pure = []string{"internal/core/gpu", "internal/core/health", "internal/core/health/xid", "internal/core/inventory", "internal/util/setting"}

func list(t *testing.T, args ...string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...).Output()
	if err != nil {
		t.Fatalf("go list %v: %v", args, err)
	}
	return strings.Fields(string(out))
}

func TestLinked(t *testing.T) {
	for _, tc := range []struct {
		pkg       string
		forbidden []string // prefixes of import paths
	}{
		{"internal/core", []string{"runtime/cgo", "net", "log", "os/exec", "github.com/", "k8s.io/", "google.golang.org/"}},
		{"internal/core/monitor", []string{"runtime/cgo", module + "internal/core/nvidia", "google.golang.org/", "k8s.io/", "github.com/hashicorp/"}},
		{"internal/core/nvidia", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", module + "internal/core/monitor"}},
		{"internal/node/kmsg", []string{"runtime/cgo", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/", module + "internal/core/monitor"}},
		{"internal/util/filelock", []string{"runtime/cgo", "net", "google.golang.org/", "k8s.io/", "github.com/", module}},
		{"internal/node/hostwatch", []string{"runtime/cgo", "net", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/", module + "internal/core/monitor"}},
		{"internal/agent", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", module + "internal/nomadadapter", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/node/history", []string{"runtime/cgo", "net", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/"}},
		{"internal/cli", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", module + "internal/nomadadapter", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/operator/doctor", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", module + "internal/nomadadapter", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/operator/doctor/kubelet", []string{"github.com/hashicorp/", module + "internal/nomadadapter"}},
		{"internal/operator/doctor/nomad", []string{"google.golang.org/", "k8s.io/", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/operator/control", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/"}},
		{"internal/cdi", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", module + "internal/core/nvidia", module + "internal/core/monitor"}},
		{"internal/cdi/spec", []string{"runtime/cgo", "net", "github.com/NVIDIA/", module + "internal/core/monitor"}},
		{"internal/cdi/specfile", []string{"runtime/cgo", "github.com/NVIDIA/", module + "internal/core"}},
		{"internal/config/document", []string{"runtime/cgo", "net", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/", module + "internal/core/monitor", module + "internal/config"}},
		{"internal/config/policy", []string{"runtime/cgo", "net", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/", module + "internal/core/monitor"}},
		{"internal/config", []string{"runtime/cgo", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/", module + "internal/core/monitor", module + "internal/node/hostwatch"}},
		{"internal/nomadadapter", []string{"k8s.io/", "github.com/NVIDIA/", "github.com/hashicorp/nomad/client/devicemanager", "github.com/hashicorp/nomad/helper/pluginutils/loader", module + "internal/core/monitor", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/kubeadapter/deviceplugin", []string{"github.com/hashicorp/", "github.com/NVIDIA/", "k8s.io/klog", "k8s.io/client-go", module + "internal/core/monitor", module + "internal/nomadadapter"}},
		{"internal/operator/latency", []string{"runtime/cgo", "net", "github.com/", "k8s.io/", "google.golang.org/"}},
		{"internal/operator/metrics", []string{"google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/prometheus/", "github.com/NVIDIA/", module + "internal/nomadadapter", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/operator/status", []string{"google.golang.org/grpc", "k8s.io/", "github.com/hashicorp/", "github.com/NVIDIA/", module + "internal/nomadadapter", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/operator/statuspage", []string{"html/template", "text/template", "google.golang.org/", "k8s.io/", "github.com/hashicorp/", "github.com/prometheus/", module + "internal/nomadadapter", module + "internal/kubeadapter/deviceplugin"}},
		{"internal/agent/kube", []string{"github.com/hashicorp/", "k8s.io/client-go", module + "test/", module + "internal/nomadadapter"}},
		{"internal/agent/nomad", []string{"k8s.io/", module + "test/", module + "internal/kubeadapter/deviceplugin", module + "internal/kubeadapter/dra"}},
		{"cmd/nomad-gpu", []string{"k8s.io/", module + "test/", module + "internal/core/coretest", module + "internal/nomadadapter/nomadtest", module + "internal/kubeadapter/deviceplugin"}},
		{"cmd/k8s-gpu", []string{"github.com/hashicorp/", module + "test/", module + "internal/core/coretest", module + "internal/nomadadapter"}},
	} {
		t.Run(tc.pkg, func(t *testing.T) {
			self := module + tc.pkg
			for _, dep := range list(t, "-deps", self) {
				for _, prefix := range tc.forbidden {
					if strings.HasPrefix(dep, prefix) && dep != self && !slices.Contains(pure, strings.TrimPrefix(dep, module)) {
						t.Errorf("links %s", dep)
					}
				}
			}
		})
	}
}

// The packages of the core compute: what they import can neither block, nor log, nor read the host.
func TestCoreImports(t *testing.T) {
	allowed := []string{"cmp", "errors", "fmt", "iter", "maps", "slices", "strconv", "strings", "time"}
	for _, pkg := range slices.Concat(pure, []string{"internal/core"}) {
		for _, imp := range list(t, "-f", "{{join .Imports \"\\n\"}}", module+pkg) {
			if !slices.Contains(allowed, imp) && !slices.Contains(pure, strings.TrimPrefix(imp, module)) {
				t.Errorf("%s imports %s", pkg, imp)
			}
		}
	}
}
