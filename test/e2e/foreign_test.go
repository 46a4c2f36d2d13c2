//go:build e2e

package e2e

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"
	"github.com/hashicorp/nomad/plugins/shared/structs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	pluginprocess "github.com/tandem-gpu/tandem/internal/nomadadapter/process"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// foreignGPUs is the variable with the UUIDs that the plugin of another make offers, each of them healthy, whatever the state of the machine is.
const foreignGPUs = "E2E_FOREIGN_GPUS"

// TestMain is also the plugin of another make: Nomad starts a copy of this program as its device plugin.
func TestMain(m *testing.M) {
	if os.Getenv(base.Handshake.MagicCookieKey) == base.Handshake.MagicCookieValue {
		_ = pluginprocess.Serve(context.Background(), &foreignNomad{}, hclog.New(&hclog.LoggerOptions{Output: os.Stderr, JSONFormat: true}))
		return
	}
	os.Exit(m.Run())
}

// uuids are those of a machine's GPUs.
func uuids(t *testing.T, m *simdriver.Machine) (ids []string) {
	t.Helper()
	slots, err := m.Slots()
	if err != nil {
		t.Fatal(err)
	}
	for _, slot := range slots {
		ids = append(ids, m.UUID(slot))
	}
	return ids
}

// foreignNomad is a device plugin as one would write it from Nomad's example.
type foreignNomad struct{}

func (*foreignNomad) PluginInfo() (*base.PluginInfoResponse, error) {
	return &base.PluginInfoResponse{
		Type: base.PluginTypeDevice, PluginApiVersions: []string{device.ApiVersion010}, PluginVersion: "0.1.0", Name: "foreign-gpu",
	}, nil
}

func (*foreignNomad) ConfigSchema() (*hclspec.Spec, error) {
	return hclspec.NewObject(map[string]*hclspec.Spec{"ignored_gpu_ids": hclspec.NewAttr("ignored_gpu_ids", "list(string)", false)}), nil
}

func (*foreignNomad) SetConfig(*base.Config) error { return nil }

func (*foreignNomad) ServerOption() grpc.ServerOption { return grpc.MaxRecvMsgSize(1 << 20) }

func (*foreignNomad) Fingerprint(ctx context.Context) (<-chan *device.FingerprintResponse, error) {
	g := &device.DeviceGroup{
		Vendor: "nvidia", Type: "gpu", Name: "NVIDIA H100 80GB HBM3",
		Attributes: map[string]*structs.Attribute{"memory": structs.NewIntAttribute(81559, structs.UnitMiB), "display_state": structs.NewStringAttribute("1")},
	}
	for id := range strings.SplitSeq(os.Getenv(foreignGPUs), ",") {
		g.Devices = append(g.Devices, &device.Device{ID: id, Healthy: true})
	}
	out := make(chan *device.FingerprintResponse, 1)
	out <- device.NewFingerprint(g)
	return out, nil
}

func (*foreignNomad) Reserve(ids []string) (*device.ContainerReservation, error) {
	return &device.ContainerReservation{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")}}, nil
}

func (*foreignNomad) Stats(context.Context, time.Duration) (<-chan *device.StatsResponse, error) {
	return make(chan *device.StatsResponse), nil
}

// foreignKubernetes is a device plugin of the kubelet as one would write it from the documentation.
type foreignKubernetes struct {
	v1beta1.UnimplementedDevicePluginServer
	ids []string
}

// startForeignKubernetes registers nvidia.com/gpu with all GPUs of a machine, as they are now. stop ends it.
func startForeignKubernetes(t *testing.T, m *simdriver.Machine) (stop func()) {
	t.Helper()
	socket := filepath.Join(v1beta1.DevicePluginPath, "foreign.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(s, &foreignKubernetes{ids: uuids(t, m)})
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	conn, err := grpc.NewClient("unix:"+v1beta1.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, err = v1beta1.NewRegistrationClient(conn).Register(t.Context(), &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: "foreign.sock", ResourceName: gpuResource,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s.Stop
}

func (*foreignKubernetes) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{}, nil
}

func (f *foreignKubernetes) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	r := &v1beta1.ListAndWatchResponse{}
	for _, id := range f.ids {
		r.Devices = append(r.Devices, &v1beta1.Device{ID: id, Health: v1beta1.Healthy})
	}
	if err := stream.Send(r); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (*foreignKubernetes) Allocate(_ context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	all := &v1beta1.AllocateResponse{}
	for _, c := range r.GetContainerRequests() {
		all.ContainerResponses = append(all.ContainerResponses, &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(c.GetDevicesIds(), ",")},
		})
	}
	return all, nil
}
