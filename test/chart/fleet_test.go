package chart

import (
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	netv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

var loadFleet = sync.OnceValues(func() (*chart.Chart, error) {
	log.SetOutput(io.Discard)
	return loader.Load(deploy + "/fleet-chart")
})

// renderFleet does what "helm template gpu-fleet deploy/fleet-chart -n gpu-fleet" does.
func renderFleet(t *testing.T, given values) ([]object, error) {
	t.Helper()
	c, err := loadFleet()
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.ToRenderValues(c, given, common.ReleaseOptions{Name: "gpu-fleet", Namespace: "gpu-fleet", Revision: 1, IsInstall: true}, kubernetes(t, "v1.37.1"))
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	var objects []object
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") {
			objects = append(objects, documents(t, files[name])...)
		}
	}
	return objects, err
}

func fleetObjects(t *testing.T, given values) map[string]object {
	t.Helper()
	all, err := renderFleet(t, given)
	if err != nil {
		t.Fatal(err)
	}
	return fleetByName(t, all)
}

// fleetByName returns the objects by kind and name. What differs on purpose is made equal: kustomize gives the ConfigMap a name of its content, and
// the chart the pods an annotation of it.
func fleetByName(t *testing.T, all []object) map[string]object {
	t.Helper()
	by := map[string]object{}
	for _, o := range all {
		meta := o["metadata"].(object)
		name := regexp.MustCompile(`^(gpu-fleet-config)-[a-z0-9]{10}$`).ReplaceAllString(meta["name"].(string), "$1")
		meta["name"] = name
		switch o["kind"] {
		case "Namespace":
			continue
		case "ConfigMap":
			data := o["data"].(object)
			if _, configures := data["gpu-fleet.yaml"]; !configures {
				break
			}
			delete(meta, "labels")
			var config object
			if err := yaml.Unmarshal([]byte(data["gpu-fleet.yaml"].(string)), &config); err != nil {
				t.Fatal(err)
			}
			data["gpu-fleet.yaml"] = config
		case "Deployment":
			template := o["spec"].(object)["template"].(object)
			annotations, _ := template["metadata"].(object)["annotations"].(object)
			if delete(annotations, "checksum/config"); len(annotations) == 0 {
				delete(template["metadata"].(object), "annotations")
			}
			volume := template["spec"].(object)["volumes"].([]any)[0].(object)["configMap"].(object)
			volume["name"] = regexp.MustCompile(`^(gpu-fleet-config)-[a-z0-9]{10}$`).ReplaceAllString(volume["name"].(string), "$1")
		}
		by[o["kind"].(string)+" "+name] = o
	}
	return by
}

// With default values the chart of gpu-fleet is deploy/gpu-fleet, and in mode act that with the component act.
func TestFleetIsTheManifest(t *testing.T) {
	act := values{"config": values{"clusters": []any{values{"name": "kubernetes", "kind": "kubernetes", "mode": "act"}}}}
	for name, c := range map[string]struct {
		given  values
		change [2]string // of the kustomization
		mode   [2]string // of the configuration
	}{
		"report": {given: nil},
		"act":    {act, [2]string{"  # - act ", "  - act "}, [2]string{"mode: report", "mode: act"}},
	} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(deploy+"/gpu-fleet")); err != nil {
			t.Fatal(err)
		}
		replaceIn(t, dir+"/kustomization.yaml", c.change)
		replaceIn(t, dir+"/gpu-fleet.yaml", c.mode)
		resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
		if err != nil {
			t.Fatal(name, err)
		}
		text, err := resources.AsYaml()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(fleetByName(t, documents(t, string(text))), fleetObjects(t, c.given)); diff != "" {
			t.Errorf("%s: deploy/gpu-fleet (-), the chart (+):\n%s", name, diff)
		}
	}
}

func replaceIn(t *testing.T, path string, change [2]string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if change[0] != "" && strings.Count(string(text), change[0]) != 1 {
		t.Fatalf("%s has no %q", path, change[0])
	}
	if change[0] != "" {
		text = []byte(strings.Replace(string(text), change[0], change[1], 1))
	}
	writeFile(t, path, string(text))
}

