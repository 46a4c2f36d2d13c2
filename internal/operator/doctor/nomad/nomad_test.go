package nomad

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// The docker driver of Nomad 2.0.4 and later refuses the ipc_mode that tasks with MPS need, unless its configuration allows it.
func TestIPCMode(t *testing.T) {
	mps := report.Report{Devices: []report.Device{{ID: "GPU-1", Pool: "gpu.mps", Sharing: "mps"}, {ID: "GPU-2", Pool: "gpu", Sharing: "exclusive"}}}
	const allowed = `plugin "docker" { config { allowed_modes { ipc = ["private", "host"] } } }`
	for name, c := range map[string]struct {
		version, config string
		offered         report.Report
		warns           bool
	}{
		"2.0.3":            {"2.0.3", "", mps, false},
		"2.0.4":            {"2.0.4", "", mps, true},
		"2.1.0-beta.1":     {"2.1.0-beta.1", "", mps, true},
		"1.11.7":           {"1.11.7", "", mps, false},
		"1.11.8+ent":       {"1.11.8+ent", "", mps, true},
		"unknown":          {"", "", mps, false},
		"allowed":          {"2.0.5", allowed, mps, false},
		"another allowed":  {"2.0.5", `plugin "docker" { config { allowed_modes { ipc = ["private"] } } }`, mps, true},
		"privileged":       {"2.0.5", `plugin "docker" { config { allow_privileged = true } }`, mps, false},
		"allowed, in JSON": {"2.0.5", `{"plugin": {"docker": {"config": {"allowed_modes": {"ipc": ["host"]}}}}}`, mps, false},
		"no MPS":           {"2.0.5", "", report.Report{Devices: mps.Devices[1:]}, false},
	} {
		config := agentConfig{Files: []string{"/etc/nomad.d/nomad.hcl"}, Plugins: map[string]plugin{}}
		keys, err := clientconfig.Decode("nomad.hcl", []byte(c.config))
		if err != nil {
			t.Fatal(err)
		}
		config.merge(keys)
		f := &doctor.Facts{Driver: c.offered, Processes: []doctor.Process{{PID: 7, Name: "dockerd"}}}
		o := Options{Version: func(string) string { return c.version }}
		got := o.docker(f, config, doctor.Process{PID: 8, Name: "nomad"})
		if c.version == "" { // a note about the rule
			if len(got) != 1 || got[0].Severity != doctor.Note {
				t.Errorf("%s: %+v", name, got)
			}
			continue
		}
		if c.warns != (len(got) == 1) || c.warns && (got[0].Severity != doctor.Warning || !strings.Contains(got[0].Found, "gpu.mps") || !strings.Contains(got[0].Remedy, "allowed_modes")) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// The files are merged as Nomad does, whatever their syntax; flags have precedence.
func TestRead(t *testing.T) {
	root := t.TempDir()
	write(t, root+"/etc/nomad.d/a.hcl", `
data_dir = "/opt/nomad" # of the package
client { enabled = true }
plugin "gpus" { config { state_dir = "/var/lib/tandem"  xids = { "63" = "ignore" } } }
plugin "docker" { config { volumes { enabled = true } } }
`)
	write(t, root+"/etc/nomad.d/b.json", `{"plugin_dir": "/srv/plugins", "plugin": [{"gpus": {"config": {"mig_strategy": "mixed"}, "arg": []}}]}`)
	write(t, root+"/etc/nomad.d/ignored.txt", "{{{")
	write(t, root+"/srv/x.hcl", `client { enabled = "false" }`)
	f := new(doctor.Facts)
	f.HostRoot = root
	line := parseCommandLine([]string{"agent", "-config=/etc/nomad.d", "--config", "x.hcl", "-client", "-log-level", "debug"})
	line.workDir = "/srv"
	got, err := line.read(f)
	want := agentConfig{
		Files: []string{"/etc/nomad.d/a.hcl", "/etc/nomad.d/b.json", "/srv/x.hcl"}, Client: false, DataDir: "/opt/nomad", PluginDir: "/srv/plugins",
		Plugins: map[string]plugin{
			"gpus":   {Config: map[string]any{"mig_strategy": "mixed"}, Unknown: []string{"arg"}},
			"docker": {Config: map[string]any{"volumes": []map[string]any{{"enabled": true}}}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(err, diff)
	}
	if got := parseCommandLine([]string{"agent", "-dev", "-plugin-dir=/p", "-data-dir", "/d"}); got.pluginDir != "/p" || got.dataDir != "/d" || !got.dev {
		t.Errorf("%+v", got)
	}
	if _, err := (commandLine{configs: []string{"/nowhere"}}).read(f); err == nil {
		t.Error("a file that does not exist is read")
	}
	write(t, root+"/srv/no-text.json", `{"\x0`)
	if _, err := (commandLine{configs: []string{"/srv/no-text.json"}}).read(f); err == nil || !strings.Contains(err.Error(), "/srv/no-text.json: neither HCL nor JSON") {
		t.Error(err)
	}
}

// Block has the keys of the block whose file is this plugin, with mappings as Nomad passes them.
func TestBlock(t *testing.T) {
	root := t.TempDir()
	write(t, root+"/etc/nomad.d/a.hcl", `
data_dir = "/opt/nomad"
plugin "nomad-device-nvidia" { config { enabled = false } }
plugin "nomad-gpu-2" { config { driver_root = "/run/nvidia/driver"  xids = { "63" = "ignore" } } }
`)
	write(t, root+"/opt/nomad/plugins/nomad-gpu-2", "")
	write(t, root+"/opt/nomad/plugins/nomad-device-nvidia", "")
	want := map[string]any{"driver_root": "/run/nvidia/driver", "xids": map[string]any{"63": "ignore"}}
	if diff := cmp.Diff(want, Block(root, root+"/proc")); diff != "" {
		t.Error(diff)
	}
	if got := Block(root+"/nowhere", root+"/proc"); got != nil {
		t.Errorf("%v without a configuration", got)
	}
}
