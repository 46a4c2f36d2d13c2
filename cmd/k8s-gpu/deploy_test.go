package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/node/limitserver"
	"github.com/tandem-gpu/tandem/internal/node/resetserver"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/test/check"
)

// daemonSet is what the tests look at in a DaemonSet, or in a patch of it.
type daemonSet struct {
	Spec struct {
		UpdateStrategy struct {
			RollingUpdate struct {
				MaxUnavailable int  `yaml:"maxUnavailable"`
				MaxSurge       *int `yaml:"maxSurge"`
			} `yaml:"rollingUpdate"`
		} `yaml:"updateStrategy"`
		Template struct {
			Spec struct {
				Grace      int    `yaml:"terminationGracePeriodSeconds"`
				HostPID    bool   `yaml:"hostPID"`
				Account    string `yaml:"serviceAccountName"`
				Token      bool   `yaml:"automountServiceAccountToken"`
				Containers []container
				Init       []container `yaml:"initContainers"`
				Volumes    []struct {
					Name     string
					HostPath struct{ Path, Type string } `yaml:"hostPath"`
				}
			}
		}
	}
}

type container struct {
	Name          string
	Lifecycle     any
	LivenessProbe struct {
		PeriodSeconds    int `yaml:"periodSeconds"`
		TimeoutSeconds   int `yaml:"timeoutSeconds"`
		FailureThreshold int `yaml:"failureThreshold"`
		Exec             struct{ Command []string }
	} `yaml:"livenessProbe"`
	Args []string
	Env  []struct {
		Name, Value string
		ValueFrom   struct {
			FieldRef struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
		} `yaml:"valueFrom"`
	}
	VolumeMounts []struct {
		MountPath string `yaml:"mountPath"`
		ReadOnly  bool   `yaml:"readOnly"`
		Patch     string `yaml:"$patch"`
	} `yaml:"volumeMounts"`
	Resources struct {
		Limits struct{ Memory string }
	}
	SecurityContext struct {
		Privileged               bool
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		Capabilities             struct{ Add, Drop []string }
	} `yaml:"securityContext"`
}

func (c container) env() map[string]string {
	env := map[string]string{}
	for _, e := range c.Env {
		if env[e.Name] = e.Value; e.ValueFrom.FieldRef.FieldPath == "spec.nodeName" {
			env[e.Name] = "node1"
		}
	}
	return env
}

func (c container) mounts() map[string]bool {
	mounts := map[string]bool{}
	for _, m := range c.VolumeMounts {
		mounts[m.MountPath] = m.Patch != "delete"
	}
	return mounts
}

// The DaemonSet gives the agent nothing that it refuses, and mounts what it looks for.
func TestDaemonSet(t *testing.T) {
	var d daemonSet
	manifest(t, "../../deploy/daemonset.yaml", &d)
	c := d.Spec.Template.Spec.Containers[0]
	s, err := resolveAll(t, c.Args, c.env(), "")
	check.NoError(t, err)
	if len(s.Notes) > 0 {
		t.Errorf("settings without effect: %v", s.Notes)
	}
	mounts := c.mounts()
	for _, path := range []string{"/var/lib/kubelet/device-plugins", s.ContainerRoot + "/usr", s.ContainerRoot + "/dev", s.Health.StateDir, s.CDI.Folder} {
		if !mounts[path] {
			t.Errorf("%s is not mounted: %v", path, mounts)
		}
	}
	for _, m := range c.VolumeMounts {
		if m.MountPath == s.CDI.Folder && m.ReadOnly || strings.HasPrefix(m.MountPath, s.ContainerRoot) && !m.ReadOnly {
			t.Errorf("%+v", m)
		}
	}
	for _, v := range d.Spec.Template.Spec.Volumes { // in a specification paths are those of the host
		if v.Name == "cdi" && (v.HostPath.Path != s.CDI.Folder || v.HostPath.Type != "DirectoryOrCreate") {
			t.Errorf("%+v", v)
		}
	}
	if !s.Strategies.Auto || c.SecurityContext.Privileged {
		t.Errorf("strategies %s, %+v", s.Strategies, c.SecurityContext)
	}
	if grace := time.Duration(d.Spec.Template.Spec.Grace) * time.Second; grace < 2*agent.ShutdownTimeout || c.Lifecycle != nil {
		t.Errorf("%v to stop in, lifecycle %v; it takes %v and needs no help", grace, c.Lifecycle, agent.ShutdownTimeout)
	}
	probe, reload := c.LivenessProbe, agent.ShutdownTimeout+agent.RestartPause
	if unheard := reload + time.Duration(probe.TimeoutSeconds)*time.Second; time.Duration(probe.PeriodSeconds*(probe.FailureThreshold-1))*time.Second < unheard {
		t.Errorf("liveness probe %+v ends an agent that reloads, which takes %v", probe, reload)
	}
	if r := d.Spec.UpdateStrategy.RollingUpdate; r.MaxUnavailable != 1 || r.MaxSurge == nil || *r.MaxSurge != 0 {
		t.Errorf("rolling update %+v: want one after the other", r)
	}
	if s.Operations.HTTPAddress != ":9410" {
		t.Errorf("probes go to 9410, the agent listens on %s", s.Operations.HTTPAddress)
	}
}

