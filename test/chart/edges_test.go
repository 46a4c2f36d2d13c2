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

// Of the folders of the host, the agent writes only to those that have its name, or the name of what is in them, below a
// folder for data. A folder that an agent beside the chart's would refuse is none of them.
func TestFoldersOfTheHost(t *testing.T) {
	mps := func(path string) error {
		flags := config.NewFlags(config.KubernetesSpecs())
		if err := flags["mps-root"].Set(path); err != nil {
			return err
		}
		none := func(string) (string, bool) { return "", false }
		_, err := config.ReadKubernetes(flags, config.Environment{LookupEnv: none, CheckAddress: httpserver.CheckAddress})
		return err
	}
	accepted := map[string][]string{
		"stateDir":    {"/var/lib/tandem", "/var/lib/tandem/", "/data/tandem-2/state", "/opt/nomad/tandem", "/mnt/disk/x/gpu-state"},
		"kubeletRoot": {"/var/lib/kubelet", "/var/lib/k0s/kubelet", "/var/snap/microk8s/common/var/lib/kubelet", "/data/kubelet", "/var/kubelet"},
		"mps.root":    {"/run/nvidia/mps", "/var/run/nvidia/mps", "/var/lib/tandem/mps", "/run/mps"},
		"nodeLabels.file": {
			"/etc/kubernetes/node-feature-discovery/features.d/gfd", "/etc/kubernetes/nfd/features.d/gfd", "/var/snap/nfd/features.d/gpu",
		},
	}
	refused := []string{
		"/", "//", "/etc", "/etc/kubernetes/manifests", "/etc/kubernetes/manifests/tandem", "/etc/cron.d/tandem", "/etc/systemd/system/mps", "/usr/share/tandem",
		"/usr/lib/systemd/kubelet", "/proc/1/mps", "/lib64/tandem", "/library/tandem", "/boot/tandem", "/root/.ssh/tandem", "/home/user/tandem", "/dev/shm/mps",
		"/tmp/tandem", "/var", "/var/lib", "/var/spool/cron/tandem", "/var/lib/rancher/k3s/server/manifests", "/var/lib/tandem/../rancher", "/var/lib/x/../../../etc/tandem",
		"/run/systemd/system", "/run/udev/rules.d", "/opt", "/opt/cni/bin", "/var/lib/tandem/../../../run/systemd",
	}
	for key := range accepted {
		of := func(path string) values {
			if key == "nodeLabels.file" && !slices.Contains(accepted[key], path) {
				path += "/features"
			}
			folder, name, nested := strings.Cut(key, ".")
			if !nested {
				return values{key: path}
			}
			return values{folder: values{name: path}}
		}
		for _, path := range accepted[key] {
			if _, err := render(t, of(path)); err != nil {
				t.Errorf("%s: %s is refused: %v", key, path, err)
			}
			if err := mps(path); err != nil {
				t.Errorf("the agent refuses %s: %v", path, err)
			}
		}
		for _, path := range refused {
			if _, err := render(t, of(path)); err == nil {
				t.Errorf("%s: %s is accepted", key, path)
			}
		}
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
