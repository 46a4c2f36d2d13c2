// Package process is the process of a device plugin that a Nomad agent started: go-plugin's handshake, server and socket, and
// the agent as its parent process.
package process

import (
	"context"
	"errors"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"google.golang.org/grpc"
)

// Launched reports whether Nomad started this process, by go-plugin's handshake in its environment.
func Launched(getenv func(string) string) bool {
	return getenv(base.Handshake.MagicCookieKey) == base.Handshake.MagicCookieValue
}

// Plugin is a device plugin with an option for the server that it is served by.
type Plugin interface {
	device.DevicePlugin
	ServerOption() grpc.ServerOption
}

var errNotServed = errors.New("the plugin could not be served to Nomad")

// Serve serves p until Nomad ends it or ctx ends. It is device.Serve with ctx, whose end also removes the socket, with the option
// of p, and with a socket folder of this process. Writes to os.Stdout and os.Stderr are lost from now on: make log before. An error means that p
// was not served; the reason is in the log.
func Serve(ctx context.Context, p Plugin, log hclog.Logger) error {
	served := false
	defer ownSocketDir()()
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig: base.Handshake,
		Plugins: map[string]plugin.Plugin{
			base.PluginTypeBase:   &base.PluginBase{Impl: p},
			base.PluginTypeDevice: &device.PluginDevice{Impl: p},
		},
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			served = true
			s := plugin.DefaultGRPCServer(append(opts, p.ServerOption()))
			context.AfterFunc(ctx, s.Stop)
			return s
		},
		Logger: log,
	})
	if !served {
		return errNotServed
	}
	return nil
}