// The parts that can be added give it nothing that it refuses either, and only the rights listed here.
func TestDaemonSetComponents(t *testing.T) {
	base := component(t, "../../deploy/daemonset.yaml")
	policy, err := os.ReadFile("../../deploy/policy/policy.yaml")
	check.NoError(t, err)
	for name, want := range map[string]struct {
		mount      string
		adds       []string
		writes     bool // the mount is not read-only
		hostPID    bool
		privileged bool   // allowPrivilegeEscalation must be true, then, which the base sets to false
		account    string // with a token of the API server
	}{
		"policy": {mount: "/etc/tandem"}, "mps": {mount: "/mps"}, "mig": {adds: []string{"SYS_ADMIN", "SYSLOG"}}, "selinux": {},
		"driver-container": {mount: "/driver-root"}, "device-nodes": {}, "cdi": {privileged: true},
		"reservation-check": {hostPID: true}, "owners": {hostPID: true, mount: "/var/log/pods"},
		"prove": {mount: "/etc/tandem"}, "prove/pod": {hostPID: true}, "reset": {mount: "/etc/tandem"}, "reset/pod": {hostPID: true},
		"limits-reader": {hostPID: true, mount: "/sys/fs/cgroup /var/log/pods"},
		"dra":           {mount: "/var/lib/kubelet/plugins_registry", writes: true, account: "tandem-k8s-gpu"},
		"hand-over":     {account: "tandem-k8s-gpu"}, "hand-over/rights": {},
		"node-labels": {mount: "/etc/kubernetes/node-feature-discovery/features.d", writes: true},
	} {
		d := patch(t, "../../deploy/"+name+"/kustomization.yaml")
		if d.Spec.Template.Spec.Containers == nil { // hand-over, which has hand-over/rights for that
			d.Spec.Template.Spec.Containers = []container{{Name: base.Name}}
		}
		c := d.Spec.Template.Spec.Containers[0]
		if d.Spec.Template.Spec.HostPID != want.hostPID {
			t.Errorf("%s: hostPID is %t", name, !want.hostPID)
		}
		if pod := d.Spec.Template.Spec; pod.Account != want.account || pod.Token != (want.account != "") {
			t.Errorf("%s: account %q, token %t", name, pod.Account, pod.Token)
		}
		if c.Name != base.Name || !slices.Equal(c.SecurityContext.Capabilities.Add, want.adds) {
			t.Errorf("%s: container %s, capabilities %v", name, c.Name, c.SecurityContext.Capabilities)
		}
		if sc := c.SecurityContext; sc.Privileged != want.privileged || (sc.AllowPrivilegeEscalation != nil && *sc.AllowPrivilegeEscalation) != want.privileged {
			t.Errorf("%s: %+v", name, sc)
		}
		for _, m := range c.VolumeMounts {
			if m.Patch != "delete" && (!slices.Contains(strings.Fields(want.mount), m.MountPath) || m.ReadOnly == want.writes) {
				t.Errorf("%s mounts %+v", name, m)
			}
		}
		env := base.env()
		maps.Copy(env, c.env())
		if env["CONFIG_FILE"] != "" && filepath.Dir(env["CONFIG_FILE"]) != want.mount {
			t.Errorf("%s: %s is not mounted", name, env["CONFIG_FILE"])
		}
		if file := env["FEATURES_FILE"]; file != "" && filepath.Dir(file) != want.mount {
			t.Errorf("%s: %s is not mounted", name, file)
		}
		delete(env, "CONFIG_FILE")
		text := string(policy)
		if want.account != "" { // the API dra has no requests for several units of a device
			text = strings.Replace(text, "failRequestsGreaterThanOne: true", "failRequestsGreaterThanOne: false", 1)
		}
		if s, err := resolveAll(t, base.Args, env, text); err != nil || len(s.Notes) > 0 {
			t.Errorf("%s: %v, settings without effect: %q", name, err, s.Notes)
		}
	}
}

