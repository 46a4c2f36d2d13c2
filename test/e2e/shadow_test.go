//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// shadowOnce runs shadow of a program on a machine, and returns its report; the exit code fits it.
func shadowOnce(t *testing.T, m *simdriver.Machine, program string, args ...string) shadow.Report {
	t.Helper()
	args = append([]string{
		"shadow", "--json", "--driver-root", m.Root, "--dev-root", m.Root, "--sysfs-root", m.Root + "/sys", "--procfs-root", m.Root + "/proc",
	}, args...)
	cmd := exec.CommandContext(t.Context(), binary(program), args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var r shadow.Report
	if jsonErr := json.Unmarshal(out, &r); jsonErr != nil {
		t.Fatalf("%v: %v: %s%s", err, jsonErr, out, stderr.String())
	}
	if code := cmd.ProcessState.ExitCode(); r.Same && code != 0 || !r.Same && code != 3 {
		t.Errorf("exit code %d\n%s", code, r)
	}
	t.Logf("%s %s", program, r)
	return r
}

// ofKind are the differences of a kind.
func ofKind(r shadow.Report, kind shadow.Kind) (found []shadow.Difference) {
	for _, d := range r.Differences {
		if d.Kind == kind {
			found = append(found, d)
		}
	}
	return found
}

// showProcesses shows the processes of this sandbox beneath the machine's root, as procfs of a node would.
func showProcesses(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range processes {
		if err := os.Symlink(path, filepath.Join(m.Root, path)); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
}

// TestShadowKubernetes runs shadow beside a plugin of another make that has registered with a real kubelet and has given a pod a GPU, and then
// k8s-gpu in its place. The runtime does not know of CDI: the agent's other ways remain.
func TestShadowKubernetes(t *testing.T) {
	m := install(t, "h100x8")
	installHook(t, m)
	kube := startClusterOn(t, containerd1, pluginImage(), probeImage(t))
	stop := startForeignKubernetes(t, m)
	kube.awaitGPUs(t, 8, 8)
	held := kube.runPod(t, "held", 2)
	showProcesses(t, m)
	r := shadowOnce(t, m, "k8s-gpu", "--driver-root-ctr-path", m.Root)
	// It has no NUMA nodes, and that is all.
	if topology := ofKind(r, shadow.KindTopology); len(topology) != 8 || len(r.Differences) != 8 || r.Here != 8 || r.There != 8 || len(r.NotCompared) != 0 {
		t.Errorf("%s", r)
	}

	step(t, "a sick GPU that it does not see", func(t *testing.T) {
		sick := slices.Index(uuids(t, m), held.ids()[0])
		if err := m.Fail(simdriver.GPU(sick), "*", "GPU_IS_LOST", simdriver.Always); err != nil {
			t.Fatal(err)
		}
		r := shadowOnce(t, m, "k8s-gpu", "--driver-root-ctr-path", m.Root)
		health := ofKind(r, shadow.KindHealth)
		if len(health) != 1 || !strings.Contains(health[0].Here, "GPU is lost") || len(ofKind(r, shadow.KindDevice)) != 1 || len(ofKind(r, shadow.KindAnswer)) != 1 {
			t.Errorf("%s", r)
		}
	})
	step(t, "the node offers what it did", func(t *testing.T) { kube.awaitGPUs(t, 8, 8) })
	step(t, "k8s-gpu takes its place", func(t *testing.T) {
		if err := m.Heal(); err != nil {
			t.Fatal(err)
		}
		stop()
		kube.remove(t, "held")
		render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m)})
		kube.deployPlugin(t, m.Root, "k8s-history", "parts/cdi")
		kube.awaitGPUs(t, 8, 8)
		kube.setVariables(t, "DEVICE_LIST_STRATEGY=envvar,cdi-cri", "PASS_DEVICE_SPECS=true")
		kube.probe(t, m, "old", map[string]int{gpuResource: 2}, nil)
		p, s := kube.awaitProbe(t, "old", 2)
		s.checkNodes(t, m, p.ids())
		s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", strings.Join(p.ids(), ","))
	})
}

// TestShadowNomad runs shadow beside a plugin of another make under a real Nomad.
func TestShadowNomad(t *testing.T) {
	m := install(t, "h100x8")
	plugins := filepath.Join(stateDir(), "foreign")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	must(t, "install", "-D", self, filepath.Join(plugins, "foreign-gpu"))
	config := `bind_addr = "127.0.0.1"
disable_update_check = true
plugin_dir = "` + plugins + `"
client {
  options = { "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean" }
}
plugin "foreign-gpu" {
  config {
    ignored_gpu_ids = ["` + m.UUID(7) + `"]
  }
}
`
	file := write(t, "foreign.hcl", []byte(config))
	t.Setenv(foreignGPUs, strings.Join(uuids(t, m), ","))
	nomad := &agent{owner: t, name: "nomad", argv: []string{"nomad", "agent", "-dev", "-config=" + file}}
	nomad.start()
	await(t, "the devices of the other plugin", 60*time.Second, func() error {
		n, err := nomad.node()
		if err == nil && len(n.gpus()) != 8 {
			err = fmt.Errorf("%d devices", len(n.gpus()))
		}
		return errors.Join(err, nomad.process.alive())
	})
	if err := m.Fail(simdriver.GPU(2), "*", "GPU_IS_LOST", simdriver.Always); err != nil {
		t.Fatal(err)
	}
	r := shadowOnce(t, m, "nomad-gpu", "--address", nomadAPI)
	health, devices, attributes := ofKind(r, shadow.KindHealth), ofKind(r, shadow.KindDevice), ofKind(r, shadow.KindAttribute)
	if len(health) != 1 || len(devices) != 1 || devices[0].Device != m.UUID(2) || r.Here != 7 || r.There != 8 {
		t.Errorf("%s", r)
	}
	for _, d := range attributes {
		if d.Field == "memory" {
			t.Errorf("%s", d)
		}
	}
	if !slices.ContainsFunc(attributes, func(d shadow.Difference) bool { return d.Field == "display_state" && d.There == `"1"` }) {
		t.Errorf("%s", r)
	}
}
