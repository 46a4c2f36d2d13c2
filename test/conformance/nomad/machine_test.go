package nomad

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
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

// ctl scripts the machine while the plugin runs on it.
func (m machine) ctl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command(bin.simctl, append([]string{"-machine", string(m)}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// readings is how often the plugin has taken a full reading of the machine.
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

// config is the config block for the machine, with more keys. History stays with the machine, and who got
// well is believed soon.
func (m machine) config(more map[string]any) map[string]any {
	keys := map[string]any{
		"driver_root": "/nowhere", "fingerprint_period": "1s",
		"state_dir": "", "kernel_log": "off", "health_period": "1s", "recovery_dwell": "1s",
	}
	if m != "" {
		keys["driver_root"], keys["state_dir"] = string(m), filepath.Join(string(m), "state")
		keys["sysfs_root"], keys["procfs_root"] = filepath.Join(string(m), "sys"), filepath.Join(string(m), "proc")
	}
	for k, v := range more {
		keys[k] = v
	}
	return keys
}