// The pod of the MPS daemons finds the agents' sockets, has no token, and writes in their folder and in that of the daemons only.
func TestDaemonSetOfMPS(t *testing.T) {
	var d daemonSet
	manifest(t, "../../deploy/mps/daemons.yaml", &d)
	pod := d.Spec.Template.Spec
	c := pod.Containers[0]
	s, err := resolveAll(t, nil, c.env(), "")
	check.NoError(t, err)
	if len(s.Notes) > 0 || !slices.Equal(c.Args, []string{"mps-daemon"}) {
		t.Errorf("args %q, settings without effect: %v", c.Args, s.Notes)
	}
	if !pod.HostPID || pod.Token || pod.Account != "" || !c.SecurityContext.Privileged {
		t.Errorf("%+v", pod)
	}
	writable := map[string]bool{}
	for _, m := range c.VolumeMounts {
		writable[m.MountPath] = !m.ReadOnly
	}
	if want := map[string]bool{s.Health.StateDir: true, "/mps": true, "/dev/shm": true}; !maps.Equal(writable, want) {
		t.Errorf("mounts %v, want %v", writable, want)
	}
	for _, v := range pod.Volumes {
		if v.Name == "mps-root" && v.HostPath.Path != s.MPSRoot || v.Name == "mps-shm" && v.HostPath.Path != s.MPSRoot+"/shm" {
			t.Errorf("%+v, want it below %s", v, s.MPSRoot)
		}
	}
}

// The pod that resets GPUs finds the agents' socket folder and the driver, has no token and no GPU of a container runtime, and is given the time of a reset.
func TestDaemonSetOfResets(t *testing.T) {
	var d daemonSet
	manifest(t, "../../deploy/reset/pod/server.yaml", &d)
	pod := d.Spec.Template.Spec
	c := pod.Containers[0]
	s, err := resolveAll(t, nil, c.env(), "")
	check.NoError(t, err)
	if len(s.Notes) > 0 || !slices.Equal(c.Args, []string{"reset-server"}) || c.env()["NVIDIA_VISIBLE_DEVICES"] != "void" {
		t.Errorf("args %q, environment %v, settings without effect: %v", c.Args, c.env(), s.Notes)
	}
	if !pod.HostPID || pod.Token || pod.Account != "" || !c.SecurityContext.Privileged {
		t.Errorf("%+v", pod)
	}
	if grace := time.Duration(pod.Grace) * time.Second; grace < resetserver.StopWithin+5*time.Second {
		t.Errorf("%v to stop in, and a reset takes up to %v", grace, resetserver.StopWithin)
	}
	writable := map[string]bool{}
	for _, m := range c.VolumeMounts {
		writable[m.MountPath] = !m.ReadOnly
	}
	if want := map[string]bool{s.Health.StateDir: true, s.ContainerRoot: false}; !maps.Equal(writable, want) {
		t.Errorf("mounts %v, want %v", writable, want)
	}
	for _, v := range pod.Volumes {
		if v.Name == "driver-root" && v.HostPath.Path != s.DriverRoot {
			t.Errorf("%+v", v)
		}
	}
}

// A privileged container that is led to use much memory ends alone, and not the node.
func TestPrivilegedContainersHaveAMemoryLimit(t *testing.T) {
	for _, file := range []string{"../../deploy/mps/daemons.yaml", "../../deploy/reset/pod/server.yaml"} {
		var d daemonSet
		manifest(t, file, &d)
		for _, c := range slices.Concat(d.Spec.Template.Spec.Init, d.Spec.Template.Spec.Containers) {
			if !c.SecurityContext.Privileged || c.Resources.Limits.Memory == "" {
				t.Errorf("%s: container %s: %+v, limit %q", file, c.Name, c.SecurityContext, c.Resources.Limits.Memory)
			}
		}
	}
}

