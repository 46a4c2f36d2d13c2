// Package agents tests what both built agents do in the same way, each as a process under a small orchestrator.
package agents

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	nomadGPU = "nomad-gpu"
	k8sGPU   = "k8s-gpu"
	resource = "nvidia.com/gpu"
	patience = 20 * time.Second
)

// agent is one of the agents on a simulated node, with its state directory. It can be stopped and started again.
type agent struct {
	*testing.T
	program string
	driver  *simdriver.Machine
	setup   rig.Setup
	log     output
	ctx     context.Context

	nomad   *rig.Nomad // of nomad-gpu
	kubelet *rig.Kubelet
	lists   int // of the kubelet, before the latest start
}

// output is a buffer that can be read while it is written.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// both runs a test with each agent, not started yet, on a node of its own.
func both(t *testing.T, node string, settings map[string]string, test func(*agent)) {
	t.Helper()
	for _, program := range []string{nomadGPU, k8sGPU} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "ag") // t.TempDir can be longer than a socket's path may be
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			m, err := simdriver.Install(t.Context(), filepath.Join(dir, "m"), node)
			if errors.Is(err, simdriver.ErrNoCompiler) {
				t.Skip("SKIPPED: the simulated driver needs a C compiler: ", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				violations, err := m.Violations()
				if err != nil || len(violations) > 0 {
					t.Errorf("NVML misused: %v, %v", violations, err)
				}
			})
			a := &agent{T: t, program: program, driver: m, ctx: t.Context(), setup: rig.Setup{
				Roots:    core.Roots{Driver: m.Root, Dev: m.Root, Sys: m.Root + "/sys", Proc: m.Root + "/proc"},
				StateDir: filepath.Join(dir, "state"), Settings: map[string]string{"kernel_log": "off"},
			}}
			for key, value := range settings {
				a.setup.Settings[key] = value
			}
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("the log:\n%s", &a.log)
				}
			})
			test(a)
		})
	}
}

func (a *agent) binary() string {
	dir, err := binaries.Dir()
	if err != nil {
		a.Fatal(err)
	}
	return filepath.Join(dir, a.program)
}

// start starts the agent.
func (a *agent) start() {
	a.Helper()
	var err error
	switch {
	case a.program == nomadGPU:
		if a.nomad, err = rig.StartNomad(a.ctx, a.binary(), a.setup, &a.log); err == nil {
			a.Cleanup(a.nomad.Stop)
		}
	case a.kubelet == nil:
		if a.kubelet, err = rig.StartKubelet(filepath.Dir(a.setup.StateDir), a.binary(), a.setup, &a.log); err == nil {
			a.Cleanup(func() { _ = a.kubelet.End() })
		}
	default:
		a.lists = len(a.kubelet.Lists(resource))
		err = a.kubelet.StartAgent(a.binary(), a.setup, &a.log)
	}
	if err != nil {
		a.Fatal(err)
	}
}

// end is a way in which an agent ends.
type end struct {
	name   string
	signal syscall.Signal
}

var ends = []end{{"stopped", syscall.SIGTERM}, {"killed", syscall.SIGKILL}}

// end ends the agent; nomad-gpu that is stopped as Nomad does.
func (a *agent) end(e end) {
	a.Helper()
	var err error
	switch {
	case a.program == k8sGPU:
		err = a.kubelet.StopAgent(e.signal)
	case e.signal == syscall.SIGKILL:
		err = a.nomad.Kill()
	default:
		a.nomad.Stop()
	}
	if err != nil {
		a.Fatal(err)
	}
}

// devices is what the scheduler has now.
func (a *agent) devices() map[string]rig.View {
	if a.program == nomadGPU {
		return a.nomad.Devices()
	}
	return a.kubelet.View(a.ctx)
}

