package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// plug is a plugin that a test ends.
type plug struct {
	device.DevicePlugin
	client  *plugin.Client
	cmd     *exec.Cmd
	machine *simdriver.Machine
	dir     string // the state directory
	tmp     string // TMPDIR
}

// states are what a plugin can be doing when its end comes. Each function brings it there.
var states = map[string]func(*testing.T, *plug){
	"told nothing":   func(*testing.T, *plug) {},
	"configured":     func(t *testing.T, p *plug) { p.configure(t) },
	"well":           func(t *testing.T, p *plug) { p.configure(t); p.follow(t, true) },
	"nvmlInit hangs": func(t *testing.T, p *plug) { p.stuck(t, "nvmlInit") },
	"first reading":  func(t *testing.T, p *plug) { p.stuck(t, "nvmlDeviceGetName"); p.made(t, "nvmlDeviceGetName", 0) },
	"the event wait hangs": func(t *testing.T, p *plug) {
		p.stuck(t, "nvmlEventSetWait")
		p.made(t, "nvmlEventSetWait", 0)
	},
	"a reservation waits": func(t *testing.T, p *plug) {
		p.stuck(t, "nvmlInit")
		id := p.machine.UUID(0)
		go func() { _, _ = p.Reserve([]string{id}) }() // until the end, which is the test
	},
	"one GPU hangs": func(t *testing.T, p *plug) {
		p.configure(t)
		p.follow(t, true)
		p.hang(t, simdriver.GPU(3), "nvmlDeviceGetUtilizationRates") // which statistics ask each second
	},
	"everything hangs": func(t *testing.T, p *plug) {
		p.configure(t)
		p.follow(t, true)
		p.hang(t, simdriver.All, "*")
	},
	"nvmlShutdown hangs": func(t *testing.T, p *plug) {
		p.stuck(t, "nvmlShutdown")
		p.made(t, "nvmlEventSetWait", 0)
	},
	"the disk hangs": func(t *testing.T, p *plug) { // who opens a pipe waits for who writes to it
		if err := syscall.Mkfifo(p.history(), 0o600); err != nil {
			t.Fatal(err)
		}
		p.configure(t)
		p.follow(t, false)
	},
}

func (p *plug) history() string { return filepath.Join(p.dir, "nomad-gpu.json") }

func (p *plug) configure(t *testing.T) { configure(t, p, keys(p.machine, p.dir)) }

// stuck starts a plugin that will hang in a call.
func (p *plug) stuck(t *testing.T, call string) {
	t.Helper()
	if err := p.machine.Hang(simdriver.All, call); err != nil {
		t.Fatal(err)
	}
	p.configure(t)
	p.follow(t, false)
}

// hang waits until the running plugin hangs in a call: in the first that it makes from now on.
func (p *plug) hang(t *testing.T, at simdriver.Target, call string) {
	t.Helper()
	if err := p.machine.Hang(at, call); err != nil {
		t.Fatal(err)
	}
	p.made(t, call, p.calls(t, call))
}

// made waits until a call was made more often.
func (p *plug) made(t *testing.T, call string, before uint64) {
	t.Helper()
	await(t, call, patience, func() bool { return p.calls(t, call) > before })
}

// calls counts a call in all its versions, or all calls: "*".
func (p *plug) calls(t *testing.T, call string) (n uint64) {
	t.Helper()
	calls, err := p.machine.CallsOf(p.cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for name, times := range calls {
		if call == "*" || strings.HasPrefix(name, call) {
			n += times
		}
	}
	return n
}

// follow opens both streams and waits until the plugin follows the machine; and, if told to, for what comes
// first on each.
func (p *plug) follow(t *testing.T, read bool) {
	t.Helper()
	f, err1 := p.Fingerprint(t.Context())
	s, err2 := p.Stats(t.Context(), time.Second)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	if read {
		receive(t, f)
		receive(t, s)
	}
	await(t, "the operator's socket", patience, func() bool {
		_, err := os.Stat(filepath.Join(p.dir, "nomad-gpu.sock"))
		return err == nil
	})
}

// Nomad kills what has not ended two seconds after it was asked to. Whatever the plugin is doing, it ends by
// itself, in time, and takes its sockets along.
func TestEndsInTime(t *testing.T) {
	t.Parallel()
	for name, bring := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := plugged(t)
			bring(t, p)
			p.childless(t)
			begin := time.Now()
			p.client.Kill()
			t.Logf("the end took %s", time.Since(begin))
			if !p.cmd.ProcessState.Success() {
				t.Errorf("ended with %s, want an end of its own", p.cmd.ProcessState)
			}
			p.leftNothing(t)
		})
	}
}

// SIGTERM is an end in order, too.
func TestSIGTERM(t *testing.T) {
	t.Parallel()
	for name, bring := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := plugged(t)
			bring(t, p)
			p.childless(t)
			begin := time.Now()
			p.signal(t, syscall.SIGTERM)
			await(t, "the end", patience, p.client.Exited)
			d := time.Since(begin)
			t.Logf("the end took %s", d)
			if d >= 4*time.Second { // twice what is asked for: this machine may be busy
				t.Errorf("the end took %s", d)
			}
			p.client.Kill() // waits for the process
			if !p.cmd.ProcessState.Success() {
				t.Errorf("ended with %s", p.cmd.ProcessState)
			}
			p.leftNothing(t)
		})
	}
}

func plugged(t *testing.T) *plug {
	t.Helper()
	return pluggedOn(t, install(t, "h100x8"), shortDir(t))
}

// pluggedOn starts the plugin on a machine. Its TMPDIR is its own.
func pluggedOn(t *testing.T, m *simdriver.Machine, dir string) *plug {
	t.Helper()
	p := &plug{machine: m, dir: dir, tmp: shortDir(t)}
	p.DevicePlugin, p.client, p.cmd = start(t, "TMPDIR="+p.tmp)
	return p
}

func (p *plug) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// childless checks that the plugin has started no process. A child would have the plugin's stdout and stderr:
// Nomad sees a death by their end, and takes the plugin from service for good if it sees none in three seconds
// (helper/pluginutils/grpcutils).
func (p *plug) childless(t *testing.T) {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.cmd.Process.Pid)) // proc(5)
	if err != nil || len(lists) == 0 {
		t.Fatal("no list of children: ", err)
	}
	for _, list := range lists {
		if text, err := os.ReadFile(list); err == nil && len(text) > 0 { // a thread may be gone
			t.Errorf("has children: %s", text)
		}
	}
}

// leftNothing checks that no socket and no half-written file is left.
func (p *plug) leftNothing(t *testing.T) {
	t.Helper()
	if left := entries(t, p.tmp); len(left) > 0 {
		t.Errorf("left in TMPDIR: %v", left)
	}
	for _, name := range entries(t, p.dir) {
		if name != "nomad-gpu.json" && name != "nomad-gpu.groups.json" && name != "claims" {
			t.Errorf("left in the state directory: %s", name)
		}
	}
	claims, _ := os.ReadDir(filepath.Join(p.dir, "claims")) // missing if the end came first
	for _, f := range claims {
		if f.Name() != "nomad-gpu.json" && f.Name() != "nomad-gpu.lock" {
			t.Errorf("left among the claims: %s", f.Name())
		}
	}
}

func entries(t testing.TB, dir string) (names []string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}
