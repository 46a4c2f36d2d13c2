package chart

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
)

// A value that is null, with which Helm removes the default, is refused in one line of the schema, or has the meaning that values.yaml gives it.
func TestEachValueMayBeNull(t *testing.T) {
	c, err := load()
	if err != nil {
		t.Fatal(err)
	}
	accepted := 0
	for _, path := range paths(c.Values, "") {
		given := values{}
		at := given
		names := strings.Split(path, ".")
		for _, name := range names[:len(names)-1] {
			at[name] = values{}
			at = at[name].(values)
		}
		last := names[len(names)-1]
		at[last] = nil
		if _, err := render(t, given); err == nil {
			accepted++
		} else if lines := problems(err); len(lines) != 1 || !strings.Contains(lines[0], "missing property '"+last+"'") {
			t.Errorf("%s: null: %v", path, err)
		}
	}
	if accepted < 40 {
		t.Errorf("only %d values may be null", accepted)
	}
}

// paths returns the sections and values of a mapping.
func paths(m values, prefix string) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(m)) {
		all = append(all, prefix+name)
		if section, is := m[name].(values); is {
			all = append(all, paths(section, prefix+name+".")...)
		}
	}
	return all
}

// Names that YAML would read as numbers or booleans are text, and a value has no effect beyond its field.
func TestTextIsText(t *testing.T) {
	const class = "a: b\n      hostPID: true"
	all := objects(t, values{
		"fullnameOverride": "123", "namespaceOverride": "1e3", "serviceAccount": values{"create": true, "name": "7"},
		"priorityClassName": class, "runtimeClassName": "true", "networkPolicy": values{"enabled": true},
	})
	for _, o := range all {
		m := o["metadata"].(object)
		if _, is := m["name"].(string); !is || m["namespace"] != "1e3" {
			t.Errorf("%s: metadata %v", o["kind"], m)
		}
	}
	pod := daemonSets(t, all)[0].Spec.Template.Spec
	if pod.PriorityClassName != class || *pod.RuntimeClassName != "true" || pod.ServiceAccountName != "7" || pod.HostPID {
		t.Errorf("pod %+v", pod)
	}
}

// A read-only mount leaves what is mounted below it writable, such as the host's /dev/shm below /driver-root/dev. So each mount of a folder of
// the host is recursively read-only, but for those of a driver that may be mounted later: Kubernetes has either of the two (core/validation,
// validateMountRecursiveReadOnly).
func TestReadOnlyIsRecursive(t *testing.T) {
	for name, set := range valueSets(t) {
		for _, d := range daemonSets(t, objects(t, set)) {
			pod := d.Spec.Template.Spec
			ofHost := map[string]bool{}
			for _, v := range pod.Volumes {
				ofHost[v.Name] = v.HostPath != nil
			}
			for _, m := range pod.Containers[0].VolumeMounts {
				if !m.ReadOnly || !ofHost[m.Name] {
					continue
				}
				later := m.Name == "driver-root"
				recursive := m.RecursiveReadOnly != nil && *m.RecursiveReadOnly == corev1.RecursiveReadOnlyIfPossible
				if recursive == later || (m.MountPropagation != nil) != later {
					t.Errorf("%s: %+v", name, m)
				}
			}
		}
	}
}

// Pods belong to one DaemonSet, also by its selector.
func TestSelectorsAreDisjoint(t *testing.T) {
	for name, set := range valueSets(t) {
		agents, mps := bothDaemonSets(t, objects(t, set))
		sets := slices.Concat(agents, mps)
		for _, pods := range sets {
			for _, d := range sets {
				if contains(pods.Spec.Template.Labels, d.Spec.Selector.MatchLabels) != (d.Name == pods.Name) {
					t.Errorf("%s: the selector of %s is %v, pods of %s have %v", name, d.Name, d.Spec.Selector.MatchLabels, pods.Name, pods.Spec.Template.Labels)
				}
			}
		}
	}
}

// The constraints of OpenShift allow what the pods use, and no more.
func TestConstraintsAreThePods(t *testing.T) {
	all := objects(t, read(t, "testdata/values/openshift.yaml"))
	pod := daemonSets(t, all)[0].Spec.Template.Spec
	c := pod.Containers[0].SecurityContext
	if !slices.Equal(c.Capabilities.Add, []corev1.Capability{"SYS_ADMIN", "SYSLOG"}) || !slices.Equal(c.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("capabilities %+v", c.Capabilities)
	}
	i := slices.IndexFunc(all, func(o object) bool { return o["kind"] == "SecurityContextConstraints" })
	for key, want := range map[string]any{
		"allowedCapabilities": []any{"SYSLOG", "SYS_ADMIN"}, "volumes": []any{"configMap", "emptyDir", "hostPath"}, "allowHostPID": pod.HostPID,
		"allowHostNetwork": pod.HostNetwork, "allowPrivilegedContainer": *c.Privileged, "allowPrivilegeEscalation": *c.AllowPrivilegeEscalation,
	} {
		if got := all[i][key]; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", key, got, want)
		}
	}
}

// The chart refuses the folders of the host that the agent would refuse, which sees them at other paths.
func TestSystemFoldersAreTheAgents(t *testing.T) {
	refused := 0
	for _, path := range []string{
		"/", "//", "/etc", "/etc/", "/etc/tandem", "/usr/share/tandem", "/proc/1", "/lib64/x", "/library", "/bin", "/var", "/var/lib", "/var/tandem", "/var/lib/tandem",
		"/var/run/../run", "/run", "/run/tandem", "/tmp", "/home", "/home/tandem", "/dev/shm", "/dev/shm/x", "/boot/x", "/data", "/data/tandem",
	} {
		flags := config.NewFlags(config.KubernetesSpecs())
		if err := flags["mps-root"].Set(path); err != nil {
			t.Fatal(err)
		}
		_, want := config.ReadKubernetes(flags, config.Environment{LookupEnv: func(string) (string, bool) { return "", false }, CheckAddress: httpserver.CheckAddress})
		if _, err := render(t, values{"mps": values{"root": path}}); (err == nil) != (want == nil) {
			t.Errorf("%s: the chart: %v; the agent: %v", path, err, want)
		}
		if want != nil {
			refused++
		}
	}
	if refused < 10 {
		t.Errorf("only %d are refused", refused)
	}
}

// A name may be as long as the value of a label, which it is, too.
func TestLongestName(t *testing.T) {
	name := strings.Repeat("a", 63)
	for _, d := range daemonSets(t, objects(t, values{"fullnameOverride": name})) {
		if problems := validation.IsValidLabelValue(d.Spec.Selector.MatchLabels["app.kubernetes.io/name"]); d.Name != name || len(problems) > 0 {
			t.Errorf("%s: %q", d.Name, problems)
		}
	}
}
