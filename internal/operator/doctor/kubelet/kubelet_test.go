package kubelet

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/containerruntime"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
)

// expect compares a finding with a severity and a part of its text.
func expect(t *testing.T, name string, findings []doctor.Finding, severity doctor.Severity, text string) {
	t.Helper()
	if len(findings) != 1 || findings[0].Severity != severity || !strings.Contains(findings[0].Found, text) || findings[0].Place == "" ||
		(findings[0].Remedy == "") == (severity == doctor.Problem || severity == doctor.Warning) {
		t.Errorf("%s: %+v, want a %s: %s", name, findings, severity, text)
	}
}

// What the container runtime reports decides whether containers can get their devices in the ways that the agent uses.
func TestRuntime(t *testing.T) {
	byRuntime := []report.Injection{{Pools: []string{"gpu"}, Runtime: true}}
	byAll := []report.Injection{{Pools: []string{"gpu"}, Runtime: true, CDI: true}}
	for name, c := range map[string]struct {
		options    Options
		injections []report.Injection
		info       containerruntime.Info
		severity   doctor.Severity
		text       string
	}{
		"CDI off and needed":     {Options{CDIOnly: true}, nil, containerruntime.Info{Name: "containerd", Version: "1.7.29", CDI: new(false)}, doctor.Problem, "containerd 1.7.29: CDI is switched off"},
		"CDI off":                {Options{}, byAll, containerruntime.Info{Name: "containerd", Version: "1.7.29", CDI: new(false)}, doctor.OK, "CDI is switched off"},
		"CDI on":                 {Options{CDIOnly: true}, nil, containerruntime.Info{Name: "containerd", Version: "v2.2.0", CDI: new(true)}, doctor.OK, "v2.2.0"},
		"no runtime nvidia":      {Options{}, byRuntime, containerruntime.Info{Name: "containerd", Runtimes: []string{"runc"}}, doctor.Problem, "has no runtime nvidia"},
		"CRI-O may use a hook":   {Options{}, byRuntime, containerruntime.Info{Name: "cri-o", Runtimes: []string{"crun"}}, doctor.Warning, "has no runtime nvidia"},
		"not the default":        {Options{}, byRuntime, containerruntime.Info{Name: "containerd", Runtimes: []string{"nvidia", "runc"}, DefaultRuntime: "runc"}, doctor.Note, "runtimeClassName: nvidia"},
		"the default":            {Options{}, byRuntime, containerruntime.Info{Name: "containerd", Runtimes: []string{"nvidia", "runc"}, DefaultRuntime: "nvidia"}, doctor.OK, "containerd"},
		"runtimes not reported":  {Options{}, byRuntime, containerruntime.Info{Name: "containerd"}, doctor.OK, "containerd"},
		"devices in another way": {Options{}, byAll, containerruntime.Info{Name: "containerd", Runtimes: []string{"runc"}}, doctor.OK, "containerd"},
	} {
		f := &doctor.Facts{Driver: report.Report{Injections: c.injections}}
		expect(t, name, c.options.judge(f, "/run/containerd.sock", c.info), c.severity, c.text)
	}
	expect(t, "no socket", Options{CRISocket: "/nowhere/containerd.sock"}.runtime(t.Context(), new(doctor.Facts)), doctor.Warning, "no answer")
}

// A resource of the agent with the devices of another plugin is a problem, other resources and units of shared devices are not.
func TestForeignDevices(t *testing.T) {
	f := &doctor.Facts{Agent: doctor.Agent{Running: true, Report: report.Report{Devices: []report.Device{{ID: "GPU-1", Pool: "gpu"}, {ID: "GPU-2", Pool: "gpu.shared"}}}}}
	for name, c := range map[string]struct {
		devices  map[string]string
		severity doctor.Severity
		text     string
	}{
		"own":     {map[string]string{"nvidia.com/gpu": "GPU-1", "nvidia.com/gpu.shared": "GPU-2::3", "other.com/gpu": "x"}, doctor.OK, "3 resources"},
		"foreign": {map[string]string{"nvidia.com/gpu": "nvidia0"}, doctor.Problem, "nvidia.com/gpu has devices of another plugin: nvidia0"},
	} {
		dir := t.TempDir()
		kubelet := kubelettest.New(dir)
		check.NoError(t, kubelet.Start())
		defer kubelet.Stop()
		socket := filepath.Join(dir, "p.sock")
		api, err := kubelettest.ServePodResources(socket)
		check.NoError(t, err)
		defer api.Close()
		for resource, id := range c.devices {
			api.Offer(resource, 0, id)
		}
		o := Options{KubeletSocket: kubelet.Socket(), PodResourcesSocket: socket}
		expect(t, name, o.podResources(t.Context(), f), c.severity, c.text)

		registered := map[string][]string{}
		for resource, id := range c.devices {
			registered[resource] = []string{id}
		}
		text, err := json.Marshal(map[string]any{"Data": map[string]any{"RegisteredDevices": registered}, "Checksum": 1})
		check.NoError(t, err)
		check.NoError(t, os.WriteFile(filepath.Join(dir, checkpointName), text, 0o600))
		want := c.text
		if c.severity == doctor.OK {
			want = "accepts connections"
		}
		expect(t, name+", checkpoint", o.kubelet(t.Context(), f), c.severity, want)
	}
}
