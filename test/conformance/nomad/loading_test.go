package nomad

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/nomad/plugins/base"
)

// The numbers in the names are those of the checklist in the contract that these tests follow.

// Nomad finds one device plugin. The processes that load it and validate the configuration do not call the driver.
func Test01OneDevicePlugin(t *testing.T) {
	m := install(t, "h100x8")
	a := newAgent(t, m.config(nil))
	if a.load != nil {
		t.Fatal(a.load)
	}
	catalog := a.catalog.Catalog()
	if len(catalog) != 1 || len(catalog[base.PluginTypeDevice]) != 1 {
		t.Fatalf("catalog: %+v", catalog)
	}
	p := catalog[base.PluginTypeDevice][0]
	if p.Name != "nvidia-gpu" || p.PluginVersion != "2.0.0" || !slices.Equal(p.PluginApiVersions, []string{"v0.1.0"}) {
		t.Errorf("plugin: %+v", p)
	}
	if calls := m.ctl(t, "calls"); strings.TrimSpace(calls) != "" {
		t.Errorf("the driver was called:\n%s", calls)
	}
	if n := len(a.launches(t)); n != 2 {
		t.Errorf("%d launches to load, want 2", n)
	}
	a.dm.Run()
	defer a.dm.Shutdown()
	a.devices(t, 8, 8)
	if n := len(a.launches(t)); n != 3 {
		t.Errorf("%d launches in all, want 3", n)
	}
}

