package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// What stands for lost lines is a line as Nomad reads them.
func TestLostLines(t *testing.T) {
	var line struct {
		Level   string `json:"@level"`
		Message string `json:"@message"`
		At      string `json:"@timestamp"`
		Lines   int    `json:"lines"`
	}
	if err := json.Unmarshal(lostLines(7), &line); err != nil {
		t.Fatal(err)
	}
	if line.Level != "warn" || line.Lines != 7 || line.At == "" || !strings.Contains(line.Message, "lines lost") {
		t.Errorf("%+v", line)
	}
}

// A Nomad that does not read its plugin's log has a plugin that works, hears signals, and ends when it is asked.
func TestNobodyReadsTheLog(t *testing.T) {
	for name, end := range map[string]func(*testAgent){
		"asked by Nomad": func(a *testAgent) { a.client.Kill() },
		"SIGTERM":        func(a *testAgent) { _ = a.cmd.Process.Signal(syscall.SIGTERM) }, // Wait fails if this does
	} {
		t.Run(name, func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			a := &testAgent{TB: t, dir: shortDir(t), log: &buffer{}}
			t.Setenv("TMPDIR", shortDir(t))
			a.DevicePlugin, a.client, a.cmd = unheard(t)
			ended := make(chan error, 1)
			go func() { ended <- a.cmd.Wait() }()
			configure(t, a, keys(m, a.dir))
			a.listen()
			a.healthy(8, 8)
			for range 3 {
				if err := a.cmd.Process.Signal(syscall.SIGHUP); err != nil {
					t.Fatal(err)
				}
			}
			if err := m.XID(2, 95); err != nil {
				t.Fatal(err)
			}
			a.healthy(8, 7)
			if _, err := a.Reserve([]string{m.UUID(0)}); err != nil {
				t.Error(err)
			}
			begin := time.Now()
			end(a)
			err := receive(t, ended)
			t.Logf("the end took %s", time.Since(begin))
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// unheard starts the plugin with a stderr that is full and that nobody reads.
func unheard(t *testing.T) (device.DevicePlugin, *plugin.Client, *exec.Cmd) {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), base.Handshake.MagicCookieKey+"="+base.Handshake.MagicCookieValue, "PLUGIN_PROTOCOL_VERSIONS=2")
	unread, stderr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unread.Close() })
	fill(t, stderr)
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	_ = stderr.Close() // the plugin has it
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(line, "|")
	if len(parts) < 5 {
		t.Fatalf("the handshake is %q", line)
	}
	client := plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  base.Handshake,
		Plugins:          map[string]plugin.Plugin{base.PluginTypeDevice: &device.PluginDevice{}},
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		Logger:           hclog.NewNullLogger(),
		Reattach: &plugin.ReattachConfig{
			Protocol: plugin.ProtocolGRPC, ProtocolVersion: 2, Pid: cmd.Process.Pid,
			Addr: &net.UnixAddr{Name: parts[3], Net: "unix"},
		},
	})
	p, err := dispense(client)
	if err != nil {
		t.Fatal(err)
	}
	return p, client, cmd
}

// fill writes into a pipe until there is no room.
func fill(t *testing.T, pipe *os.File) {
	t.Helper()
	// Another open file: what does not block here blocks whoever has the first.
	fd, err := syscall.Open(fmt.Sprintf("/proc/self/fd/%d", pipe.Fd()), syscall.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(fd) }()
	for _, size := range []int{4096, 1} {
		for err = nil; err == nil; {
			_, err = syscall.Write(fd, make([]byte, size))
		}
		if !errors.Is(err, syscall.EAGAIN) {
			t.Fatal(err)
		}
	}
}