// The sets of values, and the example of the README, render to what Kubernetes has fields for. Only mode act gives the right to evict, only a cluster of
// gpu-fleet's own the rights to read, and no pod has a privilege.
func TestFleetValues(t *testing.T) {
	readme, err := os.ReadFile(deploy + "/fleet-chart/README.md")
	if err != nil {
		t.Fatal(err)
	}
	example := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindSubmatch(readme)
	sets := map[string]values{"README.md": parse(t, string(example[1])), "remote": parse(t, `{config: {clusters: [{name: a, kind: kubernetes, mode: act,
		kubeconfig: /etc/gpu-fleet-secrets/a/k}], ledger: {cluster: a, namespace: b, name: c}}, secrets: [{name: a}]}`)}
	files, err := filepath.Glob("testdata/fleet/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		sets[file] = read(t, file)
	}
	want := map[string]string{ // roles
		"README.md": "ClusterRole gpu-fleet, ClusterRole gpu-fleet-act, Role gpu-fleet", "remote": "",
		"testdata/fleet/team.yaml": "ClusterRole gpu-fleet, ClusterRole gpu-fleet-act", "testdata/fleet/pod.yaml": "ClusterRole team-fleet, Role team-fleet",
	}
	for name, set := range sets {
		var roles []string
		for key, o := range fleetObjects(t, set) {
			switch o["kind"] {
			case "ClusterRole":
				strict[rbacv1.ClusterRole](t, o)
				roles = append(roles, key)
			case "Role":
				strict[rbacv1.Role](t, o)
				roles = append(roles, key)
			case "ClusterRoleBinding":
				strict[rbacv1.ClusterRoleBinding](t, o)
			case "RoleBinding":
				strict[rbacv1.RoleBinding](t, o)
			case "Service":
				strict[corev1.Service](t, o)
			case "ServiceAccount":
				strict[corev1.ServiceAccount](t, o)
			case "PodDisruptionBudget":
				strict[policyv1.PodDisruptionBudget](t, o)
			case "NetworkPolicy":
				strict[netv1.NetworkPolicy](t, o)
			case "Deployment":
				checkFleetPod(t, name, strict[appsv1.Deployment](t, o).Spec.Template.Spec)
			case "PrometheusRule":
				checkFleetRules(t, o)
			case "ConfigMap", "PodMonitor":
			default:
				t.Errorf("%s: a %s", name, key)
			}
		}
		slices.Sort(roles)
		if got := strings.Join(roles, ", "); got != want[name] {
			t.Errorf("%s: roles %q, want %q", name, got, want[name])
		}
	}
}

// checkFleetRules expects the alerts on gpu-fleet alone, but for one that a value leaves out.
func checkFleetRules(t *testing.T, rule object) {
	t.Helper()
	text, err := os.ReadFile(deploy + "/monitoring/tandem.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var want []any
	for _, g := range parse(t, string(text))["groups"].([]any) {
		if g := g.(object); g["name"] == "tandem.fleet" {
			g["rules"] = slices.DeleteFunc(g["rules"].([]any), func(r any) bool { return r.(object)["alert"] == "TandemFleetStopped" })
			want = append(want, g)
		}
	}
	if diff := cmp.Diff(want, rule["spec"].(object)["groups"]); len(want) != 1 || diff != "" {
		t.Error(diff)
	}
}

func checkFleetPod(t *testing.T, name string, pod corev1.PodSpec) {
	t.Helper()
	c := pod.Containers[0]
	s := c.SecurityContext
	if pod.HostPID || pod.HostNetwork || !*pod.SecurityContext.RunAsNonRoot || *s.Privileged || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || len(s.Capabilities.Add) > 0 {
		t.Errorf("%s: %+v, %+v", name, pod.SecurityContext, s)
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			t.Errorf("%s: %+v", name, v)
		}
	}
	for _, m := range c.VolumeMounts {
		if !m.ReadOnly {
			t.Errorf("%s: %+v", name, m)
		}
	}
}

