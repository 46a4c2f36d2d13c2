package nomadadapter

import (
	"slices"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/device/proto"
	"github.com/hashicorp/nomad/plugins/shared/structs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
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
			if err := stream.SendMsg(e.message(r)); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// statsEncoder encodes the responses of one stream. It reuses its memory: a message is valid until the next one.
type statsEncoder struct {
	groups  [][]byte // encoded instances of each group
	devices []byte   // encoded statistics of the distinct devices of a group
	spans   map[*device.DeviceStats]span
}

// span is a part of statsEncoder.devices.
type span struct{ from, to int }

// message returns a response as Nomad's message, in which the instances of a group are encoded. Instances with the same
// *device.DeviceStats are encoded once.
func (e *statsEncoder) message(r *device.StatsResponse) *proto.StatsResponse {
	m := &proto.StatsResponse{}
	for i, g := range r.Groups {
		if i == len(e.groups) {
			e.groups = append(e.groups, nil)
		}
		e.groups[i] = e.appendInstances(e.groups[i][:0], g)
		m.Groups = append(m.Groups, &proto.DeviceGroupStats{
			Vendor: g.Vendor, Type: g.Type, Name: g.Name,
			XXX_unrecognized: e.groups[i], // what is encoded already: protobuf appends it to the fields
		})
	}
	return m
}

// appendInstances appends the field InstanceStats: a map, which is a list of messages with key (1) and value (2).
func (e *statsEncoder) appendInstances(b []byte, g *device.DeviceGroupStats) []byte {
	const instanceStats = 4
	if e.spans == nil {
		e.spans = map[*device.DeviceStats]span{}
	}
	e.devices = e.devices[:0]
	defer clear(e.spans)
	for id, d := range g.InstanceStats {
		at, ok := e.spans[d]
		if !ok {
			at.from = len(e.devices)
			e.devices = appendDeviceStats(e.devices, d)
			at.to = len(e.devices)
			e.spans[d] = at
		}
		value := e.devices[at.from:at.to]
		b = protowire.AppendTag(b, instanceStats, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(2*protowire.SizeTag(1)+protowire.SizeBytes(len(id))+protowire.SizeBytes(len(value))))
		b = appendString(b, 1, id)
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		b = protowire.AppendBytes(b, value)
	}
	return b
}

// appendDeviceStats appends the fields of a DeviceStats message.
func appendDeviceStats(b []byte, d *device.DeviceStats) []byte {
	const summary, stats, timestamp = 1, 2, 3
	b = appendMessage(b, summary, func(b []byte) []byte { return appendStatValue(b, d.Summary) })
	b = appendMessage(b, stats, func(b []byte) []byte { return appendAttributes(b, d.Stats) })
	return appendMessage(b, timestamp, func(b []byte) []byte { return appendTime(b, d.Timestamp) })
}

// appendAttributes appends the fields of a StatObject message, of which this plugin uses no nested ones.
func appendAttributes(b []byte, o *structs.StatObject) []byte {
	const attributes = 2
	for key, v := range o.Attributes {
		b = appendMessage(b, attributes, func(b []byte) []byte {
			b = appendString(b, 1, key)
			return appendMessage(b, 2, func(b []byte) []byte { return appendStatValue(b, v) })
		})
	}
	return b
}

// appendStatValue appends the fields of a StatValue message. Values of this plugin are integers, fractions of integers or
// texts, each in a message of its own.
func appendStatValue(b []byte, v *structs.StatValue) []byte {
	const numerator, denominator, text, unit, desc = 3, 4, 5, 7, 8
	b = appendInt(b, numerator, v.IntNumeratorVal)
	b = appendInt(b, denominator, v.IntDenominatorVal)
	if v.StringVal != nil {
		b = appendMessage(b, text, func(b []byte) []byte { return appendString(b, 1, *v.StringVal) })
	}
	b = appendString(b, unit, v.Unit)
	return appendString(b, desc, v.Desc)
}

// appendInt appends a message that contains an integer, unless v is nil.
func appendInt(b []byte, field protowire.Number, v *int64) []byte {
	if v == nil {
		return b
	}
	return appendMessage(b, field, func(b []byte) []byte { return appendVarint(b, 1, *v) })
}

// appendTime appends the fields of a Timestamp message.
func appendTime(b []byte, t time.Time) []byte {
	b = appendVarint(b, 1, t.Unix())
	return appendVarint(b, 2, int64(t.Nanosecond()))
}

// appendMessage appends a field that is a message, whose fields content appends.
func appendMessage(b []byte, field protowire.Number, content func([]byte) []byte) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	start := len(b)
	b = content(b)
	var size [10]byte // the longest varint
	return slices.Insert(b, start, protowire.AppendVarint(size[:0], uint64(len(b)-start))...)
}

// appendString appends a field that is a text; an empty one is left out.
func appendString(b []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, s)
}

// appendVarint appends a field that is an integer; 0 is left out.
func appendVarint(b []byte, field protowire.Number, v int64) []byte {
	if v == 0 {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.VarintType)
	return protowire.AppendVarint(b, uint64(v))
}