// await waits until something holds.
func (a *agent) await(what string, holds func() bool) {
	a.Helper()
	tick, deadline := time.NewTicker(20*time.Millisecond), time.After(patience)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			a.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// healthy waits until so many of all devices take work.
func (a *agent) healthy(all, healthy int) {
	a.Helper()
	a.await(fmt.Sprintf("%d of %d devices that take work", healthy, all), func() bool {
		devices, n := a.devices(), 0
		for _, d := range devices {
			if d.Healthy {
				n++
			}
		}
		return len(devices) == all && n == healthy
	})
}

// firstUnhealthy are the devices that take no work in the first list after the latest start, which has n devices.
func (a *agent) firstUnhealthy(n int) (ids []string) {
	a.Helper()
	first := map[string]bool{}
	a.await("the first list", func() bool {
		if a.program == nomadGPU {
			for id, d := range a.nomad.First() {
				first[id] = d.Healthy
			}
			return len(first) > 0
		}
		lists := a.kubelet.Lists(resource)
		if len(lists) <= a.lists {
			return false
		}
		for _, d := range lists[a.lists] {
			first[d.GetID()] = d.GetHealth() == v1beta1.Healthy
		}
		return true
	})
	if len(first) != n {
		a.Errorf("the first list has %d devices, want %d", len(first), n)
	}
	for id, healthy := range first {
		if !healthy {
			ids = append(ids, id)
		}
	}
	return ids
}

// allocate gives a device to a container.
func (a *agent) allocate(id string) error {
	var err error
	if a.program == nomadGPU {
		_, err = a.nomad.Reserve(id)
	} else {
		_, err = a.kubelet.Grant(a.ctx, resource, id)
	}
	return err
}

// command runs a command of an operator.
func (a *agent) command(args ...string) (string, error) {
	a.Helper()
	out, err := exec.CommandContext(a.ctx, a.binary(), append(args, "--state-dir="+a.setup.StateDir)...).CombinedOutput()
	return string(out), err
}

// prints fails unless a command succeeds and prints want.
func (a *agent) prints(want string, args ...string) {
	a.Helper()
	if out, err := a.command(args...); err != nil || !strings.Contains(out, want) {
		a.Errorf("%v: %v, want %q:\n%s", args, err, want, out)
	}
}

// report is what inspect prints now.
func (a *agent) report() (r report.Report) {
	a.Helper()
	if out, err := a.command("inspect", "--json"); err != nil || json.Unmarshal([]byte(out), &r) != nil {
		a.Fatalf("%v:\n%s", err, out)
	}
	return r
}

// counts waits for the counts of XIDs in the report: "3:XID_95:1" for one XID 95 of GPU 3.
func (a *agent) counts(want string) {
	a.Helper()
	a.await("counts "+want, func() bool {
		var got []string
		for _, c := range a.report().Counts {
			got = append(got, fmt.Sprintf("%d:%s:%d", c.Index, c.Cause, c.Count))
		}
		return strings.Join(got, " ") == want
	})
}

// metrics waits until k8s-gpu's /metrics has every line. nomad-gpu has none.
func (a *agent) metrics(lines ...string) {
	a.Helper()
	for _, line := range lines {
		if a.program == k8sGPU {
			a.await(line, func() bool { return strings.Contains(a.kubelet.Page(a.ctx, "/metrics"), line) })
		}
	}
}

// logs waits until the log has a line of that level with text.
func (a *agent) logs(level, text string) {
	a.Helper()
	a.await(level+" "+text, func() bool {
		for line := range strings.Lines(a.log.String()) {
			if strings.Contains(line, text) && (strings.Contains(line, "["+level+"]") || strings.Contains(line, "level="+level)) {
				return true
			}
		}
		return false
	})
}

// fault makes the driver report an XID.
func (a *agent) fault(slot int, code uint64) {
	a.Helper()
	if err := a.driver.XID(slot, code); err != nil {
		a.Fatal(err)
	}
}

// kernelLog is a file in place of /dev/kmsg.
type kernelLog struct {
	*agent
	path string
	seq  int // of the latest record
}

// useKernelLog sets a file as the kernel log. It begins with a record that concerns no GPU.
func (a *agent) useKernelLog() *kernelLog {
	l := &kernelLog{agent: a, path: filepath.Join(a.TempDir(), "kmsg"), seq: 70}
	a.setup.Settings["kernel_log"] = l.path
	l.write("nvidia: loading out-of-tree module taints kernel.")
	return l
}

// xid logs an XID of the GPU in a slot.
func (l *kernelLog) xid(slot, code int, text string) {
	l.Helper()
	pci, err := l.driver.Get(slot, "pci")
	if err != nil {
		l.Fatal(err)
	}
	l.write(fmt.Sprintf("NVRM: Xid (PCI:%s): %d, %s", strings.TrimSuffix(pci, ".0"), code, text))
}

// write appends a record, some minutes after the one before.
func (l *kernelLog) write(message string) {
	l.Helper()
	l.seq++
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := io.WriteString(f, fmt.Sprintf("4,%d,%d000000,-;%s\n", l.seq, 300*l.seq, message)); err != nil {
		l.Fatal(err)
	}
}
