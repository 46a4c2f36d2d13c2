// Package agents tests both built agents as processes, each under the protocol of its orchestrator on a simulated node. A scenario
// that holds for both is one test.
package agents

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
	"github.com/tandem-gpu/tandem/test/mpscontrol"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	nomadGPU  = "nomad-gpu"
	k8sGPU    = "k8s-gpu"
	resource  = kubeadapter.GPUResource
	timeout   = 40 * time.Second // of each wait, also on a busy machine; less than the default interval between readings
	stopLimit = 4 * time.Second  // twice what is asked for: the machine may be busy
)

var (
	programs = []string{nomadGPU, k8sGPU}
	bin      string // the folder of the built agents
)

func TestMain(m *testing.M) {
	mpscontrol.Main() // when it is called as a program of the driver
	check.Parallel(8)
	os.Exit(func() int {
		if binary := os.Getenv(asNomadAgent); binary != "" {
			fmt.Fprintln(os.Stderr, runAsNomadAgent(binary))
			return 1
		}
		dir, err := binaries.Dir()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		bin = dir
		return m.Run()
	}())
}

// agent is one of the agents on a simulated node. It can be started again.
type agent struct {
	*testing.T
	program  string
	driver   *simdriver.Machine
	dir      string         // of its files, with a short path: t.TempDir can be longer than a socket's path may be
	state    string         // the state directory
	settings map[string]any // by the keys of Nomad's config block
	env      []string
	binary   string
	log      logbuffer.Buffer
	kubelet  *kubelettest.Kubelet // of k8s-gpu
	lists    int                  // of the kubelet, before the latest start
	*process                      // the latest
}

// process is a process of an agent.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // of k8s-gpu

	client              *plugin.Client // of nomad-gpu
	device.DevicePlugin                // likewise
	nomad               *rig.NomadClient
}

// newAgent returns an agent that is not started, on a node of its own.
func newAgent(t *testing.T, program, node string, settings map[string]any) *agent {
	t.Helper()
	a := &agent{T: t, program: program, driver: simdriver.StartParallel(t, node), dir: coretest.ShortDir(t), binary: binaries.Path(t, program)}
	a.state = filepath.Join(a.dir, "state")
	a.settings = map[string]any{
		"driver_root": a.driver.Root, "sysfs_root": a.driver.Root + "/sys", "procfs_root": a.driver.Root + "/proc",
		"state_dir": a.state, "kernel_log": "off",
	}
	if program == k8sGPU {
		a.kubelet = kubelettest.New(filepath.Join(a.dir, "kubelet"))
		a.must(a.kubelet.Start())
		t.Cleanup(a.kubelet.Stop)
		a.settings["kubelet_socket"], a.settings["http_address"], a.settings["log_format"] = a.kubelet.Socket(), "127.0.0.1:0", "text"
	}
	maps.Copy(a.settings, settings)
	a.env = append(os.Environ(), "TMPDIR="+a.tmp(), nomadtest.NoAgent)
	a.must(os.Mkdir(a.tmp(), 0o700))
	t.Cleanup(func() {
		a.checkFingerprints()
		if t.Failed() {
			t.Logf("the log of %s:\n%s", program, &a.log)
		}
	})
	return a
}

// both runs a test with each agent, in parallel with other tests.
func both(t *testing.T, node string, settings map[string]any, test func(*agent)) {
	t.Helper()
	t.Parallel()
	for _, program := range programs {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			test(newAgent(t, program, node, settings))
		})
	}
}

func (a *agent) tmp() string     { return filepath.Join(a.dir, "tmp") }
func (a *agent) socket() string  { return filepath.Join(a.state, a.program+".sock") }
func (a *agent) history() string { return filepath.Join(a.state, a.program+".json") }

// start starts the agent as its orchestrator does.
func (a *agent) start() {
	a.Helper()
	a.launch()
	if a.program == nomadGPU {
		a.configure()
		a.follow()
	}
}

// configure sends nomad-gpu its configuration.
func (a *agent) configure() {
	a.Helper()
	a.must(nomadtest.SetConfig(a.DevicePlugin, a.settings))
}

// launch starts the process. nomad-gpu has no configuration yet.
func (a *agent) launch() {
	a.Helper()
	cmd := exec.Command(a.binary)
	cmd.Env = a.env
	p := &process{cmd: cmd, nomad: rig.NewNomadClient()}
	a.process = p
	if a.program == nomadGPU {
		p.client = nomadtest.NewClient(cmd, hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: &a.log}))
		a.Cleanup(p.client.Kill)
		var err error
		p.DevicePlugin, err = nomadtest.Dispense(p.client)
		a.must(err)
		return
	}
	cmd.Args = append(cmd.Args, rig.Flags(a.settings)...)
	cmd.Stdout, cmd.Stderr = &a.log, &a.log
	a.lists, p.ended = len(a.kubelet.Lists(resource)), make(chan struct{})
	a.must(cmd.Start())
	go func() {
		_ = cmd.Wait() // the result is in ProcessState
		close(p.ended)
	}()
	a.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-p.ended
	})
}

// follow opens the streams of nomad-gpu.
func (a *agent) follow() {
	a.Helper()
	a.must(a.nomad.Follow(a.Context(), a.DevicePlugin))
	a.must(a.nomad.FollowStatistics(a.Context(), time.Second))
}

func (a *agent) must(errs ...error) {
	a.Helper()
	check.NoError(a.T, errs...)
}

// checkFingerprints makes the checks of Nomad's client for all that the latest process has sent. Its end is an error in the last message.
func (a *agent) checkFingerprints() {
	if a.process == nil {
		return
	}
	all := a.nomad.Fingerprints()
	for i, f := range all {
		if err := f.Check(); err != nil && i < len(all)-1 {
			a.Errorf("fingerprint %d: %v", i, err)
		}
	}
}

// xid makes the driver report an XID.
func (a *agent) xid(slot int, code uint64) {
	a.Helper()
	a.must(a.driver.XID(slot, code))
}

// calls is how often the process has made a driver call, in all its versions. "*" is all calls.
func (a *agent) calls(call string) (n uint64) {
	a.Helper()
	calls, err := a.driver.CallsOf(a.cmd.Process.Pid)
	a.must(err)
	for name, times := range calls {
		if call == "*" || strings.HasPrefix(name, call) {
			n += times
		}
	}
	return n
}

// hang makes a driver call hang, and waits until the process has made it.
func (a *agent) hang(at simdriver.Target, call string) {
	a.Helper()
	a.must(a.driver.Hang(at, call))
	before := a.calls(call)
	a.await(call, func() bool { return a.calls(call) > before })
}
