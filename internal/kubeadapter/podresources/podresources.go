// Package podresources lists which pods hold which device IDs, from the kubelet's pod-resources API (v1).
package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// DefaultSocket is the socket of the API of a kubelet with the default --root-dir.
const DefaultSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"

// maxAnswer limits the size of an answer in bytes. A pod takes some hundred. The kubelet does not apply gRPC's default limit of
// 4 MiB.
const maxAnswer = 16 << 20

// Answer is one answer of the kubelet. It has the pods that the kubelet knows, which are not all before it has received them
// from the API server, and of init containers only those that continue to run.
type Answer struct {
	Pods    int      // that the kubelet knows, with devices or without
	Devices []Device // each device ID of a resource once
	Claims  []Claim  // of containers
	Names   []string // of the pods, "namespace/name"
}

// Device is a device ID that a container of a pod holds.
type Device struct {
	Pod      string // "namespace/name"
	Resource string // "nvidia.com/gpu"
	ID       string
	NUMANode int // -1 = no affinity

	Container string
}

// Claim is a device that a container of a pod has through a resource claim.
type Claim struct {
	Pod       string // "namespace/name"
	Container string
	Namespace string   // of the claim
	Name      string   // of the claim
	Driver    string   // of the device: "gpu.nvidia.com"
	Pool      string   // of the device: the node's name
	Device    string   // as the driver names it
	CDI       []string // qualified names of its CDI devices
}

// ErrNoDirectory means that the directory of the socket is missing: it is not mounted, or the kubelet has another --root-dir.
var ErrNoDirectory = errors.New("no directory of the pod-resources API")

// List calls List of the API. ctx should have a deadline, because the server may never answer. An agent that gives devices out uses a Poller: a
// List at the wrong moment makes the kubelet lose what it is giving out.
func List(ctx context.Context, socket string) (Answer, error) {
	r, err := list(ctx, socket)
	if err != nil {
		return Answer{}, err
	}
	a := Answer{Pods: len(r.GetPodResources()), Devices: devices(r.GetPodResources()), Claims: claims(r)}
	for _, p := range r.GetPodResources() {
		a.Names = append(a.Names, nameOf(p))
	}
	return a, nil
}

// devicesOf calls Get of the API: the devices that a pod has now, without those of its ordinary init containers. Unlike List it changes nothing in
// the kubelet. A pod that the kubelet does not know is an error.
func devicesOf(ctx context.Context, socket, pod string) ([]Device, error) {
	namespace, name, _ := strings.Cut(pod, "/")
	r, err := call(ctx, socket, "get", podresources.PodResourcesListerClient.Get, &podresources.GetPodResourcesRequest{PodNamespace: namespace, PodName: name})
	if err != nil {
		return nil, err
	}
	return devices([]*podresources.PodResources{r.GetPodResources()}), nil
}

// list calls List of the API.
func list(ctx context.Context, socket string) (*podresources.ListPodResourcesResponse, error) {
	return call(ctx, socket, "list", podresources.PodResourcesListerClient.List, &podresources.ListPodResourcesRequest{})
}

// method is a method of the API.
type method[Request, Response any] func(podresources.PodResourcesListerClient, context.Context, *Request, ...grpc.CallOption) (*Response, error)

// call makes one call of the API; name is for its error. It fails with ErrNoDirectory if the directory of the socket is missing.
func call[Request, Response any](ctx context.Context, socket, name string, do method[Request, Response], r *Request) (*Response, error) {
	// A plain connection has the shorter error if the socket refuses.
	probe, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		if _, missing := os.Stat(filepath.Dir(socket)); errors.Is(missing, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", ErrNoDirectory, missing)
		}
		return nil, err
	}
	_ = probe.Close()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	response, err := do(podresources.NewPodResourcesListerClient(conn), ctx, r)
	if err != nil {
		return nil, &callError{name + " " + socket, status.Convert(err)}
	}
	return response, nil
}

// callError is the error of a call that was sent.
type callError struct {
	call   string
	status *status.Status
}

func (e *callError) Error() string { return e.call + ": " + e.status.Message() }

// answered reports whether an error is an answer of the kubelet, such as that it does not have a pod. Its errors have no code.
func answered(err error) bool {
	e, ok := errors.AsType[*callError](err)
	return ok && (e.status.Code() == codes.Unknown || e.status.Code() == codes.Unimplemented)
}

// devices returns the devices of pods.
func devices(pods []*podresources.PodResources) []Device {
	d := distinct{listed: map[string]bool{}}
	for _, p := range pods {
		for _, c := range p.GetContainers() {
			d.add(Device{Pod: nameOf(p), Container: c.GetName()}, c.GetDevices())
		}
	}
	return d.all
}

// distinct are devices, each device ID of a resource once: the kubelet lists a device once for each of its NUMA nodes, and the first one
// counts.
type distinct struct {
	all    []Device
	listed map[string]bool
}

// add adds devices of a container.
func (d *distinct) add(of Device, devices []*podresources.ContainerDevices) {
	for _, one := range devices {
		of.Resource, of.NUMANode = one.GetResourceName(), numaNode(one.GetTopology())
		for _, of.ID = range one.GetDeviceIds() {
			if key := of.Resource + " " + of.ID; !d.listed[key] {
				d.listed[key] = true
				d.all = append(d.all, of)
			}
		}
	}
}

func nameOf(p *podresources.PodResources) string { return p.GetNamespace() + "/" + p.GetName() }

// claims returns the devices that containers have through resource claims.
func claims(r *podresources.ListPodResourcesResponse) []Claim {
	var all []Claim
	for _, p := range r.GetPodResources() {
		for _, c := range p.GetContainers() {
			for _, d := range c.GetDynamicResources() {
				for _, res := range d.GetClaimResources() {
					one := Claim{
						Pod: nameOf(p), Container: c.GetName(), Namespace: d.GetClaimNamespace(), Name: d.GetClaimName(),
						Driver: res.GetDriverName(), Pool: res.GetPoolName(), Device: res.GetDeviceName(),
					}
					for _, cdi := range res.GetCdiDevices() {
						one.CDI = append(one.CDI, cdi.GetName())
					}
					all = append(all, one)
				}
			}
		}
	}
	return all
}

func numaNode(t *podresources.TopologyInfo) int {
	if nodes := t.GetNodes(); len(nodes) > 0 {
		return int(nodes[0].GetID())
	}
	return -1
}
