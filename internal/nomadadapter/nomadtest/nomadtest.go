// Package nomadtest is the go-plugin side of a Nomad client, for tests: it starts the nomad-gpu binary, or serves a plugin
// of this process over gRPC.
package nomadtest

import (
	"context"
	"errors"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/process"
)

// NoAgent is in the environment of a plugin for which no Nomad agent answers, whatever runs beside the test: nothing listens at tcpmux.
const NoAgent = "NOMAD_ADDR=http://127.0.0.1:1"

// NewClient returns a client that starts cmd as Nomad starts a device plugin, and logs to log. Kill it. If cmd.Env is set,
// it is the whole environment; else NoAgent is in it.
func NewClient(cmd *exec.Cmd, log hclog.Logger) *plugin.Client {
	if cmd.Env == nil {
		cmd.Env = append(os.Environ(), NoAgent)
	}
	return plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  base.Handshake,
		Plugins:          plugins(nil),
		Cmd:              cmd,
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		Logger:           log,
		SkipHostEnv:      true, // else os.Environ is appended, and has precedence
	})
}

// Dispense starts the plugin of a client, if it is not running, and returns it.
func Dispense(client *plugin.Client) (device.DevicePlugin, error) {
	protocol, err := client.Client()
	if err != nil {
		return nil, err
	}
	raw, err := protocol.Dispense(base.PluginTypeDevice)
	if err != nil {
		return nil, err
	}
	return raw.(device.DevicePlugin), nil
}

// Serve serves p over gRPC until the test ends, and returns it as Nomad uses it.
func Serve(t testing.TB, p process.Plugin) device.DevicePlugin {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	conn := Connect(t, p)
	t.Cleanup(cancel)
	served, err := (&device.PluginDevice{}).GRPCClient(ctx, nil, conn)
	if err != nil {
		t.Fatal(err)
	}
	return served.(device.DevicePlugin)
}

// Connect serves p over gRPC and a socket until the test ends, and returns a client's connection.
func Connect(t testing.TB, p process.Plugin) *grpc.ClientConn {
	t.Helper()
	dir, err := os.MkdirTemp("", "nomad") // t.TempDir's path can be longer than a socket's may be
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "plugin")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server, ended := grpc.NewServer(p.ServerOption()), make(chan error, 1)
	for _, plug := range plugins(p) {
		if err := plug.(plugin.GRPCPlugin).GRPCServer(nil, server); err != nil {
			t.Fatal(err)
		}
	}
	go func() { ended <- server.Serve(listener) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32))) // as go-plugin's client
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := conn.Close()
		server.Stop()
		if err := errors.Join(closed, <-ended, os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// SetConfig calls SetConfig of p with a config block: a map or a struct with codec tags, encoded as Nomad encodes it.
func SetConfig(p device.DevicePlugin, block any) error {
	var config []byte
	if err := base.MsgPackEncode(&config, block); err != nil {
		return err
	}
	return p.SetConfig(&base.Config{ApiVersion: device.ApiVersion010, PluginConfig: config})
}

// plugins returns go-plugin's plugin set; impl is nil for a client.
func plugins(impl device.DevicePlugin) map[string]plugin.Plugin {
	return map[string]plugin.Plugin{
		base.PluginTypeBase:   &base.PluginBase{Impl: impl},
		base.PluginTypeDevice: &device.PluginDevice{Impl: impl},
	}
}
