package nomad

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/nomad/nomad/structs/config"
)

// machine is a simulated machine; "" is one without a driver.
type machine string

func install(t testing.TB, name string) machine {
	t.Helper()
	m := machine(t.TempDir())
	cmd := exec.Command(bin.simctl, "install", string(m), name)
	cmd.Dir = "../../.." // it builds the library with the header of go-nvml, a dependency of that module
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("simctl install: %v\n%s", err, out)
	}
	return m
}

// ctl runs simctl on the machine.
func (m machine) ctl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command(bin.simctl, append([]string{"-machine", string(m)}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// readings returns how often the plugin has read the whole machine.
func (m machine) readings(t testing.TB) (n int) {
	t.Helper()
	for line := range strings.Lines(m.ctl(t, "calls")) {
		var count int
		var name string
		if _, err := fmt.Sscan(line, &count, &name); err == nil && strings.HasPrefix(name, "nvmlDeviceGetCount") {
			n += count
		}
	}
	return n
}

// config returns the config block for the machine, with more keys: the state directory is on the machine, and GPUs recover
// soon.
func (m machine) config(more map[string]any) map[string]any {
	keys := map[string]any{
		"driver_root": "/nowhere", "fingerprint_period": "1s",
		"state_dir": "", "kernel_log": "off", "health_period": "1s", "recovery_dwell": "1s",
	}
	if m != "" {
		keys["driver_root"], keys["state_dir"] = string(m), filepath.Join(string(m), "state")
		keys["sysfs_root"], keys["procfs_root"] = filepath.Join(string(m), "sys"), filepath.Join(string(m), "proc")
	}
	maps.Copy(keys, more)
	return keys
}

// policy writes a policy file for the machine, and returns the key with its path.
func (m machine) policy(t testing.TB, text string) map[string]any {
	t.Helper()
	path := filepath.Join(string(m), "policy.yaml")
	if err := os.WriteFile(path, []byte("version: v1\n"+text), 0o644); err != nil {
		t.Fatal(err)
	}
	return map[string]any{"policy_file": path}
}

// edit replaces a text in the description of the machine, on which no plugin runs.
func (m machine) edit(t testing.TB, old, text string) {
	t.Helper()
	path := filepath.Join(string(m), "machine.conf")
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	is := strings.ReplaceAll(string(was), old, text)
	if is == string(was) {
		t.Fatalf("%q is not in %s", old, path)
	}
	if err := os.WriteFile(path, []byte(is), 0o644); err != nil {
		t.Fatal(err)
	}
}

// uuid returns the UUID of the GPU in a slot.
func (m machine) uuid(t testing.TB, slot int) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(string(m), "machine.conf"))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(text)) {
		if id, ok := strings.CutPrefix(line, "uuid = "); ok {
			all = append(all, strings.TrimSpace(id))
		}
	}
	return all[slot]
}

// block is a config block as the agent reads it from its configuration file.
func block(t *testing.T, text string) map[string]any {
	t.Helper()
	var agent struct {
		Plugins []*config.PluginConfig `hcl:"plugin"`
	}
	if err := hcl.Decode(&agent, `plugin "nomad-gpu" { config { `+text+` } }`); err != nil {
		t.Fatal(err)
	}
	return agent.Plugins[0].Config
}
