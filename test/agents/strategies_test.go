package agents

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// newCDIAgent returns k8s-gpu with a configuration file, and with a folder of specifications.
func newCDIAgent(t *testing.T, file string) (a *agent, folder string) {
	t.Helper()
	a = newAgentWithFile(t, "h100x8", file)
	folder = filepath.Join(a.dir, "cdi")
	a.settings["cdi_dir"] = folder
	a.must(os.Mkdir(folder, 0o755))
	return a, folder
}

// cdiNames are the names that the response for a GPU has. It fails if a file of the folder does not define one of them.
func (a *agent) cdiNames(folder string, slot int) (names []string, variable string) {
	a.Helper()
	r, err := a.kubelet.Allocate(a.Context(), resource, a.driver.UUID(slot))
	a.must(err)
	for _, d := range r.GetCdiDevices() {
		kind, device, _ := strings.Cut(d.GetName(), "=")
		text, err := os.ReadFile(filepath.Join(folder, strings.ReplaceAll(kind, "/", "-")+".json"))
		var file struct {
			Kind    string
			Devices []struct{ Name string }
		}
		a.must(err, json.Unmarshal(text, &file))
		if file.Kind != kind || !slices.ContainsFunc(file.Devices, func(d struct{ Name string }) bool { return d.Name == device }) {
			a.Errorf("%s is not in %s", d.GetName(), text)
		}
		names = append(names, d.GetName())
	}
	return names, r.GetEnvs()[inventory.VisibleDevices]
}

// With each strategy of CDI an agent without a driver waits and is ready. When the driver comes, the specification is written before
// the first GPU is listed as healthy.
func TestCDIWithoutADriver(t *testing.T) {
	t.Parallel()
	for _, strategy := range []string{"cdi-cri", "cdi-annotations", "auto"} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			a, folder := newCDIAgent(t, header)
			a.settings["device_list_strategy"] = strategy
			hook := filepath.Join(a.driver.Root, "usr/bin/nvidia-ctk")
			a.must(os.MkdirAll(filepath.Dir(hook), 0o755), os.WriteFile(hook, []byte("#!/bin/true\n"), 0o755))
			a.settings["nvidia_cdi_hook_path"] = hook
			a.must(a.driver.Unload())
			a.start()
			a.ready(200, "no driver")
			if files, err := filepath.Glob(filepath.Join(folder, "*.json")); err != nil || len(files) > 0 {
				t.Errorf("%v, %v", files, err)
			}
			a.must(a.driver.Load())
			a.await("a healthy GPU", func() bool {
				devices, _ := a.kubelet.Devices(resource)
				return len(devices) > 0 && devices[0].GetHealth() == "Healthy"
			})
			if _, err := os.Stat(filepath.Join(folder, "k8s.device-plugin.nvidia.com-gpu.json")); err != nil {
				t.Error("healthy without a specification:", err)
			}
			if names, _ := a.cdiNames(folder, 0); strategy != "cdi-annotations" && len(names) != 1 {
				t.Errorf("names %v", names)
			}
			r := a.report()
			if r.CDI == nil || r.CDI.Folder != folder || r.CDI.Defined != len(r.Devices) || len(r.Injections) != 1 || !r.Injections[0].CDI || r.Injections[0].Configured != strategy {
				t.Errorf("%+v, %+v", r.CDI, r.Injections)
			}
		})
	}
}

// auto is envvar while the hook program is missing, and CDI beside it when the agent finds it.
func TestAutoWithoutHooks(t *testing.T) {
	t.Parallel()
	a, folder := newCDIAgent(t, header)
	a.settings["device_list_strategy"] = "auto"
	hook := filepath.Join(a.driver.Root, "usr/bin/nvidia-ctk")
	a.settings["nvidia_cdi_hook_path"] = hook
	a.startHealthy()
	a.logs("INFO", "device list strategy of auto", "strategies=envvar ", "nvidia-ctk")
	names, variable := a.cdiNames(folder, 0)
	if r := a.report(); len(names) > 0 || variable != a.driver.UUID(0) || r.CDI == nil || r.CDI.Usable || !strings.Contains(r.CDI.Reason, "nvidia-ctk") {
		t.Errorf("names %v, variable %q, %+v", names, variable, r.CDI)
	}
}
