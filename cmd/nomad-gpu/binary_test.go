package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/test/binaries"
)

// binary is the program as "make build" builds it.
var binary string

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("8") // the tests wait more than they compute
	}
	os.Exit(func() int {
		if block := os.Getenv(asAgent); block != "" {
			fmt.Fprintln(os.Stderr, beAgent(block))
			return 1
		}
		dir, err := binaries.Dir()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		binary = filepath.Join(dir, "nomad-gpu")
		return m.Run()
	}())
}

const patience = 20 * time.Second

// await waits until a condition holds.
func await(t testing.TB, what string, within time.Duration, holds func() bool) {
	t.Helper()
	deadline := time.After(within)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not within %s", what, within)
		}
	}
}

// start launches the binary as Nomad does, with the environment of this test.
func start(t testing.TB, env ...string) (device.DevicePlugin, *plugin.Client, *exec.Cmd) {
	return launch(t, hclog.NewNullLogger(), env...)
}

// launch is start with a log. It adds env to the environment of this test.
func launch(t testing.TB, log hclog.Logger, env ...string) (device.DevicePlugin, *plugin.Client, *exec.Cmd) {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), env...)
	client := newClient(cmd, log)
	t.Cleanup(client.Kill)
	p, err := dispense(client)
	if err != nil {
		t.Fatal(err)
	}
	return p, client, cmd
}

func newClient(cmd *exec.Cmd, log hclog.Logger) *plugin.Client {
	return plugin.NewClient(&plugin.ClientConfig{
		Cmd:              cmd,
		SkipHostEnv:      cmd.Env != nil, // else the client appends os.Environ, which has precedence
		HandshakeConfig:  base.Handshake,
		Plugins:          map[string]plugin.Plugin{base.PluginTypeDevice: &device.PluginDevice{}},
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		Logger:           log,
	})
}

// dispense starts the plugin and shakes hands.
func dispense(client *plugin.Client) (device.DevicePlugin, error) {
	rpc, err := client.Client()
	if err != nil {
		return nil, err
	}
	raw, err := rpc.Dispense(base.PluginTypeDevice)
	if err != nil {
		return nil, err
	}
	return raw.(device.DevicePlugin), nil
}

func configure(t testing.TB, p device.DevicePlugin, keys map[string]any) {
	t.Helper()
	if err := setConfig(p, keys); err != nil {
		t.Fatal(err)
	}
}

func setConfig(p device.DevicePlugin, keys map[string]any) error {
	var raw []byte
	if err := base.MsgPackEncode(&raw, keys); err != nil {
		return err
	}
	return p.SetConfig(&base.Config{PluginConfig: raw, ApiVersion: device.ApiVersion010})
}

func receive[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	select {
	case v, ok := <-ch:
		if !ok {
			t.Fatal("the stream was closed")
		}
		return v
	case <-time.After(patience):
		t.Fatal("nothing was sent")
	}
	panic("unreachable")
}

func TestCommands(t *testing.T) {
	renamed := filepath.Join(t.TempDir(), "nomad-device-nvidia")
	if err := os.Symlink(binary, renamed); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		file           string
		args           []string
		code           int
		stdout, stderr string // a part of it; "" = nothing
	}{
		"from a terminal": {binary, nil, 2, "", `plugin "nomad-gpu" {`},
		"renamed":         {renamed, nil, 2, "", `plugin "nomad-device-nvidia" {`},
		"version":         {renamed, []string{"version"}, 0, "nomad-gpu 2.0.0\n", ""},
		"help":            {binary, []string{"help"}, 0, "ignored_gpu_ids", ""},
		"help on health":  {binary, []string{"help"}, 0, "recovery_dwell", ""},
		"no verb":         {binary, []string{"--state-dir=/nowhere"}, 2, "", "nomad-gpu: want a command: see nomad-gpu help\n"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(tc.file, tc.args...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if code := cmd.ProcessState.ExitCode(); code != tc.code {
				t.Errorf("exit code %d, want %d", code, tc.code)
			}
			for _, s := range []struct{ name, got, want string }{
				{"stdout", stdout.String(), tc.stdout}, {"stderr", stderr.String(), tc.stderr},
			} {
				if !strings.Contains(s.got, s.want) || s.want == "" && s.got != "" {
					t.Errorf("%s is %q, want %q", s.name, s.got, s.want)
				}
			}
		})
	}
}

// With the cookie it is a plugin whatever the arguments, and its first byte on stdout is the handshake's.
func TestHandshake(t *testing.T) {
	for _, args := range [][]string{nil, {"help"}, {"inspect", "--json"}, {"nonsense", "-x"}} {
		cmd := exec.Command(binary, args...)
		cmd.Env = append(os.Environ(), base.Handshake.MagicCookieKey+"="+base.Handshake.MagicCookieValue,
			"PLUGIN_PROTOCOL_VERSIONS=2", "TMPDIR="+t.TempDir(), "NOMAD_LOG_LEVEL=trace", "GRPC_GO_LOG_SEVERITY_LEVEL=info")
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, 256)
		n, err := stdout.Read(line)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(line[:n]); !strings.HasPrefix(got, "1|2|unix|") || !strings.HasSuffix(got, "|grpc|\n") {
			t.Errorf("%q: stdout begins with %q", args, got)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
	}
}

// A machine without a driver: an empty list within the second, and nothing that looks like a fault.
func TestWithoutDriver(t *testing.T) {
	begin := time.Now()
	p, client, cmd := start(t)
	configure(t, p, map[string]any{"driver_root": "/nowhere", "state_dir": t.TempDir()})
	ch, err := p.Fingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if r := receive(t, ch); r.Error != nil || len(r.Devices) != 0 {
		t.Errorf("got %v, %v", r.Devices, r.Error)
	}
	if d := time.Since(begin); d > time.Second {
		t.Errorf("the first list came %s after the start", d)
	}
	begin = time.Now()
	client.Kill()
	if d := time.Since(begin); d >= 2*time.Second {
		t.Errorf("the end took %s", d)
	}
	if !cmd.ProcessState.Success() {
		t.Errorf("ended with %s", cmd.ProcessState)
	}
}

// The one that started the plugin is killed. The plugin follows, and takes its socket along.
func TestParentDeath(t *testing.T) {
	t.Parallel()
	tmp := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	parent := exec.CommandContext(ctx, "sh", "-c", binary+` & echo $!; wait`)
	parent.Env = append(os.Environ(), base.Handshake.MagicCookieKey+"="+base.Handshake.MagicCookieValue,
		"PLUGIN_PROTOCOL_VERSIONS=2", "TMPDIR="+tmp)
	out, err := os.Create(filepath.Join(t.TempDir(), "stdout")) // not a pipe, which would end the plugin too
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	parent.Stdout = out
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	sockets := func() int {
		entries, err := os.ReadDir(tmp)
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	var pid int
	await(t, "handshake", patience, func() bool {
		text, err := os.ReadFile(out.Name())
		if err != nil {
			t.Fatal(err)
		}
		n, _ := fmt.Sscanf(string(text), "%d\n1|2|unix|", &pid)
		return n == 1 && strings.Contains(string(text), "|grpc|") && sockets() > 0
	})
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	await(t, "end of the orphan", 5*time.Second, func() bool { return gone(pid) })
	if n := sockets(); n != 0 {
		t.Errorf("%d files are left in TMPDIR", n)
	}
}

// gone reports whether a process has ended; what is left of one that nobody waits for counts as ended.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}
