package nomadadapter

import (
	"context"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"google.golang.org/grpc"
)

// Launched reports whether Nomad started this process, going by its environment.
func Launched(getenv func(string) string) bool {
	return getenv(base.Handshake.MagicCookieKey) == base.Handshake.MagicCookieValue
}

// Serve answers Nomad until it wants no more or ctx ends. It is device.Serve with the latter added,
// which removes the socket too. From here on what is printed to os.Stdout and os.Stderr is lost: log
// must have been made before.
func Serve(ctx context.Context, p *Plugin, log hclog.Logger) {
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig: base.Handshake,
		Plugins: map[string]plugin.Plugin{
			base.PluginTypeBase:   &base.PluginBase{Impl: p},
			base.PluginTypeDevice: &device.PluginDevice{Impl: p},
		},
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			s := plugin.DefaultGRPCServer(opts)
			context.AfterFunc(ctx, s.Stop)
			return s
		},
		Logger: log,
	})
}
