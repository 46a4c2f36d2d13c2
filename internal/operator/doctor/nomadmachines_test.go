package doctor_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
)

func init() {
	config := func(text string) func(*host) { return func(h *host) { h.write("etc/nomad.d/nomad.hcl", text) } }
	replaced := func(old, text string) func(*host) { return config(strings.Replace(nomadConfig, old, text, 1)) }
	machines = append(machines, []machine{
		{name: "Nomad: no agent runs", program: nomad, breaks: func(h *host) { h.remove("proc/100") }},
		{name: "Nomad: no client", program: nomad, breaks: replaced("client { enabled = true }", "server { enabled = true }")},
		{name: "Nomad: syntax error", program: nomad, breaks: replaced("client {", "client {{")},
		{name: "Nomad: -dev without plugin_dir", program: nomad, breaks: func(h *host) {
			h.process(100, "nomad", "agent", "-dev")
		}},
		{name: "Nomad: no plugin_dir", program: nomad, breaks: func(h *host) { h.remove("opt/nomad/plugins") }},
		{name: "Nomad: another plugin_dir", program: nomad, breaks: func(h *host) {
			h.must(os.Mkdir(filepath.Join(h.Root, "srv"), 0o755))
			h.process(100, "nomad", "agent", "-config", "etc/nomad.d", "-plugin-dir", "/srv")
		}},
		{name: "Nomad: no block", program: nomad, breaks: replaced(`plugin "nomad-gpu"`, `plugin "nvidia-gpu"`)},
		{name: "Nomad: not executable", program: nomad, breaks: func(h *host) { h.must(os.Chmod(filepath.Join(h.Root, "opt/nomad/plugins/nomad-gpu"), 0o644)) }},
		{name: "Nomad: dangling link", program: nomad, breaks: func(h *host) { h.link("opt/nomad/plugins/driver", "nowhere") }},
		{name: "Nomad: no config block", program: nomad, breaks: replaced(`config { fingerprint_period = "30s" }`, `fingerprint_period = "30s"`)},
		{name: "Nomad: switched off", program: nomad, breaks: replaced(`fingerprint_period = "30s"`, "enabled = false")},
		{name: "Nomad: misspelt key", program: nomad, breaks: replaced("fingerprint_period", "fingerprint_perod")},
		{name: "Nomad: invalid value", program: nomad, breaks: replaced("30s", "30 seconds")},
		{name: "Nomad: nomad-device-nvidia, too", program: nomad, breaks: func(h *host) {
			h.write("opt/nomad/plugins/nomad-device-nvidia", "#!/bin/sh\n")
			h.write("etc/nomad.d/z.json", `{"plugin": [{"nomad-device-nvidia": [{"config": [{"enabled": true}]}]}]}`)
		}},
		{name: "Nomad: docker without the runtime", program: nomad, breaks: func(h *host) { h.remove("etc/docker/daemon.json") }},
		{name: "Nomad: renamed, JSON", program: nomad, healthy: true, breaks: func(h *host) {
			h.remove("opt/nomad/plugins/nomad-gpu")
			h.link("opt/nomad/plugins/gpus", binaries.Path(h.t, nomad))
			h.remove("etc/nomad.d/nomad.hcl")
			h.write("etc/nomad.d/nomad.json", `{"data_dir": "/opt/nomad", "client": {"enabled": true}, "plugin": {"gpus": {"config": {"state_dir": "`+h.Root+`/state", "xids": {"63": "ignore"}}}}}`)
		}},
		{name: "Nomad: settings of the block", program: nomad, healthy: true, breaks: func(h *host) {
			config := strings.Replace(nomadConfig, `fingerprint_period = "30s"`, `
				driver_root = "ROOT"
				sysfs_root = "ROOT/sys"
				procfs_root = "ROOT/proc"
				state_dir = "ROOT/state"`, 1)
			h.write("etc/nomad.d/nomad.hcl", strings.ReplaceAll(config, "ROOT", h.Root))
			h.args = []string{"--host-root", h.Root, "--procfs-root", h.Root + "/proc"}
		}},
		{name: "agent in maintenance", program: k8s, breaks: func(h *host) {
			h.agent()
			if code, out := run(h.t, k8s, "quiesce", "--state-dir", h.Root+"/state"); code != 0 {
				h.t.Fatalf("quiesce: %d %s", code, out)
			}
		}},
		{name: "one GPU lost under a running agent", program: k8s, breaks: func(h *host) { h.agent(); h.must(h.Lose(3)) }},
		{name: "healthy, with a running agent", program: k8s, healthy: true, breaks: func(h *host) { h.agent() }},
	}...)
}

// agent starts k8s-gpu, and waits until it has read the driver. It ends with the test.
func (h *host) agent() {
	h.t.Helper()
	h.start(k8s, append(h.args[2:], "--http-address=")...)
}

// start starts an agent, without the argument --host-root, and waits until it offers devices.
func (h *host) start(program string, args ...string) (stop func()) {
	h.t.Helper()
	cmd := exec.CommandContext(h.t.Context(), binaries.Path(h.t, program), args...)
	h.must(cmd.Start())
	stop = sync.OnceFunc(func() { _ = cmd.Process.Signal(os.Interrupt); _ = cmd.Wait() })
	h.t.Cleanup(stop)
	check.Until(h.t, "the agent offers devices", func() bool {
		code, out := run(h.t, program, "inspect", "--json", "--state-dir", h.Root+"/state", "--driver-root=/nowhere")
		return code == 0 && strings.Contains(out, `"schedulable": true`)
	})
	return stop
}

// otherAgent lets an agent of the other orchestrator offer every GPU of the host: its file is written by k8s-gpu under another name.
func (h *host) otherAgent() {
	h.t.Helper()
	stop := h.start(k8s, append(h.args[2:], "--kubelet-socket=", "--pod-resources-socket=", "--http-address=")...)
	folder := filepath.Join(h.Root, "state/agents")
	var text []byte
	check.Until(h.t, "the agent's file", func() bool {
		text, _ = os.ReadFile(folder + "/k8s-gpu.json")
		return strings.Contains(string(text), h.UUID(7))
	})
	text, err := statefile.Unseal(text)
	h.must(err)
	h.must(os.WriteFile(folder+"/nomad-gpu.json", []byte(strings.ReplaceAll(string(text), "k8s-gpu", "nomad-gpu")), 0o600))
	stop()
}