// Each value is in a set of testdata/fleet, other than its default.
func TestEachFleetValueIsTried(t *testing.T) {
	tried := map[string]bool{}
	for _, file := range []string{"team", "pod"} {
		given := map[string]any{}
		flatten(read(t, "testdata/fleet/"+file+".yaml"), "", given)
		for path := range given {
			for p := path; p != "."; p = filepath.Dir(p) {
				tried[p] = true
			}
		}
	}
	for _, v := range documented(t, "fleet-chart") {
		if !tried[strings.ReplaceAll(v.path, ".", "/")] {
			t.Errorf("no set of testdata/fleet has another %s than %s", v.path, v.fallback)
		}
	}
}

// A ledger in the cluster of gpu-fleet of which not all is given is of its namespace, and has its name.
func TestFleetLedger(t *testing.T) {
	all := fleetObjects(t, parse(t, `config: {ledger: {cluster: kubernetes, name: budget}}`))
	config := all["ConfigMap gpu-fleet-config"]["data"].(object)["gpu-fleet.yaml"].(object)
	if diff := cmp.Diff(config["ledger"], object{"cluster": "kubernetes", "namespace": "gpu-fleet", "name": "budget"}); diff != "" {
		t.Error(diff)
	}
	role := strict[rbacv1.Role](t, all["Role gpu-fleet"])
	if role.Namespace != "gpu-fleet" || role.Rules[0].ResourceNames[0] != "budget" {
		t.Errorf("%+v", role)
	}
}

// Each wrong value is refused with its place.
func TestWrongFleetValuesAreRefused(t *testing.T) {
	cluster := func(text string) string { return "config: {clusters: [" + text + "]}" }
	for _, c := range [][2]string{
		{`replica: 3`, "'replica'"},
		{`replicas: two`, "/replicas'"},
		{`config: {clusters: []}`, "/config/clusters'"},
		{`config: {policy: {max_gpu: 1}}`, "'max_gpu'"},
		{`config: {policy: {max_gpus: 0}}`, "/config/policy/max_gpus'"},
		{cluster(`{name: a, kind: swarm}`), "/config/clusters/0/kind'"},
		{cluster(`{name: a, kind: kubernetes, mode: on}`), "/config/clusters/0/mode'"},
		{cluster(`{name: a, kind: kubernetes, address: "https://a"}`), "/config/clusters/0/address'"},
		{cluster(`{name: a, kind: nomad, kubeconfig: /k}`), "/config/clusters/0/kubeconfig'"},
		{cluster(`{name: a, kind: nomad}`), "/config/clusters/0': missing property 'address'"},
		{cluster(`{name: a, kind: nomad, address: "nomad:4646"}`), "/config/clusters/0/address'"},
		{`config: {ledger: {file: /var/lib/ledger}}`, "'file'"},
		{cluster(`{name: a, kind: kubernetes}, {name: a, kind: nomad, address: "https://a:4646"}`), "a: two clusters have this name"},
		{cluster(`{name: a, kind: kubernetes}, {name: b, kind: kubernetes}`), "set kubeconfig of the other"},
		{cluster(`{name: a, kind: nomad, address: "https://a:4646"}`), "config.ledger.cluster: it is empty"},
		{`config: {ledger: {cluster: b, namespace: c, name: d}}`, "config.ledger.cluster: b: config.clusters has only kubernetes"},
		{cluster(`{name: a, kind: kubernetes}, {name: b, kind: nomad, address: "https://a:4646", token_file: /etc/token}`), "b: token_file: /etc/token"},
		{`secrets: [{name: a}, {name: a}]`, "secrets: a: it is there twice"},
	} {
		_, err := renderFleet(t, parse(t, c[0]))
		if text := fmt.Sprint(err); err == nil || !strings.Contains(text, c[1]) {
			t.Errorf("%s: %v; want %q", c[0], err, c[1])
		}
	}
}
