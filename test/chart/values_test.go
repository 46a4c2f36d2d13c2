package chart

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	netv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
)

// Each value is in a set of testdata/values, other than its default, so that the end-to-end test applies it.
func TestEachValueIsTried(t *testing.T) {
	defaults := map[string]any{}
	c, err := load()
	if err != nil {
		t.Fatal(err)
	}
	flatten(c.Values, "", defaults)
	tried := map[string]bool{}
	for _, set := range valueSets(t) {
		given := map[string]any{}
		flatten(set, "", given)
		for path, v := range given {
			if d, has := defaults[path]; !has || d != v {
				for p := path; p != "."; p = filepath.Dir(p) {
					tried[p] = true
				}
			}
		}
	}
	for _, v := range documented(t, "chart") {
		if !tried[strings.ReplaceAll(v.path, ".", "/")] {
			t.Errorf("no set of testdata/values has another %s than %s", v.path, v.fallback)
		}
	}
}

func flatten(v any, path string, into map[string]any) {
	switch v := v.(type) {
	case map[string]any:
		for key, item := range v {
			flatten(item, strings.TrimPrefix(path+"/"+key, "/"), into)
		}
	case []any:
		for _, item := range v {
			flatten(item, path+"/[]", into)
		}
		if len(v) == 0 {
			into[path] = "[]"
		}
	default:
		into[path] = v
	}
}

// What the sets render to has no field that Kubernetes does not have, and no setting that the agent refuses or that has no effect. Only pods of
// the API dra have access to the API server.
func TestTheAgentTakesAllSets(t *testing.T) {
	for name, set := range valueSets(t) {
		all := objects(t, set)
		policies := map[string]map[string]string{}
		for _, o := range all {
			switch o["kind"] {
			case "ConfigMap":
				c := strict[corev1.ConfigMap](t, o)
				policies[c.Name] = c.Data
			case "NetworkPolicy":
				strict[netv1.NetworkPolicy](t, o)
			case "ServiceAccount":
				if s := strict[corev1.ServiceAccount](t, o); s.AutomountServiceAccountToken == nil || *s.AutomountServiceAccountToken {
					t.Errorf("%s: %s has a token", name, s.Name)
				} else if s.Annotations["helm.sh/resource-policy"] != "keep" { // a DaemonSet keeps its name in an old field: no pod would start without it
					t.Errorf("%s: %s is deleted by a rollback to a DaemonSet without it", name, s.Name)
				}
			case "ClusterRole":
				strict[rbacv1.ClusterRole](t, o)
			case "Role":
				strict[rbacv1.Role](t, o)
			case "RoleBinding":
				strict[rbacv1.RoleBinding](t, o)
			case "ClusterRoleBinding":
				strict[rbacv1.ClusterRoleBinding](t, o)
			case "ValidatingAdmissionPolicy":
				strict[admissionv1.ValidatingAdmissionPolicy](t, o)
			case "ValidatingAdmissionPolicyBinding":
				strict[admissionv1.ValidatingAdmissionPolicyBinding](t, o)
			case "DeviceClass":
				strict[resourcev1.DeviceClass](t, o)
			case "DaemonSet", "PodMonitor", "PrometheusRule", "SecurityContextConstraints":
			default:
				t.Errorf("%s: there is a %s", name, o["kind"])
			}
		}
		for _, d := range daemonSets(t, all) {
			checkAgent(t, name, d, policies)
		}
	}
}

func checkAgent(t *testing.T, name string, d appsv1.DaemonSet, policies map[string]map[string]string) {
	t.Helper()
	pod := d.Spec.Template.Spec
	c, env := pod.Containers[0], map[string]string{}
	for _, e := range c.Env {
		if _, twice := env[e.Name]; twice {
			t.Errorf("%s: %s has %s twice", name, d.Name, e.Name)
		}
		env[e.Name] = e.Value
		if e.ValueFrom != nil {
			env[e.Name] = "of-the-pod"
		}
	}
	flags := config.NewFlags(config.KubernetesSpecs())
	if env["CONFIG_FILE"] != "" {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "policy" })
		text, own := policies[pod.Volumes[i].ConfigMap.Name]["policy.yaml"]
		file := filepath.Join(t.TempDir(), "policy.yaml")
		writeFile(t, file, text)
		if env["CONFIG_FILE"] = file; !own {
			delete(env, "CONFIG_FILE")
		}
	}
	for _, arg := range c.Args {
		flag, v, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if err := flags[flag].Set(v); err != nil {
			t.Fatal(err)
		}
	}
	names := []string{""}
	if env["CONFIG_FILE_SRCDIR"] != "" { // each node has another one
		env["CONFIG_FILE_SRCDIR"] = t.TempDir()
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "configs" })
		for name, text := range policies[pod.Volumes[i].ConfigMap.Name] {
			writeFile(t, filepath.Join(env["CONFIG_FILE_SRCDIR"], name), text)
			names = append(names, name)
		}
	}
	for _, config := range names {
		checkSettings(t, name+" "+config, d, flags, env, config)
	}
}

// checkSettings checks the settings that an agent has with a configuration.
func checkSettings(t *testing.T, name string, d appsv1.DaemonSet, flags config.Flags, env map[string]string, configuration string) {
	t.Helper()
	pod := d.Spec.Template.Spec
	c := pod.Containers[0]
	s, err := config.ReadKubernetes(flags, config.Environment{
		LookupEnv: func(key string) (string, bool) { v, ok := env[key]; return v, ok }, CheckAddress: httpserver.CheckAddress, Config: configuration,
	})
	if err != nil {
		t.Errorf("%s: %s: %v", name, d.Name, err)
	}
	for _, note := range s.Notes {
		if !strings.Contains(note, "has no effect: without a driver this agent waits for one") { // failOnInitError, as in NOTES.txt and the README
			t.Errorf("%s: %s: %s", name, d.Name, note)
		}
	}
	needs := s.Core.API == inventory.DRA || s.ReadsNode() || s.Operations.NodeFeatureAPI || env["HAND_OVER"] == "true"
	if token := pod.AutomountServiceAccountToken; token == nil || *token != needs {
		t.Errorf("%s: %s has a token of the API server: %t, needs one: %t", name, d.Name, token != nil && *token, needs)
	}
	for _, m := range c.VolumeMounts {
		if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
			t.Errorf("%s: %s mounts %s, which is no volume", name, d.Name, m.Name)
		}
	}
}