// A plugin ends in time, also while the driver hangs, and removes its socket.
func Test02EndsInTime(t *testing.T) {
	for name, hang := range map[string]string{"healthy": "", "init hangs": "nvmlInit", "readings hang": "nvmlDeviceGetUUID"} {
		t.Run(name, func(t *testing.T) {
			m := install(t, "h100x8")
			if hang != "" {
				m.ctl(t, "hang", "all", hang)
			}
			a := startAgent(t, m, nil)
			pid := a.launches(t)[2]
			begin := time.Now()
			a.dm.Shutdown()
			if d := time.Since(begin); d >= 2*time.Second {
				t.Errorf("took %s", d)
			}
			if alive(pid) {
				t.Error("still alive")
			}
			if strings.Contains(a.logs.String(), "plugin failed to exit gracefully") {
				t.Error("had to be killed")
			}
			if left, _ := os.ReadDir(filepath.Join(a.dir, "tmp")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// Arguments of the plugin block do not prevent the plugin from being served.
func Test04ArgumentsAreIgnored(t *testing.T) {
	for _, args := range [][]string{{"inspect", "--json"}, {"help"}, {"--nonsense"}} {
		if a := newAgent(t, nil, args...); a.load != nil {
			t.Errorf("%q: %v", args, a.load)
		}
	}
}

func Test05NoDriver(t *testing.T) {
	a := newAgent(t, machine("").config(map[string]any{"state_dir": t.TempDir()}))
	if a.load != nil {
		t.Fatal(a.load)
	}
	begin := time.Now()
	a.dm.Run()
	defer a.dm.Shutdown()
	<-a.dm.WaitForFirstFingerprint(t.Context())
	if d := time.Since(begin); d >= time.Second {
		t.Errorf("the first fingerprint came after %s", d)
	}
	if groups := a.devices(t, 0, 0); len(groups) != 0 {
		t.Errorf("groups: %v", groups)
	}
	for line := range strings.Lines(a.logs.String()) {
		if strings.Contains(line, "[ERROR]") || strings.Contains(line, "[WARN]") {
			t.Errorf("logged: %s", line)
		}
	}
}

// A config block is accepted, or the agent's error contains every problem. An operator who validates the file before gets the same verdict.
func Test06Configuration(t *testing.T) {
	m := install(t, "t4")
	file := m.policy(t, "policy:\n  rules:\n  - {select: {index: nine}, use: reserved}\n  - {select: {model: A}, use: halved}\n")["policy_file"]
	for name, tc := range map[string]struct {
		config string   // as in the agent's configuration file
		want   []string // in the agent's error; none = it starts
	}{
		"empty":    {``, nil},
		"disabled": {`enabled = false`, nil},
		"all keys": {`
			enabled = true
			ignored_gpu_ids = ["GPU-1"]
			fingerprint_period = "30s"
			driver_root = "/"
			dev_root = "/"
			sysfs_root = "/sys"
			procfs_root = "/proc"
			group_by = "numa"
			mig_strategy = "mixed"
			mps_root = "/run/mps"
			injection = ["devices", "libraries"]
			cdi_dir = "/var/run/cdi"
			cdi_hook_path = "/usr/bin/nvidia-cdi-hook"
			policy_file = ""
			health_mode = "observe"
			xids = { "63" = "ignore", "999" = "unhealthy" }
			health_period = "5s"
			health_settle = "20s"
			call_deadline = "2m"
			recovery = "manual"
			recovery_dwell = "3m"
			recovery_checks = 4
			recovery_limit = 5
			degraded = "unhealthy"
			application_faults = "ignore"
			kernel_log = "off"
			state_dir = ""
			overlap = "refuse"
			simulation = true`, nil},
		"XIDs as a block":     {`xids { "63" = "ignore" }`, nil},
		"no XIDs":             {`xids = {}`, nil},
		"XIDs as a text":      {`xids = "63=ignore"`, []string{`"xids" blocks`}},
		"a list for a text":   {`fingerprint_period = ["1m"]`, []string{"fingerprint_period"}},
		"a text for a bool":   {`enabled = "perhaps"`, []string{"enabled"}},
		"another bool":        {`simulation = "on"`, []string{"simulation"}},
		"a text for a list":   {`ignored_gpu_ids = "GPU-1"`, []string{"ignored_gpu_ids"}},
		"an empty list":       {`ignored_gpu_ids = []`, nil},
		"no injection":        {`injection = []`, []string{`injection = "": an empty list gives a task nothing: leave the key out`}},
		"a misspelled word":   {`injection = ["nodes"]`, []string{`injection = "nodes": want variables, devices, cdi or libraries`}},
		"a text for a number": {`recovery_checks = "some"`, []string{"recovery_checks"}},
		"a block":             {`driver_root { a = 1 }`, []string{"driver_root"}},
		"misspelled key":      {`recovery_dwel = "1m"`, []string{"recovery_dwel"}},
		"a template":          {`driver_root = "${nowhere}"`, []string{"Variables not allowed"}},
		"a number for a text": {`fingerprint_period = 0.1`, []string{`fingerprint_period = "0.1": want a positive duration such as 30s or 1m`}},
		"not a duration":      {`fingerprint_period = "often"`, []string{`fingerprint_period = "often": want a positive duration such as 30s or 1m`}},
		"all problems at once": {`
			fingerprint_period = "0s"
			ignored_gpu_ids = ["0"]
			dev_root = "dev"
			group_by = "rack"
			injection = ["variables", "libraries"]
			health_mode = "strict"
			xids = { "63" = "fatal" }
			recovery_checks = 2.5
			kernel_log = "kmsg"
			policy_file = "` + file.(string) + `"`,
			[]string{
				`fingerprint_period = "0s": want 1s or more`, `ignored_gpu_ids = "0"`, `dev_root = "dev": want an absolute path`, `group_by = "rack": want none, numa or nvlink`, `injection = "variables,libraries": libraries belongs to devices`,
				`health_mode = "strict": want enforce, observe or off`, `xids = "63=fatal"`, `recovery_checks = "2.5": want a number`, `kernel_log = "kmsg"`,
				"policy.yaml:4", "nine", "policy.yaml:5", "halved",
			}},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, block(t, tc.config))
			if (a.load != nil) != (tc.want != nil) {
				t.Fatalf("loading: %v", a.load)
			}
			for _, want := range tc.want {
				if !strings.Contains(a.load.Error(), want) {
					t.Errorf("%q is not in: %v", want, a.load)
				}
			}
			path := filepath.Join(t.TempDir(), "client.hcl")
			must(t, os.WriteFile(path, []byte("plugin \"nomad-gpu\" {\nconfig {\n"+tc.config+"\n}\n}\n"), 0o600))
			if text, err := exec.CommandContext(t.Context(), bin.plugin, "validate", "--nomad-config", path).CombinedOutput(); (err != nil) != (tc.want != nil) {
				t.Errorf("validate does not agree with Nomad: %v\n%s", err, text)
			}
			for _, pid := range a.launches(t) { // Nomad does not end a plugin that refused its configuration; it ends with the agent
				if alive(pid) {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		})
	}
}

// A disabled plugin has no devices and does not call the driver.
func Test06DisabledOffersNothing(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, map[string]any{"enabled": false})
	a.devices(t, 0, 0)
	if calls := m.ctl(t, "calls"); strings.TrimSpace(calls) != "" {
		t.Errorf("the driver was called:\n%s", calls)
	}
}

func Test06IgnoredGPUs(t *testing.T) {
	m := install(t, "h100x8")
	all := ids(startAgent(t, m, nil).devices(t, 8, 8))
	a := startAgent(t, m, map[string]any{"ignored_gpu_ids": []any{all[2], all[5]}})
	if got := ids(a.devices(t, 6, 6)); slices.Contains(got, all[2]) || slices.Contains(got, all[5]) {
		t.Errorf("got %v", got)
	}
}

func Test22LogLines(t *testing.T) {
	t.Setenv("VAULT_TOKEN", "s.hush")
	t.Setenv(copyStderr, "yes")
	m, a, _ := onMachine(t, "h100x8", nil, 8)
	m.ctl(t, "xid", "3", "79")
	a.devices(t, 8, 7)
	a.dm.Shutdown()
	text, err := os.ReadFile(filepath.Join(a.dir, "stderr"))
	must(t, err)
	levels := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil || len(line) > 64<<10 {
			t.Errorf("%q: %v", line, err)
			continue
		}
		level, _ := fields["@level"].(string)
		message, _ := fields["@message"].(string)
		at, _ := fields["@timestamp"].(string)
		if _, err := time.Parse("2006-01-02T15:04:05.000000Z07:00", at); err != nil || level == "" || message == "" {
			t.Errorf("%q: %v", line, err)
		}
		levels[level]++
	}
	if levels["info"] == 0 || levels["warn"] == 0 {
		t.Errorf("levels: %v", levels)
	}
	if strings.Contains(string(text), "hush") {
		t.Error("the environment was logged")
	}
	// Nomad logs the lines with their levels.
	if !strings.Contains(a.logs.String(), "[WARN]") || !strings.Contains(a.logs.String(), "XID 79") {
		t.Errorf("not in Nomad's log:\n%s", a.logs)
	}
}

// A client that was killed and starts again finds the previous plugin by its state, and ends it, also while the driver hangs.
func Test23Reattach(t *testing.T) {
	for name, hang := range map[string]string{"healthy": "", "the driver hangs": "*"} {
		t.Run(name, func(t *testing.T) {
			m, a, _ := onMachine(t, "h100x8", nil, 8)
			old := a.pid()
			if hang != "" {
				m.ctl(t, "hang", "all", hang)
			}
			b := newAgent(t, m.config(nil))
			if b.load != nil {
				t.Fatal(b.load)
			}
			b.state, _ = a.GetDevicePluginState()
			b.dm.Run()
			defer b.dm.Shutdown()
			await(t, "the end of the previous plugin", func() bool { return !alive(old) })
			if strings.Contains(b.logs.String(), "plugin failed to exit gracefully") {
				t.Error("had to be killed")
			}
			await(t, "the end of its socket", func() bool {
				_, err := os.Stat(filepath.Join(a.dir, "tmp", fmt.Sprintf("nomad-gpu-%d", old)))
				return os.IsNotExist(err)
			})
			m.ctl(t, "heal")
			b.devices(t, 8, 8)
		})
	}
}
