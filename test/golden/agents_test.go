package golden

import (
	"context"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// host is a simulated machine with a kubelet; the agents on it have a state directory each.
type host struct {
	*simdriver.Machine
	t       *testing.T
	dir     string
	kubelet *kubelettest.Kubelet
	policy  string // file of both agents
	shared  bool   // one state directory for both
}

func newHost(t *testing.T, machine, policy string, prepare func(*host) error) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "golden") // the names of t.TempDir are too long for a socket
	must(t, err)
	h := &host{t: t, dir: dir, policy: filepath.Join(dir, "policy.yaml"), kubelet: kubelettest.New(filepath.Join(dir, "plugins"))}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	h.Machine, err = simdriver.Install(t.Context(), filepath.Join(dir, "m"), machine)
	must(t, err, os.WriteFile(h.policy, []byte(policy), 0o600), h.kubelet.Start())
	t.Cleanup(h.kubelet.Stop)
	pods, err := kubelettest.ServePodResources(filepath.Join(dir, "pods", "kubelet.sock"))
	must(t, err)
	t.Cleanup(pods.Close)
	if prepare != nil {
		must(t, prepare(h))
	}
	must(t, os.MkdirAll(h.state(k8sGPU), 0o700), os.MkdirAll(h.state(nomadGPU), 0o700))
	t.Cleanup(func() {
		violations, err := h.Violations()
		if must(t, err); len(violations) > 0 {
			t.Errorf("NVML misused: %v", violations)
		}
	})
	return h
}

func (h *host) state(agent string) string {
	if h.shared {
		return filepath.Join(h.dir, "both")
	}
	return filepath.Join(h.dir, agent)
}

// config is what both agents are told of the node, by the names of Nomad's config block, and more.
func (h *host) config(agent string, more map[string]string) map[string]string {
	c := map[string]string{
		"driver_root": h.Root, "dev_root": h.Root, "sysfs_root": h.Root + "/sys", "procfs_root": h.Root + "/proc",
		"state_dir": h.state(agent), "kernel_log": "off", "mig_strategy": "mixed", "mps_root": filepath.Join(h.dir, "mps"),
	}
	maps.Copy(c, more)
	return c
}

// process is an agent that runs.
type process struct {
	h    *host
	name string
	pid  int
	log  string // file
	http string // URL of k8s-gpu
	stop func()
	device.DevicePlugin
	nomad *rig.NomadClient
}

func (h *host) start(agent string, more map[string]string) *process {
	if agent == k8sGPU {
		return h.startK8s(more)
	}
	return h.startNomad(more)
}

func (h *host) startK8s(more map[string]string) *process {
	h.t.Helper()
	address, err := rig.FreeAddress()
	must(h.t, err)
	p := &process{h: h, name: k8sGPU, log: filepath.Join(h.dir, "k8s.log"), http: "http://" + address}
	config := h.config(k8sGPU, map[string]string{
		"kubelet_socket": h.kubelet.Socket(), "pod_resources_socket": filepath.Join(h.dir, "pods", "kubelet.sock"),
		"http_address": address, "config_file": h.policy, "pass_device_specs": "true", "log_format": "text",
	})
	maps.Copy(config, more)
	cmd := exec.Command(binaries.Path(h.t, k8sGPU), rig.Flags(config)...)
	log, err := os.Create(p.log)
	must(h.t, err)
	cmd.Stdout, cmd.Stderr = log, log
	must(h.t, cmd.Start())
	p.pid = cmd.Process.Pid
	p.stop = func() {
		if cmd.ProcessState == nil {
			must(h.t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait(), log.Close())
		}
	}
	h.t.Cleanup(p.stop)
	return p
}

func (h *host) startNomad(more map[string]string) *process {
	h.t.Helper()
	p := &process{h: h, name: nomadGPU, log: filepath.Join(h.dir, "nomad.log"), nomad: rig.NewNomadClient()}
	log, err := os.Create(p.log)
	must(h.t, err)
	cmd := exec.Command(binaries.Path(h.t, nomadGPU))
	client := plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig: base.Handshake, Plugins: map[string]plugin.Plugin{base.PluginTypeDevice: &device.PluginDevice{}},
		Cmd: cmd, AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC}, Logger: hclog.NewNullLogger(), Stderr: log,
	})
	p.stop = client.Kill
	h.t.Cleanup(p.stop)
	p.DevicePlugin, err = nomadtest.Dispense(client)
	must(h.t, err)
	p.pid = cmd.Process.Pid
	config := h.config(nomadGPU, map[string]string{"policy_file": h.policy, "fingerprint_period": "1m", "nomad_address": "off"})
	maps.Copy(config, more)
	must(h.t, nomadtest.SetConfig(p, config))
	must(h.t, p.nomad.Follow(context.Background(), p)) // until the plugin ends
	return p
}

// get is a page of the HTTP server, below its status.
func (p *process) get(path string) string {
	p.h.t.Helper()
	resp, err := http.Get(p.http + path)
	if err != nil {
		return err.Error() // it is about to start
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	must(p.h.t, err)
	return "GET " + path + "  " + resp.Status + "  " + resp.Header.Get("Content-Type") + "\n" + masked(p.h.dir, string(body))
}

// verb runs a verb beside the agent.
func (p *process) verb(args ...string) string {
	return transcript(p.h.t.Context(), p.h.dir, p.name, append(args, "--state-dir="+p.h.state(p.name))...)
}

// logged is the log so far.
func (p *process) logged() string {
	text, err := os.ReadFile(p.log)
	must(p.h.t, err)
	return masked(p.h.dir, string(text))
}

// await waits until look returns a text with each of want.
func (p *process) await(what string, look func() string, want ...string) {
	p.h.t.Helper()
	p.awaitStill(0, what, look, want...)
}

// awaitStill is await until the text was the same so many times more.
func (p *process) awaitStill(still int, what string, look func() string, want ...string) {
	p.h.t.Helper()
	last, same := "", -1
	for deadline := time.Now().Add(timeout); same < still; time.Sleep(25 * time.Millisecond) {
		text := look()
		missing := slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(text, w) })
		switch {
		case missing:
			same = -1
		case text == last:
			same++
		default:
			same = 0
		}
		last = text
		if same < still && time.Now().After(deadline) {
			p.h.t.Fatalf("%s: %s: want %q in\n%s\nlog:\n%s", p.name, what, want, text, p.logged())
		}
	}
}
