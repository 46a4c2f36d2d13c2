package nomadadapter

import (
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/device/proto"
	"github.com/hashicorp/nomad/plugins/shared/structs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// statsMethod is the call that opens a stream of statistics.
const statsMethod = "/hashicorp.nomad.plugins.device.DevicePlugin/Stats"

// ServerOption makes a gRPC server encode the statistics of each device once. The server of Nomad's device.PluginDevice
// converts and encodes those of each instance, so that 1,600 shares of 16 GPUs cost as much as 1,600 GPUs. The client
// receives the same messages from both.
func (p *Plugin) ServerOption() grpc.ServerOption { return encodeOnce(p) }

// encodeOnce makes a gRPC server call Stats of p itself.
func encodeOnce(p device.DevicePlugin) grpc.ServerOption {
	return grpc.ChainStreamInterceptor(
		func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			if info.FullMethod == statsMethod {
				return serveStats(p, stream)
			}
			return handler(srv, stream)
		})
}

// serveStats answers one call of Stats.
func serveStats(p device.DevicePlugin, stream grpc.ServerStream) error {
	request := &proto.StatsRequest{}
	if err := stream.RecvMsg(request); err != nil {
		return err
	}
	ctx := stream.Context()
	responses, err := p.Stats(ctx, request.GetCollectionInterval().AsDuration())
	if err != nil {
		return err
	}
	var e statsEncoder
	for {
		select {
		case r := <-responses:
			m, err := e.message(r)
			if err != nil {
				return err
			}
			if err := stream.SendMsg(m); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// statsEncoder encodes the responses of one stream. It reuses its memory: a message is valid until the next one.
type statsEncoder struct {
	groups [][]byte // encoded instances of each group
}

// message returns a response as Nomad's message, in which the instances of a group are encoded. Instances with the same
// *device.DeviceStats are encoded once.
func (e *statsEncoder) message(r *device.StatsResponse) (*proto.StatsResponse, error) {
	m := &proto.StatsResponse{}
	encoded := map[*device.DeviceStats][]byte{}
	for i, g := range r.Groups {
		if i == len(e.groups) {
			e.groups = append(e.groups, nil)
		}
		var err error
		if e.groups[i], err = appendInstances(e.groups[i][:0], g, encoded); err != nil {
			return nil, err
		}
		m.Groups = append(m.Groups, &proto.DeviceGroupStats{
			Vendor: g.Vendor, Type: g.Type, Name: g.Name,
			XXX_unrecognized: e.groups[i], // what is encoded already: protobuf appends it to the fields
		})
	}
	return m, nil
}

// appendInstances appends the field InstanceStats: a map, which is a list of messages with key (1) and value (2). It encodes the
// devices that are not encoded yet.
func appendInstances(b []byte, g *device.DeviceGroupStats, encoded map[*device.DeviceStats][]byte) ([]byte, error) {
	const instanceStats, key, value = 4, 1, 2
	for id, d := range g.InstanceStats {
		stats, ok := encoded[d]
		if !ok {
			var err error
			if stats, err = encodeDeviceStats(d); err != nil {
				return nil, err
			}
			encoded[d] = stats
		}
		b = protowire.AppendTag(b, instanceStats, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(protowire.SizeTag(key)+protowire.SizeBytes(len(id))+protowire.SizeTag(value)+protowire.SizeBytes(len(stats))))
		b = protowire.AppendString(protowire.AppendTag(b, key, protowire.BytesType), id)
		b = protowire.AppendBytes(protowire.AppendTag(b, value, protowire.BytesType), stats)
	}
	return b, nil
}

// encodeDeviceStats encodes the statistics of one device as Nomad's server does.
func encodeDeviceStats(d *device.DeviceStats) ([]byte, error) {
	return protobuf.Marshal(protoadapt.MessageV2Of(&proto.DeviceStats{
		Summary:   structs.ConvertStructStatValue(d.Summary),
		Stats:     structs.ConvertStructStatObject(d.Stats),
		Timestamp: timestamppb.New(d.Timestamp),
	}))
}
