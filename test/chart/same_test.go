package chart

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// With default values the chart is the plain manifest, object for object.
func TestDefaultIsTheManifest(t *testing.T) {
	text, err := os.ReadFile(deploy + "/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(documents(t, string(text)), objects(t, nil)); diff != "" {
		t.Errorf("deploy/daemonset.yaml (-), the chart (+):\n%s", diff)
	}
}

// Each component has values that do the same. Lists of names are compared by name, as their order means nothing.
func TestComponentsAreValues(t *testing.T) {
	policy, err := os.ReadFile(deploy + "/policy/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	given := map[string]values{
		"policy":            {"config": values{"map": values{"default": string(policy)}}},
		"mps":               {"mps": values{"enabled": true}},
		"mig":               {"mig": values{"enabled": true}},
		"selinux":           {"selinux": values{"enabled": true}},
		"driver-container":  {"nvidiaDriverRoot": "/run/nvidia/driver"},
		"device-nodes":      {"passDeviceSpecs": true},
		"cdi":               {"cdi": values{"privileged": true}},
		"reservation-check": {"reservationCheck": "warn"},
		"node-labels":       {"nodeLabels": values{"enabled": true}},
		"owners":            {"owners": values{"enabled": true}},
		"prove":             {"prove": values{"enabled": true}},
		"reset":             {"reset": values{"enabled": true}},
		"limits":            {"memoryLimits": values{"enabled": true}},
		"limits-reader":     {"memoryLimits": values{"read": true}},
		"hand-over":         {"handOver": values{"enabled": true}},
		"dra":               {"api": "dra"},
		"gpu-nodes":         {"gpuNodesOnly": true},
		"surge":             {"updateStrategy": values{"rollingUpdate": values{"maxUnavailable": 0, "maxSurge": 1}}},
	}
	folders, err := filepath.Glob(deploy + "/*/kustomization.yaml")
	folders = slices.DeleteFunc(folders, func(f string) bool { return f == deploy+"/gpu-fleet/kustomization.yaml" }) // no component
	if err != nil || len(folders) != len(given) {
		t.Fatal(folders, err)
	}
	names := []string{"dra+hand-over/rights", "owners+prove"} // dra has the account of both
	given[names[0]] = values{"api": "dra", "handOver": values{"enabled": true}}
	given[names[1]] = values{"owners": values{"enabled": true}, "prove": values{"enabled": true}}
	for _, folder := range folders {
		names = append(names, filepath.Base(filepath.Dir(folder)))
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			component, chart := documents(t, kustomize(t, name)), objects(t, given[name])
			want, wantFile := comparable(t, component)
			got, gotFile := comparable(t, chart)
			if gotFile != wantFile {
				t.Errorf("the policy is\n%s\nwant\n%s", gotFile, wantFile)
			}
			if diff := cmp.Diff(want, got, byName[corev1.EnvVar](), byName[corev1.Volume](), byName[corev1.VolumeMount]()); diff != "" {
				t.Errorf("the component (-), the values (+):\n%s", diff)
			}
			_, wantOthers := bothDaemonSets(t, component)
			_, gotOthers := bothDaemonSets(t, chart)
			if diff := cmp.Diff(wantOthers, gotOthers); diff != "" {
				t.Errorf("the other DaemonSets: the component (-), the values (+):\n%s", diff)
			}
			if diff := cmp.Diff(otherObjects(component), otherObjects(chart)); diff != "" {
				t.Errorf("other objects: the component (-), the values (+):\n%s", diff)
			}
		})
	}
}

// The components policy, prove and reset each bring the configuration file: two are refused together, and prove/pod and reset/pod add to policy what the
// pods need.
func TestConfigurationsOfComponents(t *testing.T) {
	for _, name := range []string{"prove", "reset"} {
		if _, err := tryKustomize(t, "policy+"+name); err == nil || !strings.Contains(err.Error(), "tandem-policy") {
			t.Errorf("policy and %s together: %v", name, err)
		}
		both, bothOthers := bothDaemonSets(t, documents(t, kustomize(t, "policy+"+name+"/pod")))
		alone, others := bothDaemonSets(t, documents(t, kustomize(t, name)))
		for _, d := range []*appsv1.DaemonSet{&both[0], &alone[0]} {
			for i := range d.Spec.Template.Spec.Volumes { // each configuration has a name of its own
				d.Spec.Template.Spec.Volumes[i].ConfigMap = nil
			}
		}
		if diff := cmp.Diff(alone[0], both[0], byName[corev1.EnvVar]()); diff != "" {
			t.Errorf("%s (-), policy and %s/pod (+):\n%s", name, name, diff)
		}
		if diff := cmp.Diff(others, bothOthers); diff != "" {
			t.Errorf("%s (-), policy and %s/pod (+):\n%s", name, name, diff)
		}
	}
}

// With prove and reset the configuration is that of both.
func TestProveAndReset(t *testing.T) {
	all := objects(t, values{"prove": values{"enabled": true}, "reset": values{"enabled": true}})
	_, file := comparable(t, all)
	for _, part := range []string{"command:", "- prove-gpu", "mode: act", "version: v1"} {
		if !strings.Contains(file, part) {
			t.Errorf("no %q in the configuration\n%s", part, file)
		}
	}
	if agents, others := bothDaemonSets(t, all); len(agents) != 1 || len(others) != 1 || !agents[0].Spec.Template.Spec.HostPID {
		t.Errorf("%d DaemonSets of the agent, %d others", len(agents), len(others))
	}
}

