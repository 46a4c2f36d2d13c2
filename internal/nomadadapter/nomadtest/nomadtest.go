// Package nomadtest is the go-plugin side of a Nomad client, for tests: it starts the nomad-gpu binary, or serves a plugin
// of this process over gRPC.
package nomadtest

import (
	"os/exec"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
)

// NewClient returns a client that starts cmd as Nomad starts a device plugin, and logs to log. Kill it. If cmd.Env is set,
// it is the whole environment.
func NewClient(cmd *exec.Cmd, log hclog.Logger) *plugin.Client {
	return plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  base.Handshake,
		Plugins:          plugins(nil),
		Cmd:              cmd,
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		Logger:           log,
		SkipHostEnv:      cmd.Env != nil, // else os.Environ is appended, and has precedence
	})
}

// Dispense starts the plugin of a client, if it is not running, and returns it.
func Dispense(client *plugin.Client) (device.DevicePlugin, error) {
	protocol, err := client.Client()
	if err != nil {
		return nil, err
	}
	return dispense(protocol)
}

// Serve serves p over gRPC until the test ends, and returns it as Nomad uses it.
func Serve(t testing.TB, p device.DevicePlugin) device.DevicePlugin {
	t.Helper()
	client, server := plugin.TestPluginGRPCConn(t, false, plugins(p))
	t.Cleanup(func() {
		if err := client.Close(); err != nil { // also stops the server
			t.Error(err)
		}
		<-server.DoneCh
	})
	served, err := dispense(client)
	if err != nil {
		t.Fatal(err)
	}
	return served
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

func dispense(protocol plugin.ClientProtocol) (device.DevicePlugin, error) {
	raw, err := protocol.Dispense(base.PluginTypeDevice)
	if err != nil {
		return nil, err
	}
	return raw.(device.DevicePlugin), nil
}
