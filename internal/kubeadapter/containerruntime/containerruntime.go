// Package containerruntime asks the container runtime of a node for its version and its settings of CDI, by the container runtime
// interface (CRI, k8s.io/cri-api v1).
//
// It decodes the two messages itself: generated code of all messages of the CRI would add 0.6 MB to the binary and 0.2 MB to the heap
// of every agent, most of which never ask.
package containerruntime

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// timeout limits Read. A runtime responds in milliseconds.
const timeout = time.Second

// Info is what a runtime reports.
type Info struct {
	Name, Version string   // "containerd", "v2.0.1"
	CDI           *bool    // whether CDI is switched on; nil = it has no switch, or does not report it
	Folders       []string // of CDI specifications; nil = not reported

	DefaultRuntime string   // name of the low-level runtime of containers without a runtime class; "" = not reported
	Runtimes       []string // names of the low-level runtimes, sorted; nil = not reported
}

// Read asks the runtime behind a socket, for at most a second.
func Read(ctx context.Context, socket string) (Info, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
	if err != nil {
		return Info{}, err
	}
	defer func() { _ = conn.Close() }()
	// VersionResponse: runtime_name = 2, runtime_version = 3. StatusRequest: verbose = 1. StatusResponse: map info = 2.
	version, err := call(ctx, conn, "Version", nil)
	if err != nil {
		return Info{}, err
	}
	info := Info{Name: version.text(2), Version: version.text(3)}
	response, err := call(ctx, conn, "Status", protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1))
	if err != nil {
		return info, err
	}
	for _, raw := range response[2] {
		if entry, err := decode(raw); err == nil && entry.text(1) == "config" {
			info.parseConfig([]byte(entry.text(2)))
		}
	}
	return info, nil
}

// parseConfig reads the configuration of containerd (pluginconfig.Config in its JSON), of which 2.4 and later have no switch, or
// that of CRI-O (crio: its RuntimeConfig, with the names of Go).
func (info *Info) parseConfig(text []byte) {
	type runtimes = map[string]json.RawMessage
	var c struct {
		EnableCDI   *bool    `json:"enableCDI"`
		CDISpecDirs []string `json:"cdiSpecDirs"`
		Containerd  struct {
			DefaultRuntimeName string   `json:"defaultRuntimeName"`
			Runtimes           runtimes `json:"runtimes"`
		} `json:"containerd"`
		CRIO struct {
			CDISpecDirs    []string
			DefaultRuntime string
			Runtimes       runtimes
		} `json:"crio"`
	}
	if json.Unmarshal(text, &c) != nil {
		return
	}
	if c.CDISpecDirs == nil {
		c.CDISpecDirs = c.CRIO.CDISpecDirs
	}
	info.CDI, info.Folders = c.EnableCDI, c.CDISpecDirs
	info.DefaultRuntime = cmp.Or(c.Containerd.DefaultRuntimeName, c.CRIO.DefaultRuntime)
	for _, r := range []runtimes{c.Containerd.Runtimes, c.CRIO.Runtimes} {
		info.Runtimes = append(info.Runtimes, slices.Sorted(maps.Keys(r))...)
	}
}

// message has the fields of a message that are strings or messages, by number.
type message map[protowire.Number][][]byte

// text returns the value of a string.
func (m message) text(number protowire.Number) string {
	if values := m[number]; len(values) > 0 {
		return string(values[len(values)-1])
	}
	return ""
}

func decode(raw []byte) (message, error) {
	m := message{}
	for len(raw) > 0 {
		number, kind, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		raw = raw[n:]
		if kind == protowire.BytesType {
			if value, n := protowire.ConsumeBytes(raw); n >= 0 {
				m[number] = append(m[number], value)
			}
		}
		if n = protowire.ConsumeFieldValue(number, kind, raw); n < 0 {
			return nil, protowire.ParseError(n)
		}
		raw = raw[n:]
	}
	return m, nil
}

// call calls a method of the runtime service.
func call(ctx context.Context, conn *grpc.ClientConn, method string, request []byte) (message, error) {
	var response []byte
	if err := conn.Invoke(ctx, "/runtime.v1.RuntimeService/"+method, request, &response); err != nil {
		if timeout := ended(ctx); timeout != nil {
			return nil, fmt.Errorf("container runtime: %s: %w", method, timeout)
		}
		return nil, fmt.Errorf("container runtime: %s: %s", method, status.Convert(err).Message())
	}
	m, err := decode(response)
	if err != nil {
		return nil, fmt.Errorf("container runtime: %s: %w", method, err)
	}
	return m, nil
}

// ended returns why a call can't have a response any more; nil if it can. gRPC sends the deadline to the runtime, which resets the stream at
// that time. The reset may arrive before the timer of this process fires, and then ctx has no error yet.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// rawCodec passes encoded messages as they are.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...) // gRPC uses the buffer again
	return nil
}