// A kustomization that renames the objects and moves them keeps the admission policies: each is its binding's, and matches the account. Otherwise
// it would not be in force, without a sign.
func TestRenamedAccountHasItsPolicies(t *testing.T) {
	for component, count := range map[string]int{"dra": 1, "hand-over": 2, "dra+hand-over/rights": 3} {
		for _, change := range []string{"namePrefix: prod-", "namePrefix: x", "nameSuffix: -a", "namePrefix: a-\nnameSuffix: -b\nnamespace: gpus"} {
			policies, bound := map[string]admissionv1.ValidatingAdmissionPolicy{}, 0
			var account corev1.ServiceAccount
			all := documents(t, kustomize(t, component, change))
			for _, o := range all {
				switch o["kind"] {
				case "ValidatingAdmissionPolicy":
					policy := strict[admissionv1.ValidatingAdmissionPolicy](t, o)
					policies[policy.Name] = policy
				case "ServiceAccount":
					account = strict[corev1.ServiceAccount](t, o)
				}
			}
			for _, o := range all {
				if o["kind"] == "ValidatingAdmissionPolicyBinding" {
					binding := strict[admissionv1.ValidatingAdmissionPolicyBinding](t, o)
					if _, found := policies[binding.Spec.PolicyName]; !found {
						t.Errorf("%s, %s: the binding has policy %q", component, change, binding.Spec.PolicyName)
					}
					bound++
				}
			}
			if len(policies) != count || bound != count {
				t.Errorf("%s, %s: %d policies, %d bindings, want %d", component, change, len(policies), bound, count)
			}
			user := "system:serviceaccount:" + account.Namespace + ":" + account.Name
			for name, policy := range policies {
				condition := regexp.MustCompile(`^request\.userInfo\.username\.matches\('(.*)'\)$`).FindStringSubmatch(policy.Spec.MatchConditions[0].Expression)
				if condition == nil || account.Name == "tandem-k8s-gpu" || !regexp.MustCompile(condition[1]).MatchString(user) {
					t.Errorf("%s, %s: %s: %s is not matched by %q", component, change, name, user, policy.Spec.MatchConditions[0].Expression)
				}
			}
		}
	}
}

// comparable returns the DaemonSet and the text of the policy file. What differs on purpose is left out: kustomize gives the ConfigMap a
// name of its content, and the chart the pods an annotation of it.
func comparable(t *testing.T, all []object) (d appsv1.DaemonSet, file string) {
	t.Helper()
	d = daemonSets(t, all)[0]
	var configMap string
	for _, o := range all {
		if o["kind"] == "ConfigMap" {
			c := strict[corev1.ConfigMap](t, o)
			configMap, file = c.Name, c.Data["policy.yaml"]
			if c.Namespace != d.Namespace {
				t.Errorf("the ConfigMap is in %q", c.Namespace)
			}
		}
	}
	if file != "" && d.Spec.Template.Annotations["checksum/config"] == "" && !strings.HasPrefix(configMap, "tandem-policy-") {
		t.Error("another policy does not replace the pods")
	}
	delete(d.Spec.Template.Annotations, "checksum/config")
	if len(d.Spec.Template.Annotations) == 0 {
		d.Spec.Template.Annotations = nil
	}
	for _, v := range d.Spec.Template.Spec.Volumes {
		if v.ConfigMap != nil && v.ConfigMap.Name == configMap {
			v.ConfigMap.Name = ""
		}
	}
	return d, file
}

// otherObjects returns the objects that comparable leaves out, by kind and name.
func otherObjects(all []object) map[string]object {
	rest := map[string]object{}
	for _, o := range all {
		if kind := o["kind"].(string); kind != "DaemonSet" && kind != "ConfigMap" {
			meta := o["metadata"].(object)
			if kind == "DeviceClass" {
				delete(meta, "labels") // the component has the output of "k8s-gpu classes"
			}
			if kind == "ServiceAccount" {
				delete(meta, "annotations") // for Helm
			}
			if kind == "ValidatingAdmissionPolicy" { // a kustomization may rename the account
				agent := o["spec"].(object)["matchConditions"].([]any)[0].(object)
				agent["expression"] = strings.ReplaceAll(agent["expression"].(string), ":[^:]*tandem-k8s-gpu[^:]*$", ":tandem-k8s-gpu$")
			}
			rest[kind+" "+meta["name"].(string)] = o
		}
	}
	return rest
}

func byName[T any]() cmp.Option {
	return cmpopts.SortSlices(func(a, b T) bool { return nameOf(a) < nameOf(b) })
}

func nameOf(item any) string {
	switch i := item.(type) {
	case corev1.EnvVar:
		return i.Name
	case corev1.Volume:
		return i.Name
	case corev1.VolumeMount:
		return i.MountPath
	}
	return ""
}

// kustomize does what "kubectl kustomize" does with deploy/kustomization.yaml, this component, and more lines. "a+b" is the component a, and then b,
// which the file does not list.
func kustomize(t *testing.T, component string, more ...string) string {
	t.Helper()
	text, err := tryKustomize(t, component, more...)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func tryKustomize(t *testing.T, component string, more ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(deploy)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "kustomization.yaml")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	component, also, both := strings.Cut(component, "+")
	lines := strings.Split(string(text), "\n")
	i := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, "  # - "+component+" ") })
	if i < 0 {
		t.Fatalf("deploy/kustomization.yaml does not offer %s", component)
	}
	lines[i] = strings.Replace(lines[i], "# ", "", 1)
	if both {
		lines[i] += "\n  - " + also
	}
	if err := os.WriteFile(path, []byte(strings.Join(append(lines, more...), "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	resources, err := krusty.MakeKustomizer(&krusty.Options{PluginConfig: types.DisabledPluginConfig()}).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return "", err
	}
	out, err := resources.AsYaml()
	return string(out), err
}
