package agents

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The next run in the same process has the history of the one before: without a disk, with a driver that hangs, and with a kubelet
// that takes the end of the old stream for that of the new one.
func TestReloadKeepsTheHistory(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "h100x8", header)
	for key, value := range map[string]string{"state_dir": "", "health_period": "200ms", "call_deadline": "500ms", "recovery_dwell": "200ms", "health_settle": "1h", "rescan": "1s"} {
		a.settings[key] = value
	}
	a.kubelet.Behave(kubelettest.Behaviour{OneClientPerResource: true})
	a.start()
	a.healthy(8, 8)
	a.registered(1)
	a.xid(2, 95)
	a.healthy(8, 7)
	a.must(a.driver.Hang(simdriver.GPU(5), "*"))
	a.healthy(8, 6)
	lists := len(a.kubelet.Lists(resource))

	a.reload(header+"flags: {plugin: {passDeviceSpecs: true}}", restarts)
	a.registered(2)
	a.healthy(8, 6)
	for _, list := range a.kubelet.Lists(resource)[lists:] {
		for _, d := range list {
			if id := d.GetID(); d.GetHealth() == v1beta1.Healthy && (id == a.driver.UUID(2) || id == a.driver.UUID(5)) {
				t.Errorf("%s is healthy in the next run", id)
			}
		}
	}
	if r, err := a.kubelet.Allocate(t.Context(), resource, a.driver.UUID(0)); err != nil || len(r.GetDevices()) == 0 {
		t.Errorf("no device nodes: %v, %v", r, err)
	}
	a.must(a.driver.Heal())
	a.healthy(8, 7)
	if n := len(a.kubelet.Registrations()); n != 2 {
		t.Errorf("%d registrations", n)
	}
}

// A driver that was released for maintenance stays released when the configuration changes.
func TestMaintenanceOutlivesAReload(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "t4", header)
	a.settings["state_dir"] = ""
	a.start()
	a.healthy(1, 1)
	a.registered(1)
	a.signal(control.QuiesceSignal)
	a.healthy(1, 0)
	a.reload(header+"flags: {plugin: {passDeviceSpecs: true}}", restarts)
	a.logsTimes("msg=listening", 2)
	a.registered(2)
	a.metrics(`state="released"`)
	a.healthy(1, 0)
	a.signal(control.ResumeSignal)
	a.healthy(1, 1)
}

// While the folder of the configuration hangs, the agent continues with the old one, and it can be stopped.
func TestConfigurationThatHangs(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "t4", header)
	a.start()
	a.healthy(1, 1)
	a.must(os.Remove(a.file()), syscall.Mkfifo(a.file(), 0o600)) // opening it waits for a writer (fifo(7))
	a.signal(syscall.SIGHUP)
	a.allocates(0)
	a.must(os.WriteFile(a.file(), []byte(header), 0)) // returns when it is read
	a.logs("INFO", unchanged)
	a.signal(syscall.SIGHUP)
	a.stop()
}

// A restart in the same process loses no XID of the kernel log, with a state directory and without one.
func TestXIDsLoggedDuringAReload(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string]map[string]any{"with a state directory": nil, "without": {"state_dir": ""}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAgent(t, k8sGPU, "h100x8", settings)
			a.useFile(header)
			log := a.useKernelLog()
			log.xid(1, 119, "a fault")
			log.load()
			a.start()
			a.healthy(8, 8)
			a.useFile(header + "flags: {plugin: {passDeviceSpecs: true}}")
			a.signal(syscall.SIGHUP)
			a.logs("INFO", "msg=stopped")
			log.xid(5, 119, "a fault")
			a.healthy(8, 7)
			a.metrics(`tandem_xid_errors_total{gpu="`+a.driver.UUID(1)+`",xid="119"} 0`, `tandem_xid_errors_total{gpu="`+a.driver.UUID(5)+`",xid="119"} 1`)
		})
	}
}

// A process can't unload the driver's library: with another one, the agent ends, and the next process has it.
func TestAnotherDriverRootTakesAnotherProcess(t *testing.T) {
	t.Parallel()
	other := simdriver.StartParallel(t, "t4")
	root := func(m *simdriver.Machine) string { return header + "flags: {nvidiaDriverRoot: " + m.Root + "}" }
	a := newAgent(t, k8sGPU, "t4", map[string]any{"driver_root_ctr_path": "/nowhere"})
	delete(a.settings, "driver_root")
	a.useFile(root(a.driver))
	a.start()
	a.healthy(1, 1)
	a.reload(root(other), "driver library changed")
	if state := a.awaitExit(); !state.Success() {
		t.Errorf("ended with %v", state)
	}
	if left := a.kubeletSockets(); len(left) > 0 {
		t.Errorf("sockets left: %v", left)
	}
	a.start()
	a.healthy(1, 1)
}

// However often the configuration changes, the agent needs no more goroutines and files. The file that is read is that of the
// environment.
func TestReloadsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "t4", header)
	delete(a.settings, "config_file")
	a.env = append(a.env, "CONFIG_FILE="+a.file())
	a.start()
	a.healthy(1, 1)
	a.registered(1)
	count := func(name string) int {
		_, page := a.get("/metrics")
		for line := range strings.Lines(page) {
			if value, ok := strings.CutPrefix(line, name+" "); ok {
				n, err := strconv.Atoi(strings.TrimSpace(value))
				a.must(err)
				return n
			}
		}
		a.Fatalf("no %s", name)
		return 0
	}
	var goroutines, files int
	for n := range 4 {
		a.reload(header+"health: {healthMode: "+[]string{"observe", "enforce"}[n%2]+"}", restarts)
		a.logsTimes("msg=listening", n+2)
		a.registered(n + 2)
		a.healthy(1, 1)
		if n == 0 {
			goroutines, files = count("go_goroutines"), count("process_open_fds")
		}
	}
	a.logs("INFO", "health-mode=observe")
	const slack = 4 // connections and timers come and go
	a.await("as few goroutines and files as after the first reload", func() bool {
		return count("go_goroutines") <= goroutines+slack && count("process_open_fds") <= files+slack
	})
}
