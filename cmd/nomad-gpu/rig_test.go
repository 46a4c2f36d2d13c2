package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// testAgent is the plugin under a Nomad that follows its fingerprints.
type testAgent struct {
	testing.TB
	device.DevicePlugin
	client *plugin.Client
	cmd    *exec.Cmd
	dir    string // the state directory
	log    *buffer

	mu   sync.Mutex
	last map[string]*device.Device
}

// run starts the plugin on a machine, with more keys.
func run(t testing.TB, m *simdriver.Machine, dir string, more map[string]any) *testAgent {
	t.Helper()
	a := &testAgent{TB: t, dir: dir, log: &buffer{}}
	a.DevicePlugin, a.client, a.cmd = launch(t, hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: a.log}))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log:\n%s", a.log)
		}
	})
	block := keys(m, dir)
	for k, v := range more {
		block[k] = v
	}
	configure(t, a, block)
	a.listen()
	return a
}

// listen follows the fingerprints of a plugin that is configured.
func (a *testAgent) listen() {
	a.Helper()
	ch, err := a.Fingerprint(a.Context())
	if err != nil {
		a.Fatal(err)
	}
	go func() {
		for r := range ch {
			a.mu.Lock()
			a.last = map[string]*device.Device{}
			for _, g := range r.Devices {
				for _, d := range g.Devices {
					a.last[d.ID] = d
				}
			}
			a.mu.Unlock()
		}
	}()
}

// kill is the end without a last word.
func (a *testAgent) kill() {
	a.Helper()
	if err := a.cmd.Process.Kill(); err != nil {
		a.Fatal(err)
	}
}

// devices are those of the latest fingerprint.
func (a *testAgent) devices() map[string]*device.Device {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

// healthy waits until of all devices so many take work.
func (a *testAgent) healthy(all, well int) {
	a.Helper()
	await(a, "devices that take work", patience, func() bool {
		devices := a.devices()
		n := 0
		for _, d := range devices {
			if d.Healthy {
				n++
			}
		}
		return len(devices) == all && n == well
	})
}

// said waits until the log has a line with all of want.
func (a *testAgent) said(want ...string) {
	a.Helper()
	await(a, "a line of the log", patience, func() bool {
		for line := range strings.Lines(a.log.String()) {
			has := 0
			for _, w := range want {
				if strings.Contains(line, w) {
					has++
				}
			}
			if has == len(want) {
				return true
			}
		}
		return false
	})
}

// ask runs a verb beside the plugin.
func (a *testAgent) ask(args ...string) (string, error) {
	a.Helper()
	out, err := exec.CommandContext(a.Context(), binary, append(args, "--state-dir="+a.dir)...).CombinedOutput()
	return string(out), err
}

// report is what inspect says now.
func reportOf(a *testAgent) (r report.Report) {
	a.Helper()
	out, err := a.ask("inspect", "--json")
	if err != nil || json.Unmarshal([]byte(out), &r) != nil {
		a.Fatalf("%v\n%s", err, out)
	}
	return r
}

// buffer is a bytes.Buffer for concurrent use.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