// The pod that sets limits finds the agents' socket folder, the driver and the host's control groups, and has two capabilities and no token.
func TestDaemonSetOfLimits(t *testing.T) {
	var d daemonSet
	manifest(t, "../../deploy/limits/server.yaml", &d)
	pod := d.Spec.Template.Spec
	c := pod.Containers[0]
	s, err := resolveAll(t, nil, c.env(), "")
	check.NoError(t, err)
	if len(s.Notes) > 0 || !slices.Equal(c.Args, []string{"limit-server"}) || !slices.Equal(c.LivenessProbe.Exec.Command, []string{"/usr/bin/k8s-gpu", "limit-server", "--ready"}) {
		t.Errorf("args %q, probe %+v, settings without effect: %v", c.Args, c.LivenessProbe, s.Notes)
	}
	if sc := c.SecurityContext; sc.Privileged || sc.AllowPrivilegeEscalation == nil || *sc.AllowPrivilegeEscalation || !sc.ReadOnlyRootFilesystem ||
		!slices.Equal(sc.Capabilities.Add, []string{"SYS_ADMIN", "DAC_OVERRIDE"}) || !slices.Equal(sc.Capabilities.Drop, []string{"ALL"}) {
		t.Errorf("%+v", sc)
	}
	if pod.HostPID || pod.Token || pod.Account != "" {
		t.Errorf("%+v", pod)
	}
	if grace := time.Duration(pod.Grace) * time.Second; grace < limitserver.StopWithin+5*time.Second {
		t.Errorf("%v to stop in, and requests take up to %v", grace, limitserver.StopWithin)
	}
	writable := map[string]bool{}
	for _, m := range c.VolumeMounts {
		writable[m.MountPath] = !m.ReadOnly
	}
	if want := map[string]bool{s.Health.StateDir: true, s.Core.Roots.Cgroup: true, s.ContainerRoot + "/usr": false, s.ContainerRoot + "/dev": false}; !maps.Equal(writable, want) {
		t.Errorf("mounts %v, want %v", writable, want)
	}
}

// A process of user 0 can connect to any socket in a folder that is mounted, also read-only; the container runtime's
// gives away the node. The kubelet's pod-resources API, which changes nothing, is mounted on purpose.
func TestNoSocketOfTheHostIsMounted(t *testing.T) {
	files, err := filepath.Glob("../../deploy/*/kustomization.yaml")
	if err != nil || len(files) < 7 {
		t.Fatal(files, err)
	}
	parts := make([]daemonSet, 2)
	manifest(t, "../../deploy/daemonset.yaml", &parts[0])
	manifest(t, "../../deploy/mps/daemons.yaml", &parts[1])
	for _, file := range files {
		if file != "../../deploy/gpu-fleet/kustomization.yaml" && file != "../../deploy/limits/kustomization.yaml" { // no patch of the DaemonSet
			parts = append(parts, patch(t, file))
		}
	}
	for _, d := range parts {
		for _, v := range d.Spec.Template.Spec.Volumes {
			for _, socket := range []string{
				"/run/containerd/containerd.sock", "/var/run/docker.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock",
				"/run/systemd/private", "/run/dbus/system_bus_socket", "/var/lib/kubelet/pki/kubelet-client-current.pem", "/etc/shadow",
			} {
				if path := v.HostPath.Path; path != "" && strings.HasPrefix(socket, strings.TrimSuffix(path, "/")+"/") {
					t.Errorf("the volume %s of %s has %s", v.Name, path, socket)
				}
			}
		}
	}
}

// resolveAll resolves flags, variables and the text of a configuration file.
func resolveAll(t *testing.T, args []string, env map[string]string, file string) (settings, error) {
	t.Helper()
	flags := config.NewFlags(config.KubernetesSpecs())
	if file != "" {
		path := filepath.Join(t.TempDir(), "c.yaml")
		check.NoError(t, os.WriteFile(path, []byte(file), 0o600))
		args = append(args, "--config-file="+path)
	}
	for _, arg := range args {
		name, value, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		check.NoError(t, flags[name].Set(value))
	}
	return config.ReadKubernetes(flags, config.Environment{
		LookupEnv: func(name string) (string, bool) { v, ok := env[name]; return v, ok }, CheckAddress: httpserver.CheckAddress,
	})
}

func component(t *testing.T, path string) container {
	t.Helper()
	var d daemonSet
	manifest(t, path, &d)
	return d.Spec.Template.Spec.Containers[0]
}

// patch is the patch of the DaemonSet that a component of deploy has.
func patch(t *testing.T, path string) (d daemonSet) {
	t.Helper()
	var k struct{ Patches []struct{ Patch string } }
	manifest(t, path, &k)
	if err := yaml.Unmarshal([]byte(k.Patches[0].Patch), &d); err != nil || len(k.Patches) != 1 {
		t.Fatalf("%s: %v, %d patches", path, err, len(k.Patches))
	}
	return d
}

func manifest(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	check.NoError(t, err)
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}
