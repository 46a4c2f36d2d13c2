//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// stockPlugin is a device plugin of another make, as one would write it from the documentation: it registers once, sends its list when
// the list changes, and prefers devices in the order of their ids. It has no idea of DRA.
type stockPlugin struct {
	v1beta1.UnimplementedDevicePluginServer
	list   *watch.Value[[]*v1beta1.Device]
	server *grpc.Server
}

// startStockPlugin registers nvidia.com/gpu with healthy devices.
func startStockPlugin(t *testing.T, ids ...string) *stockPlugin {
	t.Helper()
	const socket = "stock.sock"
	_ = os.Remove(filepath.Join(pluginFolder, socket)) // of the one before
	l, err := net.Listen("unix", filepath.Join(pluginFolder, socket))
	if err != nil {
		t.Fatal(err)
	}
	p := &stockPlugin{list: watch.NewValue(listOf(v1beta1.Healthy, ids)), server: grpc.NewServer()}
	v1beta1.RegisterDevicePluginServer(p.server, p)
	go func() { _ = p.server.Serve(l) }()
	t.Cleanup(p.server.Stop)
	conn, err := grpc.NewClient("unix:"+v1beta1.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, err = v1beta1.NewRegistrationClient(conn).Register(t.Context(), &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: socket, ResourceName: gpuResource,
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func listOf(health string, ids []string) (devices []*v1beta1.Device) {
	for _, id := range ids {
		devices = append(devices, &v1beta1.Device{ID: id, Health: health})
	}
	return devices
}

// stop ends the plugin as a kill would: its connections end, and no farewell is sent.
func (p *stockPlugin) stop() { p.server.Stop() }

func (p *stockPlugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

func (p *stockPlugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	for devices := range p.list.Watch(stream.Context()) {
		if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
	}
	return nil
}

func (p *stockPlugin) GetPreferredAllocation(_ context.Context, r *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	answer := &v1beta1.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		var ids []string
		for _, d := range p.list.Load() {
			for _, available := range c.GetAvailableDeviceIDs() {
				if d.GetID() == available && len(ids) < int(c.GetAllocationSize()) {
					ids = append(ids, available)
				}
			}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return answer, nil
}

func (p *stockPlugin) Allocate(ctx context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	return (&foreignKubernetes{}).Allocate(ctx, r)
}

// stockDriver is a DRA driver of another make: it prepares what the scheduler has allocated, with a CDI specification for each claim. It
// has no idea of device plugins. Its slices are written by hand.
type stockDriver struct {
	drav1.UnimplementedDRAPluginServer
	registerapi.UnimplementedRegistrationServer
	name string
	gpus map[string]string // UUID by name of the device
}

// startStockDriver registers a DRA driver with the first node's kubelet.
func startStockDriver(t *testing.T, name string, gpus map[string]string) *stockDriver {
	t.Helper()
	d := &stockDriver{name: name, gpus: gpus}
	folder := filepath.Join("/var/lib/kubelet/plugins", name)
	if err := errors.Join(os.MkdirAll(folder, 0o750), os.MkdirAll("/var/run/cdi", 0o755)); err != nil {
		t.Fatal(err)
	}
	serve := func(socket string, register func(*grpc.Server)) {
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		register(s)
		go func() { _ = s.Serve(l) }()
		t.Cleanup(s.Stop)
	}
	serve(d.endpoint(), func(s *grpc.Server) { drav1.RegisterDRAPluginServer(s, d) })
	serve("/var/lib/kubelet/plugins_registry/"+name+"-reg.sock", func(s *grpc.Server) { registerapi.RegisterRegistrationServer(s, d) })
	return d
}

func (d *stockDriver) endpoint() string { return "/var/lib/kubelet/plugins/" + d.name + "/dra.sock" }

func (d *stockDriver) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: d.name, Endpoint: d.endpoint(), SupportedVersions: []string{drav1.DRAPluginService},
	}, nil
}

func (d *stockDriver) NotifyRegistrationStatus(context.Context, *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}

func (d *stockDriver) NodePrepareResources(_ context.Context, r *drav1.NodePrepareResourcesRequest) (*drav1.NodePrepareResourcesResponse, error) {
	answer := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for _, c := range r.GetClaims() {
		devices, err := d.prepare(c)
		one := &drav1.NodePrepareResourceResponse{Devices: devices}
		if err != nil {
			one = &drav1.NodePrepareResourceResponse{Error: err.Error()}
		}
		answer.Claims[c.GetUid()] = one
	}
	return answer, nil
}

// prepare writes the specification of a claim. Its devices give a container the variable that a device plugin gives it.
func (d *stockDriver) prepare(c *drav1.Claim) (devices []*drav1.Device, err error) {
	claim, err := readClaim(c.GetNamespace(), c.GetName())
	if err != nil || claim.Status.Allocation == nil {
		return nil, errors.Join(fmt.Errorf("claim %s: %+v", c.GetName(), claim.Status), err)
	}
	spec := map[string]any{"cdiVersion": "0.6.0", "kind": "stock.example.com/claim"}
	var defined []any
	for _, r := range claim.Status.Allocation.Devices.Results {
		name := c.GetUid() + "-" + r.Device
		defined = append(defined, map[string]any{
			"name": name, "containerEdits": map[string]any{"env": []string{"NVIDIA_VISIBLE_DEVICES=" + d.gpus[r.Device]}},
		})
		devices = append(devices, &drav1.Device{
			RequestNames: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device, CdiDeviceIds: []string{"stock.example.com/claim=" + name},
		})
	}
	spec["devices"] = defined
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	return devices, os.WriteFile(d.specification(c), text, 0o644)
}

func (d *stockDriver) specification(c *drav1.Claim) string {
	return "/var/run/cdi/stock.example.com-claim_" + c.GetUid() + ".json"
}

func (d *stockDriver) NodeUnprepareResources(_ context.Context, r *drav1.NodeUnprepareResourcesRequest) (*drav1.NodeUnprepareResourcesResponse, error) {
	answer := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	for _, c := range r.GetClaims() {
		_ = os.Remove(d.specification(c)) // gone: this is a repetition
		answer.Claims[c.GetUid()] = &drav1.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}

// publish writes the one slice of a driver and the class that maps nvidia.com/gpu to it, as an administrator would by hand.
func (d *stockDriver) publish(t *testing.T, node string) {
	t.Helper()
	var devices []string
	for name := range d.gpus {
		devices = append(devices, "{name: "+name+"}")
	}
	must(t, "kubectl", "apply", "-f", render(t, "dra/stock.yaml", map[string]string{
		"DRIVER": d.name, "NODE": node, "DEVICES": strings.Join(devices, ", "),
	}))
}
