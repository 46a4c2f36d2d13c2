//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const chartFolder = "../../deploy/chart"

// TestChart has an API server check and store all that deploy has, without a node; then a node joins, and the DaemonSet is installed,
// handed over to Helm, upgraded, rolled back and uninstalled under a pod that has a GPU.
func TestChart(t *testing.T) {
	m := install(t, "h100x8")
	c := &chartCluster{cluster: newCluster(t, containerd2, pluginImage()), machine: m}
	c.startControlPlane(t)
	step(t, "objects", c.objects)
	step(t, "access of the API dra", c.access)
	step(t, "access of the hand-over", c.handOverAccess)
	c.join(t, c.kubeNode)
	step(t, "privileges", c.privileges)
	step(t, "handed over to Helm", c.handedOver)
	step(t, "upgrade and rollback", c.upgrade)
	step(t, "notes", c.notes)
	step(t, "uninstall", c.uninstall)
	step(t, "privileges with the API dra", c.privilegesOfDRA)
}

// chartCluster is a cluster with a node of one simulated machine.
type chartCluster struct {
	*cluster
	machine *simdriver.Machine
	work    pod // has a GPU
}

// objects has the API server check the manifest, each component and each set of values strictly, and then store them, each in a
// namespace of its own.
func (c *chartCluster) objects(t *testing.T) {
	must(t, "kubectl", "apply", "--server-side", "-f", os.Getenv("E2E_CRDS"))
	must(t, "kubectl", "wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
	var namespaces strings.Builder
	sets := 0
	add := func(name, text string) {
		write(t, "rendered/"+name+".yaml", []byte(strings.ReplaceAll(text, "namespace: kube-system", "namespace: "+name)))
		fmt.Fprintf(&namespaces, "---\n{apiVersion: v1, kind: Namespace, metadata: {name: %s}}\n", name)
		sets++
	}
	manifest, err := os.ReadFile("../../deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	add("manifest", string(manifest))
	for _, file := range globs(t, "../../deploy/*/kustomization.yaml") {
		if name := filepath.Base(filepath.Dir(file)); name != "gpu-fleet" {
			add("component-"+name, c.kustomized(t, name))
		}
	}
	add("gpu-fleet", must(t, "kubectl", "kustomize", "../../deploy/gpu-fleet"))
	for _, file := range globs(t, "../chart/testdata/fleet/*.yaml") {
		name := "fleet-" + strings.TrimSuffix(filepath.Base(file), ".yaml")
		add(name, must(t, "helm", "template", "gpu-fleet", "../../deploy/fleet-chart", "-n", name, "-f", file))
	}
	for _, file := range globs(t, "../chart/testdata/values/*.yaml") {
		name := "values-" + strings.TrimSuffix(filepath.Base(file), ".yaml")
		add(name, must(t, "helm", "template", "tandem-k8s-gpu", chartFolder, "-n", name, "-f", file))
	}
	if sets < 20 {
		t.Fatalf("only %d sets", sets)
	}
	must(t, "kubectl", "apply", "-f", write(t, "namespaces.yaml", []byte(namespaces.String())))
	apply := []string{"kubectl", "apply", "--server-side", "--validate=strict", "-f"}
	folder := filepath.Join(stateDir(), "rendered")
	must(t, append(apply, folder, "--dry-run=server")...)
	applied := must(t, append(apply, folder)...)
	t.Logf("%d sets, %d objects", sets, strings.Count(applied, "serverside-applied"))
	must(t, "kubectl", "delete", "-f", folder, "--wait=false", "--ignore-not-found") // sets have cluster-scoped objects in common
	c.claims(t)
	misspelled := write(t, "misspelled.yaml", []byte(strings.Replace(string(manifest), "readOnly:", "readonly:", 1)))
	if err := try(append(apply, misspelled, "--dry-run=server")...); err == nil || !strings.Contains(err.Error(), "readonly") {
		t.Errorf("the check accepts a field that does not exist: %v", err)
	}
}

func globs(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatal(pattern, err)
	}
	return files
}

// kustomized is what "kubectl apply -k deploy" applies with this component.
func (c *chartCluster) kustomized(t *testing.T, component string) string {
	t.Helper()
	dir := filepath.Join(stateDir(), "deploy")
	if err := errors.Join(os.RemoveAll(dir), os.CopyFS(dir, os.DirFS("../../deploy"))); err != nil {
		t.Fatal(err)
	}
	list := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [daemonset.yaml]\ncomponents: [" + component + "]\n"
	write(t, "deploy/kustomization.yaml", []byte(list))
	return must(t, "kubectl", "kustomize", dir)
}

// privileges applies the manifest as it is shipped, and compares what its process may do with the table in deploy/README.md. That is enough for
// the kernel log, of which it has no device, with the runtime's own seccomp profile.
func (c *chartCluster) privileges(t *testing.T) {
	must(t, "kubectl", "apply", "-f", "../../deploy/daemonset.yaml")
	awaitRollout(t)
	pids := slices.Collect(maps.Keys(running("k8s-gpu")))
	if len(pids) != 1 {
		t.Fatalf("processes %v", pids)
	}
	compareWithTable(t, privilegesOf(t, pids[0]), 1)
	metrics, err := fetch("http://" + c.plugin(t).Status.PodIP + ":9410/metrics")
	if err != nil || !strings.Contains(metrics, `tandem_health_source_up{source="kernel_log"} 1`) {
		t.Errorf("the kernel log is not read, error %v", err)
	}
}

// privilegesOfDRA does the same with the component for Dynamic Resource Allocation.
func (c *chartCluster) privilegesOfDRA(t *testing.T) {
	must(t, "kubectl", "apply", "-f", write(t, "dra.yaml", []byte(c.kustomized(t, "dra"))))
	var pids []int
	await(t, "the agent to run", 60*time.Second, func() error {
		if pids = slices.Collect(maps.Keys(running("k8s-gpu"))); len(pids) != 1 {
			return fmt.Errorf("processes %v", pids)
		}
		return nil
	})
	compareWithTable(t, privilegesOf(t, pids[0]), 2)
	must(t, "kubectl", "delete", "-f", filepath.Join(stateDir(), "dra.yaml"), "--wait=false")
}

// compareWithTable compares rows with a column of the table in deploy/README.md.
func compareWithTable(t *testing.T, rows [][2]string, column int) {
	t.Helper()
	readme, err := os.ReadFile("../../deploy/README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(readme), "<!-- privileges -->")
	table, _, _ = strings.Cut(table, "<!-- end -->")
	want := map[string]string{}
	for line := range strings.Lines(table) {
		if cells := strings.Split(strings.Trim(line, "| \n"), " | "); len(cells) > column {
			want[cells[0]] = cells[column]
		}
	}
	for _, row := range rows {
		t.Logf("%s: %s", row[0], row[1])
		if want[row[0]] != row[1] {
			t.Errorf("%s: %s; deploy/README.md has %q", row[0], row[1], want[row[0]])
		}
	}
}

// simulated are values for the simulated machine, as testdata/parts/simulated has for the manifest.
func (c *chartCluster) simulated(t *testing.T) string {
	t.Helper()
	return render(t, "chart.yaml", map[string]string{"MACHINE": c.machine.Root, "HISTORY": stateDir() + "/history"})
}

// handedOver is the way from the manifest to the chart: the pods stay until the chart's DaemonSet, which has the same selector, replaces
// them. Without a restart Kubernetes takes them for its own, because both DaemonSets have the generation 1.
func (c *chartCluster) handedOver(t *testing.T) {
	old := c.plugin(t)
	must(t, "kubectl", "-n", "kube-system", "delete", daemonSet, "--cascade=orphan")
	if again := c.plugin(t); again.identity() != old.identity() {
		t.Errorf("without its DaemonSet the pod is %s, was %s", again.identity(), old.identity())
	}
	notes := c.helm(t, "install", "-f", c.simulated(t))
	if !strings.Contains(notes, "kubectl -n kube-system rollout status "+daemonSet) || strings.Contains(notes, "WARNING") {
		t.Errorf("notes:\n%s", notes)
	}
	must(t, "kubectl", "-n", "kube-system", "rollout", "restart", daemonSet)
	awaitRollout(t)
	c.awaitGPUs(t, 8, 8)
	c.plugin(t) // one pod
	c.work = c.runPod(t, "work", 1)
}

// helm installs or upgrades, waits until the pods are ready, and returns what is printed.
func (c *chartCluster) helm(t *testing.T, verb string, more ...string) string {
	t.Helper()
	argv := []string{"helm", verb, "tandem-k8s-gpu", chartFolder, "-n", "kube-system", "--wait", "--timeout=40s"}
	return must(t, append(argv, more...)...)
}

// upgrade gives the chart two configurations, of which the label of the node selects one in the pod that runs, and goes back.
func (c *chartCluster) upgrade(t *testing.T) {
	const label = "nvidia.com/device-plugin.config"
	c.helm(t, "upgrade", "-f", c.simulated(t), "--set-json", `config.map={"default": {"version": "v1"}, "shared": {"version": "v1",
		"sharing": {"timeSlicing": {"renameByDefault": true, "resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}}}`)
	c.awaitGPUs(t, 8, 8)
	agent := c.plugin(t)
	must(t, "kubectl", "label", "node", c.name, label+"=shared")
	c.awaitOffer(t, "nvidia.com/gpu.shared", "28") // seven times four: the pod's GPU is not offered under another name
	must(t, "kubectl", "label", "node", c.name, label+"=other", "--overwrite")
	await(t, "the problem of a label that names no configuration", 30*time.Second, func() error {
		report, err := command("kubectl", "-n", "kube-system", "exec", daemonSet, "--", "k8s-gpu", "inspect")
		if want := `node label ` + label + ` = "other"`; err == nil && !strings.Contains(report, want) {
			err = errors.New(report)
		}
		return err
	})
	c.awaitOffer(t, "nvidia.com/gpu.shared", "28")
	must(t, "kubectl", "label", "node", c.name, label+"-")
	c.awaitOffer(t, "nvidia.com/gpu.shared", "0")
	c.awaitGPUs(t, 8, 8)
	if again := c.plugin(t); again.identity() != agent.identity() {
		t.Errorf("the agent is %s, was %s", again.identity(), agent.identity())
	}
	c.awaitUnchanged(t, "work", c.work)
	must(t, "helm", "rollback", "tandem-k8s-gpu", "1", "-n", "kube-system", "--wait", "--timeout=40s")
	c.awaitGPUs(t, 8, 8)
	c.awaitUnchanged(t, "work", c.work)
}

// awaitOffer waits until the node has this many allocatable devices of a resource.
func (c *chartCluster) awaitOffer(t *testing.T, resource, count string) {
	t.Helper()
	await(t, count+" of "+resource, 30*time.Second, func() error {
		var node struct {
			Status struct{ Allocatable map[string]string }
		}
		err := c.get("/api/v1/nodes/"+c.name, &node)
		if got := node.Status.Allocatable[resource]; err == nil && got != count {
			err = fmt.Errorf("the node has %q", got)
		}
		return err
	})
}

// notes warn of what the cluster has: another device plugin, another release of this chart, a namespace that refuses the pods; and of privileges.
func (c *chartCluster) notes(t *testing.T) {
	must(t, "kubectl", "create", "namespace", "nvidia")
	must(t, "kubectl", "apply", "-f", write(t, "incumbent.yaml", []byte(`{apiVersion: apps/v1, kind: DaemonSet,
		metadata: {name: nvidia-device-plugin-daemonset, namespace: nvidia}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}},
		spec: {nodeSelector: {no: such}, containers: [{name: nvidia-device-plugin-ctr, image: "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"}]}}}}`)))
	must(t, "kubectl", "create", "namespace", "strict")
	must(t, "kubectl", "label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
	notes := must(t, "helm", "install", "second", chartFolder, "-n", "strict", "--dry-run=server", "--set", "cdi.privileged=true,migStrategy=mixed,reservationCheck=warn")
	for _, want := range []string{
		"DaemonSet nvidia-device-plugin-daemonset in namespace nvidia", "DaemonSet tandem-k8s-gpu in namespace kube-system", "Namespace strict enforces the pod security level restricted",
		"WARNING: the container is privileged", "the host's PID namespace",
	} {
		if !strings.Contains(notes, want) {
			t.Errorf("the notes have no %q:\n%s", want, notes)
		}
	}
}

// uninstall leaves nothing of the chart but its account, whose name a DaemonSet may have kept, and the work with its GPU.
func (c *chartCluster) uninstall(t *testing.T) {
	must(t, "helm", "uninstall", "tandem-k8s-gpu", "-n", "kube-system", "--wait")
	await(t, "nothing of the chart", 30*time.Second, func() error {
		left, err := command("kubectl", "-n", "kube-system", "get", "daemonsets,pods,configmaps", "-o", "name")
		if err == nil && (strings.Contains(left, "tandem") || strings.Contains(left, "pod/")) {
			err = errors.New(left)
		}
		return err
	})
	must(t, "kubectl", "-n", "kube-system", "delete", "serviceaccount/tandem-k8s-gpu") // helm.sh/resource-policy: keep
	for _, kind := range []string{"clusterroles", "clusterrolebindings"} {
		if left := must(t, "kubectl", "get", kind, "-o", "name"); strings.Contains(left, "tandem-k8s-gpu-node") {
			t.Errorf("left: %s", left)
		}
	}
	c.awaitUnchanged(t, "work", c.work)
}
