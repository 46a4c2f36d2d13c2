package chart

import (
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
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
	"sigs.k8s.io/yaml"
)

const deploy = "../../deploy"

// values are those that a user gives.
type values = map[string]any

// object is a rendered one.
type object = map[string]any

var load = sync.OnceValues(func() (*chart.Chart, error) {
	log.SetOutput(io.Discard) // two files are links to deploy/monitoring, which Helm logs
	return loader.Load(deploy + "/chart")
})

// render does what "helm template tandem-k8s-gpu deploy/chart -n kube-system" does: the schema, then the templates.
func render(t *testing.T, given values) (map[string]string, error) {
	t.Helper()
	return renderWith(t, given, nil)
}

var release = common.ReleaseOptions{Name: "tandem-k8s-gpu", Namespace: "kube-system", Revision: 1, IsInstall: true}

// kubernetes are the capabilities of a version of Kubernetes.
func kubernetes(t *testing.T, version string) *common.Capabilities {
	t.Helper()
	on := common.DefaultCapabilities.Copy()
	parsed, err := common.ParseKubeVersion(version)
	if err != nil {
		t.Fatal(err)
	}
	on.KubeVersion = *parsed
	return on
}

// notesOn returns the notes of an installation on a version of Kubernetes.
func notesOn(t *testing.T, version, text string) string {
	t.Helper()
	c, err := load()
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.ToRenderValues(c, parse(t, text), release, kubernetes(t, version))
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(c, all)
	if err != nil {
		t.Fatal(err)
	}
	return files["tandem-k8s-gpu/templates/NOTES.txt"]
}

// renderWith renders with a cluster, for the templates' function lookup.
func renderWith(t *testing.T, given values, cluster engine.ClientProvider) (map[string]string, error) {
	t.Helper()
	c, err := load()
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.ToRenderValues(c, given, release, kubernetes(t, "v1.37.1"))
	if err != nil {
		return nil, err
	}
	if cluster != nil {
		return engine.RenderWithClientProvider(c, all, cluster)
	}
	return engine.Render(c, all)
}

// objects returns what the values render to, in the order of files.
func objects(t *testing.T, given values) []object {
	t.Helper()
	files, err := render(t, given)
	if err != nil {
		t.Fatal(err)
	}
	var all []object
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") {
			all = append(all, documents(t, files[name])...)
		}
	}
	return all
}

func documents(t *testing.T, text string) []object {
	t.Helper()
	var all []object
	for _, document := range strings.Split(text, "\n---\n") {
		var o object
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if len(o) > 0 {
			all = append(all, o)
		}
	}
	return all
}

// valueSets are the files of testdata/values, which the end-to-end test applies to a cluster, too.
func valueSets(t *testing.T) map[string]values {
	t.Helper()
	files, err := filepath.Glob("testdata/values/*.yaml")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	sets := map[string]values{}
	for _, file := range files {
		sets[strings.TrimSuffix(filepath.Base(file), ".yaml")] = read(t, file)
	}
	return sets
}

func read(t *testing.T, file string) values {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, string(text))
}

func parse(t *testing.T, text string) values {
	t.Helper()
	var v values
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// daemonSets returns the agents' among the objects, without a field that Kubernetes does not have.
func daemonSets(t *testing.T, all []object) []appsv1.DaemonSet {
	t.Helper()
	agents, _ := bothDaemonSets(t, all)
	return agents
}

// bothDaemonSets returns those of the agents, and those of the MPS daemons.
func bothDaemonSets(t *testing.T, all []object) (agents, others []appsv1.DaemonSet) {
	t.Helper()
	for _, o := range all {
		if o["kind"] != "DaemonSet" {
			continue
		}
		if d := strict[appsv1.DaemonSet](t, o); d.Spec.Template.Spec.Containers[0].Name != "k8s-gpu" {
			others = append(others, d)
		} else {
			agents = append(agents, d)
		}
	}
	return agents, others
}

func strict[T any](t *testing.T, o object) T {
	t.Helper()
	var into T
	text, err := yaml.Marshal(o)
	if err == nil {
		err = yaml.UnmarshalStrict(text, &into)
	}
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return into
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
